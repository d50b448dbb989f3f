#include "interposer/core/connect.h"

#include <errno.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "common/log.h"
#include "transport/rdma/rdma.h"
#include "transport/shm/shm.h"
#include "transport/tcp/tcp.h"

namespace penstock::interposer {
namespace {

namespace tcp = transport::tcp;

constexpr int64_t kDialMs = 10'000;
// The server may have to start a worker and its driver, which takes seconds on a large machine.
constexpr int64_t kHelloMs = 60'000;

template <typename T>
std::span<const std::byte> Bytes(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

Error Refused(Refusal refusal, const char* text) {
  Code code = Code::kUnavailable;
  if (refusal == Refusal::kKey) code = Code::kUnauthenticated;
  if (refusal == Refusal::kVersion || refusal == Refusal::kMalformed) code = Code::kProtocol;
  if (refusal == Refusal::kFull) code = Code::kResourceExhausted;
  if (refusal == Refusal::kDriver) code = Code::kUnsupported;
  if (refusal == Refusal::kPath) code = Code::kUnsupported;
  if (refusal == Refusal::kTooMany) code = Code::kUnsupported;
  std::string message = std::string("The server refuses (") + RefusalName(refusal) + "): " + text;
  if (refusal == Refusal::kDriver) message += " See what penstockd says there on its stderr.";
  return {code, std::move(message)};
}

// Both sockets of one session.
struct Sockets {
  UniqueFd control, bulk;
};

ClientHello MakeHello(const ConnectOptions& options) {
  ClientHello hello;
  hello.gpus = options.gpus;
  hello.pid = static_cast<uint32_t>(getpid());
  gethostname(hello.host, sizeof hello.host - 1);
  strncpy(hello.program, program_invocation_short_name, sizeof hello.program - 1);
  return hello;
}

// A faster path was to be had and is not used: said once for each session, so that nobody wonders
// why the program is slow.
void WarnOfTcp(const std::string& server, Path wanted, const std::string& why) {
  LOG_WARNING("session",
              "The session with %s goes over tcp instead of %s: %s Set PENSTOCK_TRANSPORT=tcp if "
              "that is meant, or PENSTOCK_TRANSPORT=%s to make it an error.",
              server.c_str(), wanted == Path::kShm ? "shared memory" : "RDMA", why.c_str(),
              PathName(wanted));
}

struct Attempt {
  Connected connected;
  bool begin_again = false;  // over tcp from the start
};

Result<Attempt> TryToConnect(const ConnectOptions& options) {
  ASSIGN_OR_RETURN(const config::Endpoint endpoint, config::ParseEndpoint(options.server));
  Key key;
  if (!options.key_file.empty()) {
    Result<Key> read = ReadKeyFile(options.key_file);
    if (!read) return Fail(Code::kUnauthenticated, read.error().message);
    key = std::move(*read);
  }
  Sockets sockets;
  ASSIGN_OR_RETURN(sockets.control,
                   tcp::Dial(endpoint.host, endpoint.port, Deadline::After(kDialMs)));
  const Deadline deadline = Deadline::After(kHelloMs);
  const int control = sockets.control.get();
  ASSIGN_OR_RETURN(LocalRdma local, PrepareRdma(options.path, control));

  ClientHello hello = MakeHello(options);
  hello.features |= kFeatureHostFunctions | kFeatureBounce | kFeatureVolumes;
  if (options.fewer) hello.features |= kFeatureFewer;
  if (local.verbs != nullptr) hello.features |= kFeatureRdma;
  if (WantsShm(options.path, control)) hello.features |= kFeatureShm;
  RETURN_IF_ERROR(FillRandom(hello.nonce));
  RETURN_IF_ERROR(tcp::SendBlob(control, Bytes(hello), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const auto challenge_bytes, tcp::ReceiveBlob(control, kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const Challenge challenge, ParseChallenge(challenge_bytes));
  if (challenge.refusal != Refusal::kNone) {
    return tl::unexpected<Error>(Refused(challenge.refusal, challenge.text));
  }
  if (challenge.key_needed != 0 && key.empty()) {
    return Fail(Code::kUnauthenticated, "The server asks for a key, and none is given.");
  }
  const uint64_t features = hello.features & challenge.features;
  const bool both_share = (features & kFeatureShm) != 0;
  const bool both = !both_share && (features & kFeatureRdma) != 0;
  const bool demanded = options.path.choice == transport::Choice::kRdma;
  const bool sharing_demanded = options.path.choice == transport::Choice::kShm;
  if (sharing_demanded && !both_share) {
    return Fail(Code::kUnsupported,
                "Shared memory is demanded (PENSTOCK_TRANSPORT=shm), and the server does not offer "
                "it: it is told to use another transport, or is older.");
  }
  if (demanded && !both) {
    return Fail(Code::kUnsupported,
                "RDMA is demanded (PENSTOCK_TRANSPORT=rdma), and the server does not offer it: it "
                "has no RDMA device, is told to use tcp, or is older.");
  }

  Proof proof;
  proof.mac = ClientMac(key, hello, challenge);
  RETURN_IF_ERROR(tcp::SendBlob(control, Bytes(proof), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const auto welcome_bytes, tcp::ReceiveBlob(control, kMaxWelcomeBytes, deadline));
  Attempt attempt;
  Connected& connected = attempt.connected;
  ASSIGN_OR_RETURN(connected.welcome, ParseWelcome(welcome_bytes));
  const Welcome& welcome = connected.welcome.welcome;
  if (welcome.refusal != Refusal::kNone) {
    return tl::unexpected<Error>(Refused(welcome.refusal, welcome.text));
  }
  if (!SameMac(welcome.mac, ServerMac(key, hello, challenge, welcome.session, welcome.ticket))) {
    return Fail(Code::kUnauthenticated,
                "The server does not hold the key; it is not the one that the key belongs to.");
  }

  const uint32_t max_frame = welcome.server.max_frame_bytes;
  if (max_frame < kMaxInlineCopyBytes * 2 || max_frame > kMaxFrameBytes) {
    return Fail(Code::kProtocol, "The server's largest frame (" + std::to_string(max_frame) +
                                     ") is outside of what this client can work with.");
  }

  ASSIGN_OR_RETURN(sockets.bulk, tcp::Dial(endpoint.host, endpoint.port, Deadline::After(kDialMs)));
  BulkHello bulk_hello;
  bulk_hello.session = welcome.session;
  bulk_hello.epoch = welcome.epoch;
  bulk_hello.mac = BulkMac(key, hello, challenge, welcome.ticket, welcome.session, welcome.epoch);
  RETURN_IF_ERROR(tcp::SendBlob(sockets.bulk.get(), Bytes(bulk_hello), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const auto bulk_bytes,
                   tcp::ReceiveBlob(sockets.bulk.get(), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const BulkWelcome bulk_welcome, ParseBulkWelcome(bulk_bytes));
  if (bulk_welcome.refusal != Refusal::kNone) {
    return tl::unexpected<Error>(Refused(bulk_welcome.refusal, bulk_welcome.text));
  }

  connected.server = options.server;
  connected.round_trips = 3;
  connected.host_functions = (challenge.features & kFeatureHostFunctions) != 0;
  connected.bounce = (challenge.features & kFeatureBounce) != 0;
  connected.volumes = (challenge.features & kFeatureVolumes) != 0;
  std::string why = std::move(local.why);
  if (both_share) {
    ASSIGN_OR_RETURN(PathTaken taken, AgreeOnShm(control, welcome));
    connected.round_trips += taken.round_trips;
    if (taken.connection != nullptr) {
      connected.connection = std::move(taken.connection);
      connected.abandon = &transport::shm::AbandonAfterFork;
      return attempt;
    }
    if (sharing_demanded) {
      return Fail(Code::kUnsupported,
                  "Shared memory is demanded (PENSTOCK_TRANSPORT=shm) and fails: " + taken.why);
    }
    why = std::move(taken.why);
  }
  if (both) {
    ASSIGN_OR_RETURN(PathTaken taken,
                     AgreeOnPath(options.path, local, control, sockets.bulk.get(), welcome));
    connected.round_trips += taken.round_trips;
    if (taken.connection != nullptr) {
      connected.connection = std::move(taken.connection);
      connected.abandon = &transport::rdma::AbandonAfterFork;
      return attempt;
    }
    if (demanded) {
      return Fail(Code::kUnsupported,
                  "RDMA is demanded (PENSTOCK_TRANSPORT=rdma) and fails: " + taken.why);
    }
    why = std::move(taken.why);
    attempt.begin_again = taken.begin_again;
  }
  if (!why.empty()) WarnOfTcp(options.server, both_share ? Path::kShm : Path::kRdma, why);
  if (attempt.begin_again) return attempt;
  LOG_INFO("session", "The session goes over tcp to %s.", tcp::PeerName(control).c_str());
  tcp::TcpOptions tcp_options;
  tcp_options.max_frame = max_frame;
  connected.connection =
      tcp::Adopt(std::move(sockets.control), std::move(sockets.bulk), tcp_options);
  connected.abandon = &tcp::AbandonAfterFork;
  return attempt;
}

}  // namespace

Result<Connected> Connect(const ConnectOptions& options) {
  ASSIGN_OR_RETURN(Attempt attempt, TryToConnect(options));
  if (!attempt.begin_again) return std::move(attempt.connected);
  const uint64_t round_trips = attempt.connected.round_trips;
  ConnectOptions over_tcp = options;
  over_tcp.path.choice = transport::Choice::kTcp;
  ASSIGN_OR_RETURN(attempt, TryToConnect(over_tcp));
  attempt.connected.round_trips += round_trips;
  return std::move(attempt.connected);
}

}  // namespace penstock::interposer
