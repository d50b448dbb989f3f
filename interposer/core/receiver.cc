#include "interposer/core/receiver.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace penstock::interposer {
namespace {

// Frames handled before the leader looks whether it is done: bounds how long another thread's reply
// waits behind a burst.
constexpr int kBudget = 64;

}  // namespace

void Receiver::Expect(ReplyWaiter* waiter) {
  std::lock_guard lock(mutex_);
  if (failed_ != CUDA_SUCCESS) {
    waiter->result = failed_;
    waiter->done = true;
    return;
  }
  waiters_.push_back(waiter);
}

// One round as the leader. The lock is released meanwhile.
bool Receiver::Lead(std::unique_lock<std::mutex>& lock, Deadline deadline, bool sleep) {
  leading_ = true;
  lock.unlock();
  const int handled =
      sleep ? connection_.Wait(kBudget, handler_, deadline) : connection_.Poll(kBudget, handler_);
  if (handled < 0 || handler_.ended()) handler_.OnClosed();
  lock.lock();
  leading_ = false;
  ++rounds_;
  if (change_waiters_ > 0) change_.notify_all();
  return handled != 0;
}

void Receiver::PassLead() {
  if (leading_) return;
  for (ReplyWaiter* waiter : waiters_) {
    if (waiter->serving) continue;
    waiter->condition.notify_one();
    return;
  }
}

// The lock is released meanwhile.
void Receiver::ServePieces(std::unique_lock<std::mutex>& lock, ReplyWaiter* waiter) {
  waiter->serving = true;
  PassLead();
  while (waiter->waiting_count > 0 && failed_ == CUDA_SUCCESS) {
    const BouncePiece piece = waiter->waiting[0];
    --waiter->waiting_count;
    std::copy_n(&waiter->waiting[1], waiter->waiting_count, &waiter->waiting[0]);
    lock.unlock();
    waiter->pieces->Serve(waiter->sequence, piece);
    lock.lock();
  }
  waiter->serving = false;
}

void Receiver::Await(ReplyWaiter* waiter) {
  std::unique_lock lock(mutex_);
  while (true) {
    // The reply comes after the last piece, so these are all.
    if (waiter->waiting_count > 0 && failed_ == CUDA_SUCCESS) ServePieces(lock, waiter);
    if (waiter->done) break;
    if (leading_) {
      waiter->condition.wait(lock);
    } else {
      Lead(lock, Deadline::Never(), true);
    }
  }
  PassLead();
}

bool Receiver::PollOnce() {
  std::unique_lock lock(mutex_);
  if (leading_) return false;
  const bool handled = Lead(lock, Deadline::Never(), false);
  PassLead();
  return handled && failed_ == CUDA_SUCCESS;
}

uint64_t Receiver::rounds() {
  std::lock_guard lock(mutex_);
  return rounds_;
}

void Receiver::WaitForChange(Deadline deadline) {
  std::unique_lock lock(mutex_);
  WaitForRound(lock, rounds_, deadline);
}

void Receiver::WaitForRound(uint64_t seen, Deadline deadline) {
  std::unique_lock lock(mutex_);
  WaitForRound(lock, seen, deadline);
}

void Receiver::WaitForRound(std::unique_lock<std::mutex>& lock, uint64_t seen, Deadline deadline) {
  if (failed_ != CUDA_SUCCESS || rounds_ != seen) return;
  if (!leading_) {
    Lead(lock, deadline, true);
    PassLead();
    return;
  }
  ++change_waiters_;
  while (rounds_ == seen && failed_ == CUDA_SUCCESS) {
    const int left_ms = deadline.poll_timeout_ms();
    if (left_ms == 0) break;
    if (left_ms < 0) {
      change_.wait(lock);
    } else {
      change_.wait_for(lock, std::chrono::milliseconds(left_ms));
    }
  }
  --change_waiters_;
}

bool Receiver::Deliver(uint64_t sequence, CUresult result, std::span<const std::byte> reply) {
  std::lock_guard lock(mutex_);
  const auto place = std::find_if(waiters_.begin(), waiters_.end(), [&](ReplyWaiter* waiter) {
    return waiter->sequence == sequence;
  });
  if (place == waiters_.end()) return false;
  ReplyWaiter* const waiter = *place;
  waiters_.erase(place);
  waiter->result = result;
  const size_t fixed_padded = (waiter->fixed.size() + 7) & ~size_t{7};
  waiter->complete = reply.size() >= fixed_padded;
  if (waiter->complete) {
    if (!waiter->fixed.empty()) {
      memcpy(waiter->fixed.data(), reply.data(), waiter->fixed.size());
    }
    const std::span<const std::byte> rest = reply.subspan(fixed_padded);
    if (!waiter->direct.empty()) {
      waiter->complete = rest.size() >= waiter->direct.size();
      if (waiter->complete) memcpy(waiter->direct.data(), rest.data(), waiter->direct.size());
    } else if (waiter->tail != nullptr) {
      waiter->tail->assign(rest.begin(), rest.end());
    }
  }
  waiter->done = true;
  waiter->condition.notify_one();
  return true;
}

bool Receiver::DeliverPiece(uint64_t sequence, const BouncePiece& piece) {
  std::lock_guard lock(mutex_);
  for (ReplyWaiter* waiter : waiters_) {
    if (waiter->sequence != sequence) continue;
    if (waiter->pieces == nullptr || !waiter->pieces->Holds(piece) ||
        waiter->waiting_count == waiter->waiting.size()) {
      return false;
    }
    waiter->waiting[waiter->waiting_count++] = piece;
    waiter->condition.notify_one();
    return true;
  }
  return false;
}

void Receiver::Fail(CUresult error) {
  std::lock_guard lock(mutex_);
  failed_ = error;
  for (ReplyWaiter* waiter : waiters_) {
    waiter->result = error;
    waiter->done = true;
    waiter->condition.notify_one();
  }
  waiters_.clear();
  change_.notify_all();
}

}  // namespace penstock::interposer
