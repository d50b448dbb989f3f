// Copies of pageable memory through registered slots, where registering that memory itself is dear.
//
// Over RDMA the program's memory would have to be registered for one copy, which costs more than
// copying it and pins it. So the bytes pass through the bounce slots, a few of them registered
// once:
//
//   upload      the server's stream reaches the copy; it names slots and pieces (kBounce); the
//   thread
//               that waits for the call fills each and says so (kBounceDone); the server pulls
//   download    the server pushes a piece to a slot and names it; the thread empties it and says so
//
// One call per copy whatever its size, each byte copied once by the CPU, and while one piece is
// copied others are on the wire. The server deals out the slots (server/worker/bounce.h has the
// reason), so the client keeps no account of them.
//
// Price: an upload waits a round trip for its first slot. Small uploads do not come here; they are
// staged and posted.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>

#include "interposer/core/receiver.h"
#include "transport/transport.h"

namespace penstock::interposer {

class Session;

// The slots' memory, made when first used.
class Bounce {
 public:
  explicit Bounce(transport::Connection& connection) : connection_(connection) {}

  // False if the memory cannot be had.
  bool Key(transport::MemoryKey* key);
  std::byte* slot(uint32_t index) const {
    return region_->address() + size_t{index} * kBounceSlotBytes;
  }

 private:
  transport::Connection& connection_;
  std::mutex mutex_;  // guards everything below until `region_` is there
  bool failed_ = false;
  std::unique_ptr<transport::MemoryRegion> region_;
};

// The program's side of one call whose bytes go through the slots.
class BouncedBytes : public PieceServer {
 public:
  // `fills`: the program's bytes go to the server.
  BouncedBytes(Session& session, uint32_t thread, bool fills, uint64_t bytes)
      : PieceServer(bytes), session_(session), thread_(thread), fills_(fills) {}
  void Serve(uint64_t call, const BouncePiece& piece) final;

 private:
  // Copies between the slot and the bytes at `offset` of the copy.
  virtual void Move(uint64_t offset, std::span<std::byte> slot) = 0;

  Session& session_;
  const uint32_t thread_;
  const bool fills_;
};

}  // namespace penstock::interposer
