// What carries frames and bulk data between two processes. Frames are opaque here.
//
// A Connection has two planes.
//
// Control: an ordered, reliable stream of frames each way, exactly once while the connection lives.
// A sender reserves space in the send ring, writes the frame there and commits it. Neither call
// blocks, allocates or enters the kernel unless kFlush asks that the bytes leave now, or a receiver
// in shared memory sleeps and has to be woken.
//
// Bulk: one-sided moves between memory that both ends have registered. The *server* starts all of
// them: Get pulls from the peer's memory, Put pushes to it. There is no order between bulk moves,
// nor between bulk moves and frames, except these promises:
//   - when OnBulkDone reports a Get, its bytes are readable in local memory;
//   - when OnBulkDone reports a Put, its bytes are visible to the peer by the time it handles any
//     frame that is sent from then on. Not before: a NIC may report a write whose bytes still are
//     on their way into memory.
// So whoever wants "the data, then the news" sends the frame after OnBulkDone.
//
// Threads: Reserve/Commit/Flush need outside locking against each other (the call stream's lock).
// Poll/Wait need outside locking against each other (one receiver at a time). The two groups,
// Register and the bulk calls may run at the same time on different threads. Callbacks are made
// from Poll and Wait only, on the caller's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/result.h"

namespace penstock::transport {

struct Caps {
  const char* name = "";   // "tcp", "inproc", ...
  uint32_t max_frame = 0;  // bytes of the largest frame
  uint64_t max_bulk = 0;   // bytes of the largest single Get or Put
  // Registering memory costs more than copying it: keep it for memory that is used again.
  bool registration_is_dear = false;
  // RegisterDevice may work: bulk moves can go straight to and from the memory of a GPU here.
  bool device_memory = false;
  // counters() of the end that starts no bulk moves count their bytes too. (A NIC that serves them
  // tells nobody.)
  bool sees_bulk = true;
};

enum class Outcome : uint8_t {
  kOk,
  kAgain,   // no space now; poll, then try again
  kClosed,  // the connection is gone; close_reason() says why
};

enum class Access : uint8_t { kPeerReads = 1, kPeerWrites = 2, kPeerReadsAndWrites = 3 };

// Names registered memory to the peer. Opaque: made by Register, carried in frames, given to Get or
// Put by the other side. `bytes` counts the used part of the blob.
struct MemoryKey {
  static constexpr size_t kCapacity = 56;
  uint32_t bytes = 0;
  uint32_t reserved = 0;
  std::array<std::byte, kCapacity> blob{};
};
static_assert(sizeof(MemoryKey) == 64);

// Registered memory. Destroying it ends the peer's access and returns only when nobody touches the
// memory any more (or the connection is closed).
class MemoryRegion {
 public:
  virtual ~MemoryRegion() = default;
  virtual std::byte* address() const = 0;
  virtual size_t size() const = 0;
  virtual const MemoryKey& key() const = 0;
};

// Memory of the peer that has an address in this process.
struct ReachedMemory {
  std::byte* address = nullptr;  // of the first byte asked for
  // The whole of what is mapped, the same for as long as `keep` is held.
  std::byte* base = nullptr;
  size_t bytes = 0;
  // The addresses are good while this is held. With the last but this holder gone, the peer has
  // taken the memory back.
  std::shared_ptr<const void> keep;
};

enum class BulkStatus : uint8_t {
  kOk,
  kRefused,  // the peer has no such registration, or the range or access is outside it
  kClosed,   // the connection ended first
  kCancelled,
  kUnreachable,  // no NIC in use reaches the local memory (which RegisterDevice has registered, or
                 // a new NIC would not register) and the peer's
};

// A way through one NIC of this host and back to it, without the peer, to see whether the NIC
// reaches registered device memory. Each move blocks until it is done or the deadline has passed.
// After a failed move only the destructor is called.
class Loopback {
 public:
  virtual ~Loopback() = default;
  virtual const std::string& name() const = 0;  // of the NIC
  static constexpr size_t kMostBytes = 64 << 10;
  virtual Status Write(MemoryRegion& device, uint64_t offset, std::span<const std::byte> bytes,
                       Deadline deadline) = 0;
  virtual Status Read(MemoryRegion& device, uint64_t offset, std::span<std::byte> bytes,
                      Deadline deadline) = 0;
};

class Handler {
 public:
  virtual ~Handler() = default;
  // The bytes are private to this process and stable until the callback returns. The length is at
  // most caps().max_frame. Returning false ends the connection (a malformed frame).
  virtual bool OnFrame(std::span<const std::byte> frame) = 0;
  virtual void OnBulkDone(uint64_t cookie, BulkStatus status, uint64_t bytes) = 0;
};

enum CommitFlags : uint32_t {
  kNone = 0,
  kFlush = 1,  // the peer is waited for: send now, on this thread if that is the shortest way
};

struct Counters {
  uint64_t frames_sent = 0, frames_received = 0;
  uint64_t bytes_sent = 0, bytes_received = 0;            // control plane, frame bytes
  uint64_t bulk_bytes_sent = 0, bulk_bytes_received = 0;  // payload bytes
  // Packets with frames in them, on a transport that puts several frames into one.
  uint64_t packets_sent = 0, packets_received = 0;
  uint64_t bulk_copies = 0;  // payload bytes copied by the CPU between buffers of this process
};

class Connection {
 public:
  virtual ~Connection() = default;
  virtual const Caps& caps() const = 0;

