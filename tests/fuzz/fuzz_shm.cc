// A session through shared memory whose peer writes anything into the shared pages and sends any
// message on the socket beside them, against either end. The input is a list of records.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cstdlib>

#include "tests/fuzz/input.h"
#include "transport/shm/connection.h"
#include "transport/shm/shm.h"

using namespace penstock;
using namespace penstock::transport;
using namespace penstock::transport::shm;
using fuzz::Require;

namespace {

constexpr uint32_t kMaxFrame = 8192;
constexpr size_t kMemoryBytes = 16384;

struct Record {
  uint16_t bytes;
  uint8_t kind;
  uint8_t flags;
};
enum Kind : uint8_t {
  kWriteWords,  // bytes at an offset of page 0
  kWriteBulk,   // likewise among the descriptors of bulk chunks
  kWriteRing,   // likewise in the ring towards the end under test
  kAdvance,     // moves the head of that ring on
  kMessage,     // a LinkMessage, with its magic set right, and perhaps a file
  kRawMessage,  // any bytes on the socket
  kGet,
  kPut,
  kSend,  // the end under test sends a frame
  kReach,
  kPoll,
  kKinds
};

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

struct Siege {
  std::unique_ptr<ShmConnection> connection;
  std::unique_ptr<Link> link;
  std::unique_ptr<Segment> segment;

  explicit Siege(End end) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) abort();
    constexpr size_t kRing = 64 << 10;
    constexpr uint32_t kSlot = 4096;
    auto file = MakeSharedFile("fuzz", Segment::FileBytes(kRing, kSlot));
    if (!file) abort();
    auto ours = Segment::Map(file->get(), kRing, kSlot);
    auto theirs = Segment::Map(file->get(), kRing, kSlot);
    if (!ours || !theirs) abort();
    link = std::make_unique<Link>(UniqueFd(pair[1]));
    segment = std::move(*theirs);
    connection =
        std::make_unique<ShmConnection>(end, UniqueFd(pair[0]), std::move(*ours), kMaxFrame);
    connection->Start();
  }
};

void Write(std::byte* area, size_t area_bytes, uint16_t at, const std::vector<std::byte>& bytes) {
  const size_t offset = size_t{at} * 8 % area_bytes;
  if (!bytes.empty()) {
    memcpy(area + offset, bytes.data(), std::min(bytes.size(), area_bytes - offset));
  }
}

void Message(Link& link, fuzz::Input& input, uint8_t flags) {
  auto message = input.Take<LinkMessage>();
  message.magic = LinkMessage::kMagic;
  UniqueFd file;
  if (flags & 2) {
    file = UniqueFd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const size_t bytes = (flags & 4) != 0 ? kMemoryBytes : message.bytes % (1 << 20);
    if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) abort();
    if (flags & 8) fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK);
    if (flags & 4) message.bytes = bytes;
  }
  (void)link.Send(message, file.valid() ? file.get() : -1, Deadline::After(0));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool quiet = fuzz::Silence();
  (void)quiet;
  fuzz::Input input(data, size);
  const End end = (input.Take<uint8_t>() & 1) != 0 ? kClient : kServer;
  std::vector<std::byte> memory(kMemoryBytes);
  Siege siege(end);
  ShmConnection& connection = *siege.connection;
  auto region = connection.Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
  if (!region) abort();
  Checker checker;
  uint64_t head = 0;
  while (!input.empty() && !connection.closed()) {
    const auto record = input.Take<Record>();
    const auto position = input.Take<uint16_t>();
    switch (record.kind % kKinds) {
      case kWriteWords:
        Write(reinterpret_cast<std::byte*>(&siege.segment->words()), sizeof(Words), position,
              input.TakeBytes(record.bytes % 256));
        break;
      case kWriteBulk:
        Write(reinterpret_cast<std::byte*>(&siege.segment->descriptor(0)), kPageBytes / 2, position,
              input.TakeBytes(record.bytes % 256));
        break;
      case kWriteRing:
        Write(siege.segment->ring(end), siege.segment->ring_bytes(), position,
              input.TakeBytes(record.bytes));
        break;
      case kAdvance:
        head += record.bytes % 512 * 8;
        siege.segment->words().to[end].head.store(head);
        siege.link->SendWake();
        break;
      case kMessage:
        Message(*siege.link, input, record.flags);
        break;
      case kRawMessage: {
        const auto bytes = input.TakeBytes(record.bytes % 200);
        (void)send(siege.link->fd(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        break;
      }
      case kGet:
      case kPut: {
        if (end != kServer) break;
        const uint64_t bytes = record.bytes % kMemoryBytes;
        MemoryKey key = (*region)->key();
        if (record.flags & 2) key = input.Take<MemoryKey>();
        checker.Started(record.kind % kKinds == kGet
                            ? connection.Get(**region, 0, key, position, bytes, 1)
                            : connection.Put(**region, 0, key, position, bytes, 2));
        break;
      }
      case kSend: {
        std::byte* slot = nullptr;
        const uint32_t bytes = 8 + record.bytes % (kMaxFrame - 8);
        if (connection.Reserve(bytes, &slot) != Outcome::kOk) break;
        memset(slot, 1, bytes);
        memcpy(slot, &bytes, sizeof bytes);
        connection.Commit(bytes, kFlush);
        break;
      }
      case kReach: {
        ReachedMemory reached;
        const auto key = input.Take<MemoryKey>();
        if (connection.Reach(key, position, record.bytes, Access::kPeerReads, &reached)) {
          Require(reached.address >= reached.base &&
                  reached.address + record.bytes <= reached.base + reached.bytes);
          if (record.bytes > 0) checker.sink = static_cast<unsigned>(reached.address[0]);
        }
        break;
      }
      case kPoll:
        (void)connection.Poll(16, checker);
        break;
    }
    if (record.flags & 1) {
      siege.link->SendWake();
      (void)connection.Wait(16, checker, Deadline::AfterMicroseconds(50));
    }
    LinkMessage scrap;
    UniqueFd file;
    while (siege.link->Receive(&scrap, &file) == Link::Received::kWake) {
    }
  }
  connection.Close(0);
  const Deadline deadline = Deadline::After(10'000);
  while (connection.Wait(64, checker, Deadline::After(50)) >= 0) Require(!deadline.expired());
  Require(checker.done == checker.started);
  region->reset();
  return 0;
}
