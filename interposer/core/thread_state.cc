#include "interposer/core/thread_state.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include "protocol/limits.h"

namespace penstock::interposer {
namespace {

// Thread indices. One is given again only after all others have been used, because the server
// keeps the errors of posted calls by index.
class Indices {
 public:
  uint32_t Take() {
    std::lock_guard lock(mutex_);
    if (next_ < kMaxThreads) return next_++;
    if (free_.empty()) return kMaxThreads - 1;  // shared: only errors of posted calls mix
    const uint32_t index = free_.front();
    free_.erase(free_.begin());
    return index;
  }
  void Give(uint32_t index) {
    std::lock_guard lock(mutex_);
    free_.push_back(index);
  }

 private:
  std::mutex mutex_;
  uint32_t next_ = 1;
  std::vector<uint32_t> free_;
};

struct Globals {
  pthread_key_t key{};
  Indices indices;
  std::atomic<void (*)(ThreadState&)> exit_hook{nullptr};
};

// Which life of the process a state belongs to: a fork begins a new one.
constinit std::atomic<uint64_t> g_process{1};
thread_local ThreadState* t_state __attribute__((tls_model("initial-exec"))) = nullptr;

Globals& Shared();

void OnThreadExit(void* pointer) {
  ThreadState* const state = static_cast<ThreadState*>(pointer);
  Globals& globals = Shared();
  if (state->process == g_process.load()) {
    if (auto* hook = globals.exit_hook.load()) hook(*state);
    globals.indices.Give(state->index);
  }
  // Later destructors of this thread that call CUDA get a fresh state.
  t_state = nullptr;
  delete state;
}

// Leaked: threads end after static destructors, too.
Globals& Shared() {
  static Globals* const globals = [] {
    auto* made = new Globals;
    pthread_key_create(&made->key, &OnThreadExit);
    return made;
  }();
  return *globals;
}

__attribute__((noinline)) ThreadState& MakeState() {
  Globals& globals = Shared();
  if (t_state == nullptr) {
    t_state = new ThreadState;
    pthread_setspecific(globals.key, t_state);
  } else {
    *t_state = ThreadState{};
  }
  t_state->index = globals.indices.Take();
  t_state->process = g_process.load();
  return *t_state;
}

}  // namespace

ThreadState& ThisThread() {
  ThreadState* const state = t_state;
  if (state != nullptr && state->process == g_process.load(std::memory_order_relaxed)) {
    return *state;
  }
  return MakeState();
}

void ForgetThreadStates() {
  g_process.fetch_add(1);
}

void SetThreadExitHook(void (*hook)(ThreadState&)) {
  Shared().exit_hook = hook;
}

}  // namespace penstock::interposer
