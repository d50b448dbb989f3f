// Words of shared memory through which one end tells the other that something is done.
//
// In tests both ends are in one process, and each has mapped the segment for itself.
// ThreadSanitizer takes the two mappings of a word for two words, so it misses that one thread's
// store orders what it did before another thread's load, and calls every access to the memory that
// was moved a race. It is told here: by the word's place within its page, which is the same in both
// mappings. Two words that share a place can only hide a race from it. Other builds have plain
// loads and stores.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void* place);
extern "C" void __tsan_release(void* place);
#endif

namespace penstock::transport::shm {

#if defined(__SANITIZE_THREAD__)
inline char* OrderOf(const void* word) {
  static char places[4096];
  return &places[reinterpret_cast<uintptr_t>(word) % sizeof places];
}
inline void OrderBefore(const void* word) {
  __tsan_release(OrderOf(word));
}
inline void OrderAfter(const void* word) {
  __tsan_acquire(OrderOf(word));
}
#else
inline void OrderBefore(const void*) {}
inline void OrderAfter(const void*) {}
#endif

// What this thread did before is there for whoever observes the value.
template <typename T>
void Publish(std::atomic<T>& word, T value, std::memory_order order) {
  OrderBefore(&word);
  word.store(value, order);
}

template <typename T>
T Observe(const std::atomic<T>& word) {
  const T value = word.load(std::memory_order_acquire);
  OrderAfter(&word);
  return value;
}

}  // namespace penstock::transport::shm
