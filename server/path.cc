#include "server/path.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <future>
#include <thread>

#include "common/env.h"
#include "common/log.h"
#include "transport/choice.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"

namespace penstock::server {
namespace {

namespace rdma = transport::rdma;
namespace tcp = transport::tcp;

constexpr int64_t kRequestMs = 10'000;  // for the client to speak
constexpr int64_t kShmMs = 10'000;      // for it to come to the unix socket
constexpr int64_t kDialMs = 75'000;     // beyond what any client spends on dialling

template <typename T>
std::span<const std::byte> Bytes(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

rdma::RdmaOptions Options(const RdmaSettings& settings) {
  rdma::RdmaOptions options;
  options.max_frame = kMaxFrameBytes;
  options.timeout = settings.timeout;
  options.retry_count = settings.retry_count;
  options.keepalive_ms = static_cast<int>(settings.keepalive_ms);
  options.peer_timeout_ms = static_cast<int>(settings.peer_timeout_ms);
  options.control_traffic_class = settings.control_traffic_class;
  options.bulk_traffic_class = settings.bulk_traffic_class;
  options.most_rails = settings.most_rails;
  options.spin_us = static_cast<int>(EnvInteger("PENSTOCK_RDMA_SPIN_US", -1));
  return options;
}

// Registered memory counts as locked. The soft limit is ours to raise, and a worker that was root
// has already raised the hard one.
void RaiseMemlock() {
  rlimit limit;
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_MEMLOCK, &limit);
}

Result<std::unique_ptr<rdma::Listener>> Open(const RdmaSettings& settings) {
  RaiseMemlock();
  ASSIGN_OR_RETURN(auto verbs, rdma::LoadVerbs());
  std::vector<std::string> addresses;
  for (const auto& address : settings.addresses) {
    if (address[0] != '\0') addresses.emplace_back(address);
  }
  return rdma::Listener::Open(std::move(verbs), Options(settings), addresses);
}

std::unique_ptr<transport::Connection> OverTcp(UniqueFd control, UniqueFd bulk) {
  tcp::TcpOptions options;
  options.max_frame = kMaxFrameBytes;
  return tcp::Adopt(std::move(control), std::move(bulk), options);
}

using Accepted = Result<std::unique_ptr<transport::Connection>>;

// Accepting runs beside the talk: the client either connects or says on its socket that it cannot,
// and then nobody should wait for the deadline. The thread is left alone in that case. It ends by
// its deadline, and a client that connects after all is hung up on.
std::future<Accepted> AcceptBeside(std::unique_ptr<rdma::Listener> listener,
                                   const rdma::Token& token, UniqueFd lifeline, Deadline deadline) {
  std::promise<Accepted> promise;
  std::future<Accepted> future = promise.get_future();
  std::thread([listener = std::move(listener), token, lifeline = std::move(lifeline), deadline,
               promise = std::move(promise)]() mutable {
    promise.set_value(listener->Accept(token, std::move(lifeline), deadline));
  }).detach();
  return future;
}

Status Decide(int control, Path path, const std::string& why, Deadline deadline) {
  PathDecision decision;
  decision.path = path;
  CopyText(decision.text, why);
  return tcp::SendBlob(control, Bytes(decision), kMaxHelloBytes, deadline);
}

// The client either comes to the unix socket or says on the control socket that it cannot, and then
// the session goes on over tcp, unless it must not.
Accepted ShareMemory(const SessionParameters& parameters, UniqueFd control, UniqueFd bulk) {
  namespace shm = transport::shm;
  const bool only = parameters.shm.only != 0;
  Deadline deadline = Deadline::After(kRequestMs);
  const auto without = [&](const std::string& why) -> Accepted {
    if (only) return Fail(Code::kUnsupported, "Memory cannot be shared with the client: " + why);
    LOG_INFO("session", "Session %lu goes over tcp instead of shared memory: %s",
             parameters.session, why.c_str());
    return OverTcp(std::move(control), std::move(bulk));
  };
  PathOffer offer;
  offer.no_tcp = only ? 1 : 0;
  shm::ShmOptions options;
  options.max_frame = kMaxFrameBytes;
  auto listener = shm::Listener::Open(options);
  if (!listener) {
    CopyText(offer.text, listener.error().message);
    RETURN_IF_ERROR(tcp::SendBlob(control.get(), Bytes(offer), kMaxHelloBytes, deadline));
    return without(listener.error().message);
  }
  offer.path = Path::kShm;
  offer.rail_count = 1;
  CopyText(offer.addresses[0], (*listener)->name());
  RETURN_IF_ERROR(tcp::SendBlob(control.get(), Bytes(offer), kMaxHelloBytes, deadline));

  const PathToken token = DerivePathToken(parameters.ticket, parameters.session, parameters.epoch);
  Accepted shared = (*listener)->Accept(token, Deadline::After(kShmMs), control.get());
  listener->reset();
  deadline = Deadline::After(kRequestMs);
  ASSIGN_OR_RETURN(const auto choice_bytes,
                   tcp::ReceiveBlob(control.get(), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const PathDecision choice, ParsePathDecision(choice_bytes));
  if (choice.path == Path::kTcp) return without(choice.text);
  if (!shared) return shared;
  LOG_INFO("session", "Session %lu goes through shared memory.", parameters.session);
  return shared;
}

}  // namespace

RdmaPort OpenRdmaPort(const SessionParameters& parameters) {
  RdmaPort port;
  if (parameters.rdma.asked == 0) return port;
  auto listener = Open(parameters.rdma);
  if (!listener) {
    port.why = listener.error().message;
    return port;
  }
  port.listener = std::move(*listener);
  return port;
}

Accepted MakeConnection(const SessionParameters& parameters, RdmaPort port, UniqueFd control,
                        UniqueFd bulk) {
  if (parameters.shm.asked != 0) {
    return ShareMemory(parameters, std::move(control), std::move(bulk));
  }
  if (parameters.rdma.asked == 0) return OverTcp(std::move(control), std::move(bulk));
  const bool rdma_only = parameters.rdma.only != 0;
  Deadline deadline = Deadline::After(kRequestMs);
  ASSIGN_OR_RETURN(const auto request_bytes,
                   tcp::ReceiveBlob(control.get(), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const PathRequest request, ParsePathRequest(request_bytes));

  PathOffer offer;
  offer.no_tcp = rdma_only ? 1 : 0;
  if (port.listener == nullptr) {
    LOG_WARNING("session", "Session %lu cannot use RDMA: %s", parameters.session, port.why.c_str());
    CopyText(offer.text, port.why);
    RETURN_IF_ERROR(tcp::SendBlob(control.get(), Bytes(offer), kMaxHelloBytes, deadline));
    if (rdma_only) return Fail(Code::kUnsupported, "The server serves over RDMA only.");
    return OverTcp(std::move(control), std::move(bulk));
  }
  const rdma::Offer& rails = port.listener->offer();
  offer.path = Path::kRdma;
  offer.port = rails.port;
  for (const std::string& address : rails.addresses) {
    if (offer.rail_count == std::min(request.most_rails, kMaxPathRails)) break;
    CopyText(offer.addresses[offer.rail_count++], address);
  }
  UniqueFd lifeline(fcntl(bulk.get(), F_DUPFD_CLOEXEC, 0));
  if (!lifeline.valid()) return FailErrno("Cannot duplicate a socket");
  const std::string first = offer.addresses[0];
  const PathToken token = DerivePathToken(parameters.ticket, parameters.session, parameters.epoch);
  auto accepted =
      AcceptBeside(std::move(port.listener), token, std::move(lifeline), Deadline::After(kDialMs));
  RETURN_IF_ERROR(tcp::SendBlob(control.get(), Bytes(offer), kMaxHelloBytes, deadline));

  deadline = Deadline::After(kDialMs);
  ASSIGN_OR_RETURN(const auto choice_bytes,
                   tcp::ReceiveBlob(control.get(), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const PathDecision choice, ParsePathDecision(choice_bytes));
  deadline = Deadline::After(kRequestMs);
  if (choice.path == Path::kTcp) {
    // Our half of the RDMA connection may stand, or yet come to, and its end would take the sockets
    // with it. So this session is over, and the client begins again with another.
    (void)Decide(control.get(), Path::kTcp, "", deadline);
    return Fail(Code::kUnsupported, std::string("The client cannot use RDMA: ") + choice.text);
  }
  // The client's queue pair stands, so ours does or never will.
  Accepted connection = Fail(Code::kTimeout, "The client's queue pair does not arrive in time.");
  if (accepted.wait_for(std::chrono::milliseconds(kRequestMs)) == std::future_status::ready) {
    connection = accepted.get();
  }
  if (!connection) {
    (void)Decide(control.get(), Path::kTcp, connection.error().message, deadline);
    return connection;  // the client begins again
  }
  RETURN_IF_ERROR(Decide(control.get(), Path::kRdma, "", deadline));
  LOG_INFO("session", "Session %lu goes over RDMA (%s and %u more rails, port %u).",
           parameters.session, first.c_str(), offer.rail_count - 1, offer.port);
  return connection;
}

}  // namespace penstock::server
