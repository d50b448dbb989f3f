// How the two ends of a shm connection find each other: Listener and Dial.
//
//   client                                      worker
//   connects to the abstract name
//   kHello {version, token, max_frame}    -->
//                                         <--   kWelcome {ring_bytes, slot_bytes} and the file
//
// Anybody on the machine can connect to an abstract name, so whoever does not show the token at
// once is hung up on, and does not keep others waiting.
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "common/log.h"
#include "transport/shm/connection.h"
#include "transport/shm/shm.h"

namespace penstock::transport::shm {
namespace {

constexpr size_t kMostWaiting = 16;  // connected, and have said nothing yet

size_t RingBytes(const ShmOptions& options) {
  return std::bit_ceil(std::max(
      {options.ring_bytes, size_t{4} * RoundUpTo8(options.max_frame), size_t{kPageBytes}}));
}

uint32_t SlotBytes(const ShmOptions& options) {
  const uint32_t pages = (std::max(options.slot_bytes, 1u) + kPageBytes - 1) / kPageBytes;
  return std::min<uint32_t>(pages * kPageBytes, kMostSlotBytes);
}

bool SameToken(const uint8_t (&shown)[16], const Token& token) {
  uint8_t differs = 0;
  for (size_t i = 0; i < token.size(); ++i) differs |= shown[i] ^ token[i];
  return differs == 0;
}

class ShmListener : public Listener {
 public:
  ShmListener(const ShmOptions& options, std::string name, UniqueFd socket)
      : options_(options), name_(std::move(name)), socket_(std::move(socket)) {}
  const std::string& name() const override { return name_; }
  Result<std::unique_ptr<Connection>> Accept(const Token& token, Deadline deadline,
                                             int other) override;

 private:
  // What a peer that has connected says first.
  bool IsTheClient(UniqueFd& socket, const Token& token) const;
  Result<std::unique_ptr<Connection>> Welcome(UniqueFd socket, Deadline deadline);

  const ShmOptions options_;
  const std::string name_;
  UniqueFd socket_;
};

bool ShmListener::IsTheClient(UniqueFd& socket, const Token& token) const {
  const std::string who = PeerCredentials(socket.get());
  Link link(std::move(socket));
  LinkMessage hello;
  UniqueFd unwanted;
  const bool fine = link.Receive(&hello, &unwanted) == Link::Received::kMessage &&
                    hello.kind == LinkKind::kHello && SameToken(hello.token, token);
  const bool agrees = hello.version == kVersion && hello.max_frame == options_.max_frame;
  if (!fine) {
    LOG_WARNING("transport",
                "A process (%s) that is not this session's client connects to its socket.",
                who.c_str());
  } else if (!agrees) {
    LOG_WARNING("transport", "The client speaks another version (%u) or has other frames (%u).",
                hello.version, hello.max_frame);
  }
  if (!fine || !agrees) return false;
  LOG_DEBUG("transport", "The client (%s) connects to the session's socket.", who.c_str());
  socket = link.Release();
  return true;
}

Result<std::unique_ptr<Connection>> ShmListener::Welcome(UniqueFd socket, Deadline deadline) {
  LinkMessage welcome;
  welcome.kind = LinkKind::kWelcome;
  welcome.max_frame = options_.max_frame;
  welcome.ring_bytes = RingBytes(options_);
  welcome.slot_bytes = SlotBytes(options_);
  if (welcome.ring_bytes > kMostRingBytes) {
    return Fail(Code::kInvalidArgument,
                "Ring size (" + std::to_string(welcome.ring_bytes) + ") exceeds the limit.");
  }
  const size_t bytes = Segment::FileBytes(welcome.ring_bytes, welcome.slot_bytes);
  ASSIGN_OR_RETURN(const UniqueFd file, MakeSharedFile("penstock-session", bytes));
  ASSIGN_OR_RETURN(auto segment, Segment::Map(file.get(), welcome.ring_bytes, welcome.slot_bytes));
  Link link(std::move(socket));
  RETURN_IF_ERROR(link.Send(welcome, file.get(), deadline));
  auto connection = std::make_unique<ShmConnection>(kServer, link.Release(), std::move(segment),
                                                    options_.max_frame);
  connection->Start();
  return connection;
}

Result<std::unique_ptr<Connection>> ShmListener::Accept(const Token& token, Deadline deadline,
                                                        int other) {
  std::vector<UniqueFd> waiting;
  std::vector<pollfd> entries;
  for (;;) {
    entries = {{socket_.get(), POLLIN, 0}, {other, POLLIN, 0}};
    for (const UniqueFd& socket : waiting) entries.push_back({socket.get(), POLLIN, 0});
    const int ready = poll(entries.data(), entries.size(), deadline.poll_timeout_ms());
    if (ready == 0 || deadline.expired()) {
      return Fail(Code::kTimeout, "The client does not come to the session's socket in time.");
    }
    if (ready < 0 && errno != EINTR) return FailErrno("Cannot wait for the client");
    for (size_t i = waiting.size(); i-- > 0;) {
      if (entries[i + 2].revents == 0) continue;
      UniqueFd socket = std::move(waiting[i]);
      waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(i));
      if (IsTheClient(socket, token)) {
        socket_.reset();
        return Welcome(std::move(socket), deadline);
      }
    }
    if (entries[1].revents != 0) {
      return Fail(Code::kUnavailable, "The client does not come to the session's socket.");
    }
    if (entries[0].revents == 0) continue;
    UniqueFd socket(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) continue;
    // The eldest has had its chance.
    if (waiting.size() == kMostWaiting) waiting.erase(waiting.begin());
    waiting.push_back(std::move(socket));
  }
}

}  // namespace

