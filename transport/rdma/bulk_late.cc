// Packets that arrive late.
//
// A queue pair that is broken here has no more work, but its last WRITEs may still be in the
// fabric, and the peer's queue pair would let them in: over bytes that its program has written
// since the move was repeated by another rail and reported. So such a move is reported when the
// peer has said that its end of the old queue pair is broken, too (rail_ended of its packets), or
// when no packet can be that old.
#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {

void BulkEngine::State::ExpectLatePackets(BulkOperation& put, uint32_t rail) {
  if (!put.put || peer_ended[rail] >= rails[rail].generation) return;
  put.tried[rail] = rails[rail].generation;
  put.late_until_ns = NowNanoseconds() + kLatePacketNs;
}

bool BulkEngine::State::MayBeWritten(const BulkOperation& put) const {
  if (put.late_until_ns == 0 || closed) return false;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (put.tried[rail] > peer_ended[rail]) return NowNanoseconds() < put.late_until_ns;
  }
  return false;
}

void BulkEngine::State::FinishLate() {
  for (BulkOperation *each = late.first(), *next; each != nullptr; each = next) {
    next = LateOperations::After(*each);
    if (!MayBeWritten(*each)) Finish(*each);
  }
}

// This end's queue pair of that generation lets nothing in any more.
void BulkEngine::State::End(uint32_t rail, uint16_t generation) {
  if (ended[rail].load(std::memory_order_relaxed) >= generation) return;
  ended[rail].store(generation, std::memory_order_release);
  changed = true;
}

void BulkEngine::State::OnPeerEnded(const std::array<uint16_t, kMaxRails>& generations) {
  if (generations == peer_ended) return;
  peer_ended = generations;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    if (rails[rail].state == BulkRail::State::kLive && rails[rail].generation <= peer_ended[rail]) {
      BreakRail(rail, "The peer uses it no more.");
    }
  }
  FinishLate();
}

}  // namespace penstock::transport::rdma
