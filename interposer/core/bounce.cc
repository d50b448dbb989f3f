#include "interposer/core/bounce.h"

#include "common/log.h"
#include "interposer/core/session.h"

namespace penstock::interposer {
namespace {

constexpr size_t kBytes = size_t{kBounceSlots} * kBounceSlotBytes;

}  // namespace

bool Bounce::Key(transport::MemoryKey* key) {
  std::lock_guard lock(mutex_);
  if (region_ == nullptr && !failed_) {
    failed_ = true;
    auto region = connection_.Allocate(kBytes, transport::Access::kPeerReadsAndWrites);
    if (!region) {
      LOG_ERROR("memory", "Cannot make the bounce slots: %s", region.error().message.c_str());
      return false;
    }
    region_ = std::move(*region);
    failed_ = false;
  }
  if (failed_) return false;
  *key = region_->key();
  return true;
}

void BouncedBytes::Serve(uint64_t call, const BouncePiece& piece) {
  Move(piece.offset, {session_.bounce().slot(piece.slot), piece.bytes});
  SessionCounters& counters = session_.counters();
  counters.bulk_copies.fetch_add(piece.bytes, std::memory_order_relaxed);
  (fills_ ? counters.bulk_sent : counters.bulk_received)
      .fetch_add(piece.bytes, std::memory_order_relaxed);
  // Nobody waits for the last slot of a download.
  const bool urgent = fills_ || piece.offset + piece.bytes < bytes_;
  session_.BounceDone({call, piece.slot, 0}, thread_, urgent);
}

}  // namespace penstock::interposer
