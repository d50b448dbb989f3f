#include "tools/penstock-perf/link.h"

#include <sys/random.h>

#include <sstream>
#include <utility>

#include "common/env.h"
#include "transport/rdma/rdma.h"
#include "transport/tcp/tcp.h"

namespace penstock::perf {
namespace {

using nlohmann::json;
namespace tcp = transport::tcp;
namespace rdma = transport::rdma;

std::vector<std::string> SplitAtCommas(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

// As client and worker do.
int SpinMicroseconds() {
  return static_cast<int>(EnvInteger("PENSTOCK_RDMA_SPIN_US", -1));
}

// A field of a message, or a failure that names it.
template <typename T>
Result<T> Field(const json& message, const char* name) {
  try {
    return message.at(name).get<T>();
  } catch (const json::exception&) {
    return Fail(Code::kProtocol,
                std::string("The other end's message has no proper (") + name + ").");
  }
}

Result<std::unique_ptr<transport::Connection>> AcceptRdma(int arranging, const json& hello) {
  ASSIGN_OR_RETURN(auto verbs, rdma::LoadVerbs());
  ASSIGN_OR_RETURN(const auto rails, Field<std::string>(hello, "rails"));
  rdma::RdmaOptions options;
  options.spin_us = SpinMicroseconds();
  ASSIGN_OR_RETURN(auto listener, rdma::Listener::Open(verbs, options, SplitAtCommas(rails)));
  rdma::Token token;
  if (getrandom(token.data(), token.size(), 0) != ssize_t(token.size())) {
    return FailErrno("Cannot get random bytes");
  }
  const rdma::Offer& offer = listener->offer();
  RETURN_IF_ERROR(SendMessage(
      arranging, {{"port", offer.port}, {"addresses", offer.addresses}, {"token", token}}));
  return listener->Accept(token, UniqueFd(), Deadline::After(kPatienceMs));
}

Result<std::unique_ptr<transport::Connection>> DialRdma(int arranging, const std::string& from) {
  ASSIGN_OR_RETURN(auto verbs, rdma::LoadVerbs());
  ASSIGN_OR_RETURN(const json answer, ReceiveMessage(arranging));
  if (answer.contains("error")) return Fail(Code::kSystem, answer.value("error", ""));
  rdma::Offer offer;
  ASSIGN_OR_RETURN(offer.port, Field<uint16_t>(answer, "port"));
  ASSIGN_OR_RETURN(offer.addresses, Field<std::vector<std::string>>(answer, "addresses"));
  ASSIGN_OR_RETURN(const auto token, Field<rdma::Token>(answer, "token"));
  rdma::RdmaOptions options;
  options.local_addresses = SplitAtCommas(from);
  options.spin_us = SpinMicroseconds();
  return rdma::Dial(verbs, options, offer, token, UniqueFd(), Deadline::After(kPatienceMs));
}

Result<std::unique_ptr<transport::Connection>> AdoptTcp(Result<UniqueFd> control,
                                                        Result<UniqueFd> bulk) {
  if (!control) return tl::unexpected(std::move(control).error());
  if (!bulk) return tl::unexpected(std::move(bulk).error());
  return tcp::Adopt(std::move(*control), std::move(*bulk), {});
}

}  // namespace

Status SendMessage(int fd, const json& message) {
  const std::string text = message.dump();
  return tcp::SendBlob(fd, std::as_bytes(std::span(text)), kMostMessageBytes,
                       Deadline::After(kPatienceMs));
}

Result<json> ReceiveMessage(int fd, Deadline deadline) {
  ASSIGN_OR_RETURN(const auto blob, tcp::ReceiveBlob(fd, kMostMessageBytes, deadline));
  const char* text = reinterpret_cast<const char*>(blob.data());
  json message = json::parse(text, text + blob.size(), nullptr, false);
  if (!message.is_object()) return Fail(Code::kProtocol, "The other end is no penstock-perf.");
  return message;
}

Result<Link> Dial(const std::string& host, uint16_t port, const LinkOptions& options) {
  Link link;
  link.peer_host = host;
  const Deadline deadline = Deadline::After(kPatienceMs);
  ASSIGN_OR_RETURN(link.arranging, tcp::Dial(host, port, deadline));
  const int fd = link.arranging.get();
  RETURN_IF_ERROR(SendMessage(fd, {{"transport", options.transport}, {"rails", options.rails}}));
  if (options.transport == "rdma") {
    ASSIGN_OR_RETURN(link.connection, DialRdma(fd, options.from));
  } else {
    auto control = tcp::Dial(host, port, deadline);  // before the other one: they are told apart so
    ASSIGN_OR_RETURN(link.connection,
                     AdoptTcp(std::move(control), tcp::Dial(host, port, deadline)));
  }
  return link;
}

Result<Link> Accept(tcp::Listener& listener) {
  Link link;
  ASSIGN_OR_RETURN(link.arranging, listener.Accept(Deadline::Never()));
  const int fd = link.arranging.get();
  ASSIGN_OR_RETURN(const json hello, ReceiveMessage(fd));
  ASSIGN_OR_RETURN(const auto transport, Field<std::string>(hello, "transport"));
  if (transport == "rdma") {
    auto connection = AcceptRdma(fd, hello);
    if (!connection) {
      (void)SendMessage(fd, {{"error", "The serving end says: " + connection.error().message}});
      return tl::unexpected(std::move(connection).error());
    }
    link.connection = std::move(*connection);
  } else {
    const Deadline deadline = Deadline::After(kPatienceMs);
    auto control = listener.Accept(deadline);
    ASSIGN_OR_RETURN(link.connection, AdoptTcp(std::move(control), listener.Accept(deadline)));
  }
  return link;
}

}  // namespace penstock::perf
