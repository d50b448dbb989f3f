// The order of moves over memory where Puts have written.
//
// Queue pairs know nothing of each other: a move by one rail may pass a Put that another rail has
// reported, and so may a newer queue pair of the same rail.
#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {
bool BulkEngine::State::Eligible(const BulkOperation& operation, uint32_t rail) const {
  if ((operation.key.rails & 1u << rail) == 0) return false;
  if (!operation.after_puts) return true;
  for (uint32_t other = 0; other < kMaxRails; ++other) {
    if (operation.after[other] == 0 || other == rail) continue;
    if (!Covers(peer_fence[other], operation.after[other])) return false;
  }
  // The same queue pair keeps the order by itself; a newer one does not.
  return operation.after[rail] == 0 || operation.after_generation[rail] == rails[rail].generation ||
         Covers(peer_fence[rail], operation.after[rail]);
}

// A Put that is reported may still be on its way into the peer's memory. Until the peer has said
// that it saw the notification, another queue pair could overtake it there.
void BulkEngine::State::Remember(const BulkOperation& put, uint32_t rail, uint32_t sequence) {
  if (recent_puts.size() == kRecentPuts) {
    const RecentPut& oldest = recent_puts.front();
    const bool alone = forgotten[oldest.rail] == 0 ||
                       Covers(peer_fence[oldest.rail], forgotten[oldest.rail]) ||
                       forgotten_generation[oldest.rail] == oldest.generation;
    forgotten[oldest.rail] = oldest.sequence;
    forgotten_generation[oldest.rail] = alone ? oldest.generation : 0;
    recent_puts.erase(recent_puts.begin());
  }
  recent_puts.push_back({put.remote, put.bytes, rail, rails[rail].generation, sequence});
}

void BulkEngine::State::OrderAfterPuts(BulkOperation& operation) {
  const auto order = [&](uint32_t rail, uint32_t sequence, uint16_t generation) {
    if (sequence == 0 || Covers(peer_fence[rail], sequence)) return;
    const bool mixed = operation.after[rail] != 0 && operation.after_generation[rail] != generation;
    operation.after_puts = true;
    operation.after[rail] = sequence;
    operation.after_generation[rail] = mixed ? 0 : generation;
  };
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    order(rail, forgotten[rail], forgotten_generation[rail]);
  }
  for (const RecentPut& recent : recent_puts) {
    if (recent.address < operation.remote + operation.bytes &&
        operation.remote < recent.address + recent.bytes) {
      order(recent.rail, recent.sequence, recent.generation);
    }
  }
}

void BulkEngine::State::OnPeerFence(const std::array<uint32_t, kMaxRails>& reached) {
  if (reached == peer_fence) return;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    // More than was ever sent is a lie, which harms the liar's own order only.
    if (Covers(reached[rail], peer_fence[rail])) peer_fence[rail] = reached[rail];
  }
  std::erase_if(recent_puts, [&](const RecentPut& recent) {
    return Covers(peer_fence[recent.rail], recent.sequence);
  });
  if (queued == 0) return;
  wants_wake = true;
  PumpAll();
}

}  // namespace penstock::transport::rdma
