// Sleeping on a word of shared memory. Used by the threads that move bulk data; receivers of frames
// sleep on the socket instead, because an event loop must be able to wait for them.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "transport/shm/layout.h"

namespace penstock::transport::shm {

// Returns when woken, when the word is not `seen` (any more), or after a second: whoever waits
// looks again then, so that a peer that never wakes anybody costs time only.
inline void SleepWhile(BulkWords& words, uint32_t seen) {
  const timespec second = {1, 0};
  syscall(SYS_futex, &words.changes, FUTEX_WAIT, seen, &second, nullptr, 0);
}

inline void WakeUp(BulkWords& words) {
  words.changes.fetch_add(1, std::memory_order_seq_cst);
  if (words.sleeping.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &words.changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

}  // namespace penstock::transport::shm
