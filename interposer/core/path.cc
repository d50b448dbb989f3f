#include "interposer/core/path.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdlib>

#include "common/env.h"
#include "common/log.h"
#include "transport/rdma/rdma.h"
#include "transport/shm/shm.h"
#include "transport/tcp/socket.h"

namespace penstock::interposer {
namespace {

namespace rdma = transport::rdma;
namespace tcp = transport::tcp;
using transport::Choice;

constexpr int64_t kShmMs = 5'000;
constexpr int64_t kGoneMs = 2'000;
constexpr int64_t kTalkMs = 15'000;  // beyond what either side spends on RDMA itself

template <typename T>
std::span<const std::byte> Bytes(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

Result<std::string> UsableRails(rdma::Verbs& verbs) {
  ASSIGN_OR_RETURN(const auto rails, rdma::FindLocalRails(verbs));
  std::string text;
  for (const rdma::LocalRail& rail : rails) {
    text += (text.empty() ? "" : ", ") + rail.device + " (" + rail.address + ")";
  }
  if (text.empty()) {
    return Fail(Code::kUnsupported,
                "No RDMA device of this host has an address; give its network interface one.");
  }
  return text;
}

// Leaves the value alone if the variable is not set.
Status TakeMilliseconds(const char* name, int64_t least, int64_t most, int64_t* value) {
  const std::string text = EnvString(name);
  if (text.empty()) return {};
  *value = EnvInteger(name, 0);
  if (*value >= least && *value <= most) return {};
  return Fail(Code::kInvalidArgument, std::string(name) + " (" + text + ") is not between " +
                                          std::to_string(least) + " and " + std::to_string(most) +
                                          " milliseconds.");
}

}  // namespace

Result<PathOptions> PathOptionsFromEnvironment() {
  PathOptions options;
  const std::string choice = EnvString("PENSTOCK_TRANSPORT");
  if (!choice.empty()) {
    ASSIGN_OR_RETURN(options.choice, transport::ParseChoice(choice, "PENSTOCK_TRANSPORT"));
  }
  ASSIGN_OR_RETURN(
      options.local_addresses,
      transport::ParseRailAddresses(EnvString("PENSTOCK_RDMA_RAILS"), "PENSTOCK_RDMA_RAILS"));
  RETURN_IF_ERROR(TakeMilliseconds("PENSTOCK_RDMA_TIMEOUT", 100, 60'000, &options.timeout_ms));
  RETURN_IF_ERROR(
      TakeMilliseconds("PENSTOCK_RDMA_PEER_TIMEOUT", 100, 3'600'000, &options.peer_timeout_ms));
  return options;
}

Result<LocalRdma> PrepareRdma(const PathOptions& options, int control) {
  LocalRdma local;
  const bool demanded = options.choice == Choice::kRdma;
  if (options.choice == Choice::kTcp || options.choice == Choice::kShm) return local;
  if (!demanded && transport::PeerIsLoopback(control)) return local;
  if (transport::RdmaDeviceNames().empty()) {
    if (!demanded) return local;
    return Fail(Code::kUnsupported,
                "RDMA is demanded (PENSTOCK_TRANSPORT=rdma), and this host has no RDMA device "
                "(/sys/class/infiniband is empty). Load the device's driver, or set "
                "PENSTOCK_TRANSPORT to auto or tcp.");
  }
  auto verbs = rdma::LoadVerbs();
  Result<std::string> devices =
      verbs ? UsableRails(**verbs) : Result<std::string>(tl::unexpect, verbs.error());
  if (!devices) {
    if (demanded) {
      return Fail(Code::kUnsupported,
                  "RDMA is demanded (PENSTOCK_TRANSPORT=rdma) and cannot be used here: " +
                      devices.error().message);
    }
    local.why = devices.error().message;
    return local;
  }
  local.verbs = std::move(*verbs);
  local.devices = std::move(*devices);
  return local;
}

bool WantsShm(const PathOptions& options, int control) {
  return options.choice == Choice::kShm ||
         (options.choice == Choice::kAuto && transport::PeerIsLoopback(control));
}

Result<PathTaken> AgreeOnShm(int control, const Welcome& welcome) {
  namespace shm = transport::shm;
  const Deadline deadline = Deadline::After(kShmMs + kTalkMs);
  PathTaken taken;
  // Comes unasked, after the bulk socket's welcome.
  ASSIGN_OR_RETURN(const auto offer_bytes, tcp::ReceiveBlob(control, kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const PathOffer offer, ParsePathOffer(offer_bytes));
  const auto no_shm = [&](const std::string& why) -> Result<PathTaken> {
    taken.why = why;
    if (offer.no_tcp == 0) return std::move(taken);
    return Fail(Code::kUnsupported,
                "The server serves over shared memory only, and that fails: " + why);
  };
  if (offer.path != Path::kShm) {
    return no_shm(std::string("The server cannot share memory: ") + offer.text);
  }
  shm::ShmOptions options;
  options.max_frame = welcome.server.max_frame_bytes;
  const PathToken token = DerivePathToken(welcome.ticket, welcome.session, welcome.epoch);
  auto dialled = shm::Dial(options, offer.addresses[0], token, Deadline::After(kShmMs));
  ++taken.round_trips;
  // No answer comes: by the time that the dialling is over the server has its end.
  PathDecision choice;
  choice.path = dialled ? Path::kShm : Path::kTcp;
  if (!dialled) CopyText(choice.text, dialled.error().message);
  RETURN_IF_ERROR(tcp::SendBlob(control, Bytes(choice), kMaxHelloBytes, deadline));
  if (!dialled) {
    return no_shm(dialled.error().message + " Client and server may be in different containers.");
  }
  LOG_INFO("session", "The session goes through shared memory.");
  taken.connection = std::move(*dialled);
  return taken;
}

Result<PathTaken> AgreeOnPath(const PathOptions& options, const LocalRdma& local, int control,
                              int bulk, const Welcome& welcome) {
  const Deadline deadline = Deadline::After(options.timeout_ms + kTalkMs);
  PathTaken taken;
  PathRequest request;
  request.most_rails = kMaxPathRails;
  RETURN_IF_ERROR(tcp::SendBlob(control, Bytes(request), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const auto offer_bytes, tcp::ReceiveBlob(control, kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const PathOffer offer, ParsePathOffer(offer_bytes));
  ++taken.round_trips;
  const auto no_tcp = [&](const std::string& why) {
    return Fail(Code::kUnsupported, "The server serves over RDMA only, and that fails: " + why);
  };
  if (offer.path != Path::kRdma) {
    taken.why = std::string("The server cannot use RDMA: ") + offer.text;
    if (offer.no_tcp != 0) return no_tcp(taken.why);
    return taken;
  }

  rdma::Offer dial;
  dial.port = static_cast<uint16_t>(offer.port);
  for (uint32_t rail = 0; rail < offer.rail_count; ++rail) {
    dial.addresses.emplace_back(offer.addresses[rail]);
  }
  rdma::RdmaOptions rdma_options;
  rdma_options.max_frame = welcome.server.max_frame_bytes;
  rdma_options.local_addresses = options.local_addresses;
  rdma_options.spin_us = static_cast<int>(EnvInteger("PENSTOCK_RDMA_SPIN_US", -1));
  rdma_options.peer_timeout_ms = static_cast<int>(options.peer_timeout_ms);
  const PathToken token = DerivePathToken(welcome.ticket, welcome.session, welcome.epoch);
  UniqueFd lifeline(fcntl(bulk, F_DUPFD_CLOEXEC, 0));
  if (!lifeline.valid()) return FailErrno("Cannot duplicate a socket");
  auto dialled = rdma::Dial(local.verbs, rdma_options, dial, token, std::move(lifeline),
                            Deadline::After(options.timeout_ms));

  PathDecision choice;
  choice.path = dialled ? Path::kRdma : Path::kTcp;
  if (!dialled) CopyText(choice.text, dialled.error().message);
  RETURN_IF_ERROR(tcp::SendBlob(control, Bytes(choice), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const auto ready_bytes, tcp::ReceiveBlob(control, kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const PathDecision ready, ParsePathDecision(ready_bytes));
  ++taken.round_trips;
  if (!dialled) {
    if (ready.path != Path::kTcp) {
      return Fail(Code::kProtocol, "The server answers a choice of tcp with rdma.");
    }
    taken.why = dialled.error().message;
    taken.begin_again = true;
    // Until the worker has hung up it counts as one of the server's sessions.
    (void)tcp::ReceiveBlob(control, kMaxHelloBytes, Deadline::After(kGoneMs));
    if (offer.no_tcp != 0) return no_tcp(taken.why);
    return taken;
  }
  if (ready.path != Path::kRdma) {
    taken.why = std::string("The server cannot use RDMA: ") + ready.text;
    taken.begin_again = true;  // closing the RDMA connection has ended the socket beside it
    if (offer.no_tcp != 0) return no_tcp(taken.why);
    return taken;
  }
  std::string addresses;
  for (const std::string& address : dial.addresses) addresses += " " + address;
  LOG_INFO("session", "The session goes over RDMA: from %s to%s, port %u.", local.devices.c_str(),
           addresses.c_str(), offer.port);
  taken.connection = std::move(*dialled);
  return taken;
}

}  // namespace penstock::interposer
