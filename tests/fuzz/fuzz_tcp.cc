// Both sockets of a tcp connection with any bytes on them, at both kinds of ends: one that answers
// (its memory is registered, and requests may name it by its true key) and one that asks (moves of
// its own are under way). The input is a list of records: a header, then bytes for a socket.
#include <sys/socket.h>
#include <cstdlib>

#include "tests/fuzz/input.h"
#include "transport/region_table.h"
#include "transport/tcp/bulk.h"
#include "transport/tcp/tcp.h"

using namespace penstock;
using namespace penstock::transport;
using fuzz::Require;

namespace {

constexpr uint32_t kMaxFrame = 4096;
constexpr size_t kMemoryBytes = 8192;

struct Record {
  uint16_t bytes;
  uint8_t kind;
  uint8_t flags;
};
enum Kind : uint8_t { kControl, kBulk, kBulkWithKey, kGet, kPut, kPoll, kKinds };

struct Checker : Handler {
  bool OnFrame(std::span<const std::byte> frame) override {
    uint32_t length;
    memcpy(&length, frame.data(), sizeof length);
    Require(length == frame.size() && length >= 8 && length <= kMaxFrame);
    unsigned sum = 0;
    for (std::byte byte : frame) sum += static_cast<unsigned>(byte);
    sink = sum;
    return true;
  }
  void OnBulkDone(uint64_t cookie, BulkStatus, uint64_t bytes) override {
    Require((cookie == 1 || cookie == 2) && bytes <= kMemoryBytes);
    ++done;
  }
  void Started(Outcome outcome) { started += outcome == Outcome::kOk ? 1 : 0; }
  uint64_t started = 0, done = 0;
  volatile unsigned sink = 0;
};

// Two connected sockets; the second one's end leaves nothing behind in the system.
void Connect(tcp::Listener& listener, UniqueFd* ours, UniqueFd* theirs) {
  auto dialled = tcp::Dial("127.0.0.1", listener.port(), Deadline::After(5000));
  auto accepted = listener.Accept(Deadline::After(5000));
  if (!dialled || !accepted) abort();
  const linger reset = {1, 0};
  setsockopt(dialled->get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  *ours = std::move(*accepted);
  *theirs = std::move(*dialled);
}

void Drain(int fd) {
  char scrap[65536];
  while (recv(fd, scrap, sizeof scrap, MSG_DONTWAIT) > 0) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static tcp::Listener listener = [] {
    fuzz::Silence();
    auto bound = tcp::Listener::Bind("127.0.0.1", 0);
    if (!bound) abort();
    return std::move(*bound);
  }();
  UniqueFd control, bulk, raw_control, raw_bulk;
  Connect(listener, &control, &raw_control);
  Connect(listener, &bulk, &raw_bulk);
  tcp::TcpOptions options;
  options.max_frame = kMaxFrame;
  options.ring_bytes = 64 << 10;
  options.receive_bytes = 4 * kMaxFrame;
  options.bulk_chunk = 4096;
  auto connection = tcp::Adopt(std::move(control), std::move(bulk), options);

  std::vector<std::byte> memory(kMemoryBytes);
  auto region = connection->Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
  KeyBlob key{};
  if (!region || !ParseKey((*region)->key(), &key)) abort();
  Checker checker;
  fuzz::Input input(data, size);
  while (!input.empty() && !connection->closed()) {
    const auto record = input.Take<Record>();
    std::vector<std::byte> bytes;
    switch (record.kind % kKinds) {
      case kControl:
        bytes = input.TakeBytes(record.bytes);
        (void)send(raw_control.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
      case kBulkWithKey:
      case kBulk:
        bytes = input.TakeBytes(record.bytes);
        if (record.kind % kKinds == kBulkWithKey && bytes.size() >= sizeof(tcp::BulkHeader)) {
          tcp::BulkHeader header;
          memcpy(&header, bytes.data(), sizeof header);
          header.key_slot = key.slot;
          header.key_generation = key.generation;
          header.key_secret = key.secret;
          memcpy(bytes.data(), &header, sizeof header);
        }
        (void)send(raw_bulk.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
      case kGet:
        checker.Started(
            connection->Get(**region, 0, (*region)->key(), 0, record.bytes % kMemoryBytes, 1));
        break;
      case kPut:
        checker.Started(
            connection->Put(**region, 0, (*region)->key(), 0, record.bytes % kMemoryBytes, 2));
        break;
      case kPoll:
        (void)connection->Wait(16, checker, Deadline::AfterMicroseconds(200));
        break;
    }
    if (record.flags & 1) (void)connection->Wait(16, checker, Deadline::AfterMicroseconds(50));
    Drain(raw_control.get());
    Drain(raw_bulk.get());
  }
  shutdown(raw_control.get(), SHUT_WR);
  shutdown(raw_bulk.get(), SHUT_WR);
  const Deadline deadline = Deadline::After(10'000);
  while (connection->Wait(64, checker, Deadline::After(50)) >= 0) {
    Drain(raw_bulk.get());
    Require(!deadline.expired());
  }
  Require(checker.done == checker.started);
  return 0;
}