Result<std::unique_ptr<Listener>> Listener::Open(const ShmOptions& options) {
  uint8_t random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random) {
    return FailErrno("Cannot draw a random name");
  }
  std::string name = "penstock-";
  for (const uint8_t byte : random) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  ASSIGN_OR_RETURN(UniqueFd socket, ListenAt(name));
  return std::make_unique<ShmListener>(options, std::move(name), std::move(socket));
}

Result<std::unique_ptr<Connection>> Dial(const ShmOptions& options, const std::string& name,
                                         const Token& token, Deadline deadline) {
  ASSIGN_OR_RETURN(UniqueFd socket, ConnectTo(name));
  const std::string who = PeerCredentials(socket.get());
  Link link(std::move(socket));
  LinkMessage hello;
  hello.kind = LinkKind::kHello;
  hello.max_frame = options.max_frame;
  std::copy(token.begin(), token.end(), hello.token);
  RETURN_IF_ERROR(link.Send(hello, -1, deadline));

  LinkMessage welcome;
  UniqueFd file;
  Link::Received received;
  while ((received = link.Receive(&welcome, &file)) == Link::Received::kNone) {
    if (deadline.expired()) {
      return Fail(Code::kTimeout, "The server does not answer on its unix socket in time.");
    }
    pollfd entry = {link.fd(), POLLIN, 0};
    poll(&entry, 1, deadline.poll_timeout_ms());
  }
  if (received == Link::Received::kEnd) {
    return Fail(Code::kUnavailable, "The server hangs up on its unix socket.");
  }
  if (received != Link::Received::kMessage || welcome.kind != LinkKind::kWelcome ||
      welcome.version != kVersion || welcome.max_frame != options.max_frame ||
      !std::has_single_bit(welcome.ring_bytes) || welcome.ring_bytes > kMostRingBytes ||
      welcome.ring_bytes < size_t{4} * RoundUpTo8(options.max_frame) ||
      welcome.ring_bytes % kPageBytes != 0 || welcome.slot_bytes == 0 ||
      welcome.slot_bytes % kPageBytes != 0 || welcome.slot_bytes > kMostSlotBytes) {
    return Fail(Code::kProtocol, "The server's welcome on its unix socket is malformed.");
  }
  const size_t bytes = Segment::FileBytes(welcome.ring_bytes, welcome.slot_bytes);
  if (auto sound = CheckSharedFile(file.get(), bytes); !sound) {
    return Fail(Code::kProtocol,
                "The server shares memory wrongly: " + sound.error().message + ".");
  }
  ASSIGN_OR_RETURN(auto segment, Segment::Map(file.get(), welcome.ring_bytes, welcome.slot_bytes));
  LOG_DEBUG("transport", "The server (%s) shares a memory file of %zu bytes.", who.c_str(), bytes);
  auto connection = std::make_unique<ShmConnection>(kClient, link.Release(), std::move(segment),
                                                    options.max_frame);
  connection->Start();
  return connection;
}

}  // namespace penstock::transport::shm
