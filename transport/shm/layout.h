// What lies where in the memory that the two ends share, and the messages on the socket beside it.
//
// The server makes one sealed memory file per connection:
//
//   page 0      Words: positions of the rings, who sleeps
//   page 1      kBulkSlots descriptors of bulk chunks
//   then        ring of frames to the server, ring of frames to the client (each mapped twice in a
//               row, so that a frame is contiguous wherever it starts), kBulkSlots buffers
//
// Who writes what. `head` belongs to the producer of a ring, `tail` to its consumer. `sleeping` is
// set by a receiver before it looks at its ring for the last time and goes to sleep; a producer
// that has moved `head` takes it back and sends a wake message. Both orders are sequentially
// consistent, so one of the two always sees the other. A bulk descriptor's first part is written by
// the server, its last by the client; `request` and `reply` are stored last in each.
//
// Each end keeps its own position and everything it has checked in private memory. What a peer
// does to these words can make the other end close the connection, and nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace penstock::transport::shm {

inline constexpr uint32_t kVersion = 1;
inline constexpr size_t kPageBytes = 4096;
inline constexpr uint32_t kBulkSlots = 16;
// Shared allocations of one session, and their bytes. Every one is a mapping, of which the kernel
// grants a process some 65,000; the bytes bound what a client can make a worker map.
inline constexpr size_t kMostShares = 8192;
inline constexpr uint64_t kMostShareBytes = uint64_t{1} << 40;
inline constexpr size_t kMostRingBytes = 64 << 20;
inline constexpr uint32_t kMostSlotBytes = 8 << 20;

// Index of ends, and of directions by the end that receives.
enum End : uint32_t { kServer = 0, kClient = 1 };
constexpr End Other(End end) {
  return end == kServer ? kClient : kServer;
}

struct RingWords {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  alignas(64) std::atomic<uint32_t> sleeping;
};

// A thread that waits for bulk work sleeps on `changes`, a futex that whoever has work for it
// counts up.
struct BulkWords {
  alignas(64) std::atomic<uint32_t> changes;
  std::atomic<uint32_t> sleeping;
};

struct Words {
  RingWords to[2];
  BulkWords bulk[2];
};
static_assert(sizeof(Words) <= kPageBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

enum BulkOp : uint32_t { kBulkGet = 1, kBulkPut = 2 };
enum BulkReply : uint32_t { kBulkOk = 0, kBulkRefused = 1 };

// A chunk of a move, and the range of the whole move, so that a move outside a registration is
// refused before its first byte.
struct BulkRequest {
  uint32_t op = 0;
  uint32_t key_slot = 0;
  uint32_t key_generation = 0;
  uint32_t bytes = 0;
  uint64_t key_secret = 0;
  uint64_t offset = 0;
  uint64_t move_offset = 0;
  uint64_t move_bytes = 0;
};
static_assert(sizeof(BulkRequest) == 48);

// Chunk n uses slot n % kBulkSlots; `request` and `reply` are n + 1 (modulo 2^32) once they stand.
struct BulkDescriptor {
  BulkRequest body;
  std::atomic<uint32_t> request;
  alignas(64) std::atomic<uint32_t> reply;
  uint32_t status;
};
static_assert(sizeof(BulkDescriptor) == 128);
static_assert(sizeof(BulkDescriptor) * kBulkSlots <= kPageBytes);

// On the socket (SOCK_SEQPACKET). A wake-up is a message of one byte.
enum class LinkKind : uint32_t {
  kHello = 1,    // client: token, max_frame
  kWelcome = 2,  // server, with the memory file: max_frame, ring_bytes, slot_bytes
  kShare = 3,    // client, with a memory file: id, bytes, access, secret
  kUnshare = 4,  // client: id
};

struct LinkMessage {
  uint32_t magic = kMagic;
  LinkKind kind = LinkKind::kHello;
  uint32_t version = kVersion;
  uint32_t max_frame = 0;
  uint64_t ring_bytes = 0;
  uint32_t slot_bytes = 0;
  uint32_t access = 0;
  uint64_t id = 0;
  uint64_t bytes = 0;
  uint64_t secret = 0;
  uint8_t token[16] = {};

  static constexpr uint32_t kMagic = 0x314d5350;  // "PSM1"
};
static_assert(sizeof(LinkMessage) == 72);

}  // namespace penstock::transport::shm