  // Space for a frame of up to `bytes` (<= caps().max_frame), contiguous, 8-byte aligned.
  virtual Outcome Reserve(uint32_t bytes, std::byte** slot) = 0;
  // Sends the first `used` bytes (<= reserved) of the slot.
  virtual void Commit(uint32_t used, uint32_t flags) = 0;
  virtual Outcome Flush() = 0;

  // Handles what has arrived, at most `budget` frames and completions. The number handled; 0 when
  // idle; -1 when closed and everything that arrived before has been handled.
  virtual int Poll(int budget, Handler& handler) = 0;
  // Like Poll, but sleeps until there is something, Interrupt() is called or the deadline passes.
  virtual int Wait(int budget, Handler& handler, Deadline deadline) = 0;
  // Makes a sleeping Wait return 0 soon. Callable from any thread.
  virtual void Interrupt() = 0;

  // For event loops with other sources: when Arm() returned true nothing was waiting, and
  // event_fd() becomes readable when there is; when it returned false, poll first.
  virtual int event_fd() const = 0;
  virtual bool Arm() = 0;

  virtual Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes,
                                                         Access access) = 0;
  // Zeroed memory of the region's own, whole pages, for the peer to read or write. A transport may
  // make it in a way that the peer needs no copy for (Reach). Not for the local side of Get or Put.
  virtual Result<std::unique_ptr<MemoryRegion>> Allocate(size_t bytes, Access access);
  // True if the peer's memory can be touched here, without a Get or a Put. What this process then
  // writes is visible to the peer by the time it handles a frame that is sent from then on. The
  // peer may write at any time, so nothing read from it is read twice.
  virtual bool Reach(const MemoryKey& key, uint64_t offset, uint64_t bytes, Access wanted,
                     ReachedMemory* memory) {
    (void)key, (void)offset, (void)bytes, (void)wanted, (void)memory;
    return false;
  }
  // Memory of a GPU, through the dma-buf that names it, for Get and Put on this side only; no peer
  // can reach it. `offset` is where it starts in the dma-buf, whose descriptor stays the caller's.
  // address() of the region is the GPU's and means nothing to the CPU. Any thread.
  virtual Result<std::unique_ptr<MemoryRegion>> RegisterDevice(uint64_t device_address,
                                                               size_t bytes, int dmabuf,
                                                               uint64_t offset);
  // One for each NIC that the connection may use. Any thread.
  virtual Result<std::vector<std::unique_ptr<Loopback>>> OpenLoopbacks(Deadline deadline);

  // Pulls `bytes` from the peer's memory `source` + source_offset into local memory. The local
  // region must stay alive until OnBulkDone(cookie). Zero bytes complete without touching memory.
  virtual Outcome Get(MemoryRegion& target, uint64_t target_offset, const MemoryKey& source,
                      uint64_t source_offset, uint64_t bytes, uint64_t cookie) = 0;
  virtual Outcome Put(MemoryRegion& source, uint64_t source_offset, const MemoryKey& target,
                      uint64_t target_offset, uint64_t bytes, uint64_t cookie) = 0;

  virtual bool closed() const = 0;
  virtual std::string close_reason() const = 0;  // empty while open
  // Sends what is committed (at most drain_ms long), then closes. Safe to call from any thread,
  // also twice. Afterwards no memory is touched, and pending moves have been or will be reported
  // kClosed.
  virtual void Close(int drain_ms) = 0;
  virtual Counters counters() const = 0;
};

}  // namespace penstock::transport
