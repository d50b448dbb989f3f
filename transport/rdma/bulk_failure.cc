// Rails that end: broken, drained, destroyed, and what they carried given to the others.
//
// Nobody waits for a drain: the keeper looks again until it is over, and a newer queue pair of the
// rail waits behind it.
#include "common/log.h"
#include "transport/rdma/bulk_state.h"

namespace penstock::transport::rdma {

void BulkEngine::State::BreakRail(uint32_t rail, const std::string& reason) {
  BulkRail& state = rails[rail];
  if (state.state != BulkRail::State::kLive) return;
  LOG_INFO("transport", "Rail %u (generation %u) fails: %s", rail, state.generation,
           reason.c_str());
  state.state = BulkRail::State::kDraining;
  state.drain_until_ns = NowNanoseconds() + kDrainMs * 1'000'000;
  if (state.queue_pair->Break()) End(rail, state.generation);
  live[rail].store(0, std::memory_order_release);
  changed = wants_wake = true;
}

// The connection must end: on any other rail the same would happen again.
void BulkEngine::State::GiveUp(const std::string& reason) {
  if (failed.load(std::memory_order_relaxed)) return;
  failure = reason;
  failed.store(true, std::memory_order_release);
  wants_wake = true;
}

void BulkEngine::State::InstallSuccessor(uint32_t rail) {
  BulkRail& state = rails[rail];
  if (state.successor == nullptr) return;
  state.state = BulkRail::State::kLive;
  state.queue_pair = std::move(state.successor);
  state.generation = state.successor_generation;
  state.under_way.Prepare(BulkSendDepth(options));
  state.active_ns = NowNanoseconds();
  state.receives_missing = 0;
  NotifyDue();
  PumpAll();
}

// The receiver of notifications waits for every receive, too: one of them may be a notification
// that the sender knows to be done, and waits for us to count.
bool BulkEngine::State::Drained(uint32_t rail) const {
  const BulkRail& state = rails[rail];
  return state.under_way.empty() &&
         (initiator || state.receives_missing >= state.queue_pair->receive_depth());
}

// Destroying a queue pair takes the system's time, so it is done without the lock (Turn), and
// FinishDrain follows.
void BulkEngine::State::EndDrain(uint32_t rail) {
  BulkRail& state = rails[rail];
  ReapReceives(rail);
  state.state = BulkRail::State::kEnding;
  spent.push_back({std::move(state.queue_pair), rail, true});
}

void BulkEngine::State::Discard(uint32_t rail, uint16_t generation,
                                std::unique_ptr<QueuePair> queue_pair) {
  if (queue_pair == nullptr) return;
  if (queue_pair->Break()) End(rail, generation);
  if (initiator || closed) {  // it never sent anything there, and nobody notifies it
    spent.push_back({std::move(queue_pair), rail, false});
  } else {
    discarded.push_back({std::move(queue_pair), rail, 0, NowNanoseconds() + kDrainMs * 1'000'000});
  }
  wants_wake = true;
}

// The queue pair is gone, and touches no memory of this end any more.
void BulkEngine::State::FinishDrain(uint32_t rail) {
  BulkRail& state = rails[rail];
  End(rail, state.generation);
  while (!state.under_way.empty()) {
    OnFailed(rail, state.under_way.PopFront(), IBV_WC_WR_FLUSH_ERR);
  }
  state.state = BulkRail::State::kDown;
  state.receives_missing = 0;
  // Bytes whose notification did not come through go again, too.
  for (BulkOperation* each = operations.first(); each != nullptr; each = Operations::After(*each)) {
    if (!each->promised[rail].empty() || !each->carried[rail].empty()) {
      ExpectLatePackets(*each, rail);
    }
    for (Chunks* chunks : {&each->promised[rail], &each->carried[rail]}) {
      while (BulkChunk* chunk = chunks->PopFront()) {
        chunk->promised = false;
        ++each->chunks_left;
        state.again.PushBack(*chunk);
      }
    }
  }
  while (BulkChunk* chunk = state.again.PopBack()) {
    ExpectLatePackets(*chunk->operation, rail);
    if (chunk->operation->status == BulkStatus::kOk) {
      Requeue(*chunk);
      repeated.fetch_add(1);
    } else {
      --chunk->operation->chunks_left;
      chunk_pool.Give(*chunk);
    }
  }
  for (BulkOperation *each = operations.first(), *next; each != nullptr; each = next) {
    next = Operations::After(*each);
    if (each->chunks_left == 0) MaybeFinish(*each);
  }
  InstallSuccessor(rail);
}

}  // namespace penstock::transport::rdma
