#include "interposer/core/host_functions.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "common/log.h"
#include "interposer/core/session.h"
#include "interposer/core/thread_state.h"

namespace penstock::interposer {
namespace {

// A function may wait for what never comes; the context then goes without it.
constexpr auto kDrainPatience = std::chrono::seconds(5);

struct Turn {
  uint64_t id = 0;
  HostFunction function;
  CUresult status = CUDA_SUCCESS;
};

void Call(const Turn& turn) {
  ThreadState& thread = ThisThread();
  thread.in_host_function = true;
  if (turn.function.callback != nullptr) {
    turn.function.callback(turn.function.stream, turn.status, turn.function.user);
  } else if (turn.status == CUDA_SUCCESS) {
    turn.function.function(turn.function.user);
  }
  thread.in_host_function = false;
}

}  // namespace

struct HostFunctions::Shared {
  explicit Shared(Session& its_session) : session(its_session) {}

  bool Has(const ContextRecord* context) const {
    if (running == context) return true;
    for (const auto& [id, function] : waiting) {
      if (function.context == context) return true;
    }
    for (const Turn& turn : turns) {
      if (turn.function.context == context) return true;
    }
    return false;
  }

  Session& session;  // not to be touched once stopped, but for one who is in_session
  std::mutex mutex;  // guards everything below
  std::condition_variable work, change;
  std::map<uint64_t, HostFunction> waiting;  // for their streams
  std::deque<Turn> turns;                    // to run now
  uint64_t next_id = 1;
  const ContextRecord* running = nullptr;  // the context of the one that runs
  bool started = false, in_session = false, failed = false, stopped = false;
};

HostFunctions::HostFunctions(Session& session) : shared_(std::make_shared<Shared>(session)) {}

uint64_t HostFunctions::Add(const HostFunction& function) {
  std::lock_guard lock(shared_->mutex);
  if (shared_->failed || shared_->stopped) return 0;
  if (!shared_->started) {
    // Signals are the program's; none may land on our thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    try {
      std::thread thread([shared = shared_] { Run(shared); });
      pthread_setname_np(thread.native_handle(), "penstock-host");
      thread.detach();
      shared_->started = true;
    } catch (const std::system_error& error) {
      LOG_WARNING("session", "Cannot start the thread for host functions: %s.", error.what());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!shared_->started) return 0;
  }
  const uint64_t id = shared_->next_id++;
  shared_->waiting.emplace(id, function);
  if (shared_->waiting.size() == 1) shared_->work.notify_one();
  return id;
}

void HostFunctions::Forget(uint64_t id) {
  std::lock_guard lock(shared_->mutex);
  shared_->waiting.erase(id);
  // The session may have broken meanwhile, which gives every function its turn.
  std::erase_if(shared_->turns, [id](const Turn& turn) { return turn.id == id; });
  shared_->change.notify_all();
}

bool HostFunctions::Reached(uint64_t id, CUresult status) {
  std::lock_guard lock(shared_->mutex);
  if (id == 0 || id >= shared_->next_id) return false;
  const auto found = shared_->waiting.find(id);
  if (found == shared_->waiting.end()) return true;  // its context is gone here already
  shared_->turns.push_back({id, found->second, status});
  shared_->waiting.erase(found);
  shared_->work.notify_one();
  return true;
}

void HostFunctions::Drain(const ContextRecord& context) {
  std::unique_lock lock(shared_->mutex);
  shared_->change.wait_for(lock, kDrainPatience, [&] { return !shared_->Has(&context); });
}

void HostFunctions::DropContext(const ContextRecord& context) {
  std::lock_guard lock(shared_->mutex);
  std::erase_if(shared_->waiting,
                [&](const auto& entry) { return entry.second.context == &context; });
  std::erase_if(shared_->turns, [&](const Turn& turn) {
    return turn.function.context == &context && turn.function.callback == nullptr;
  });
}

void HostFunctions::Fail(CUresult error) {
  std::lock_guard lock(shared_->mutex);
  shared_->failed = true;
  for (const auto& [id, function] : shared_->waiting) {
    shared_->turns.push_back({id, function, error});
  }
  shared_->waiting.clear();
  shared_->work.notify_one();
}

void HostFunctions::Stop() {
  std::unique_lock lock(shared_->mutex);
  shared_->stopped = true;
  shared_->waiting.clear();
  shared_->turns.clear();
  shared_->work.notify_one();
  shared_->change.notify_all();
  // The session is closed, so the thread is out of it at once.
  shared_->change.wait(lock, [&] { return !shared_->in_session; });
}

void HostFunctions::Run(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  // Leaves the lock to be in the session.
  const auto visit = [&](const auto& work) {
    shared->in_session = true;
    lock.unlock();
    work(shared->session);
    lock.lock();
    shared->in_session = false;
    shared->change.notify_all();
  };
  while (!shared->stopped) {
    if (!shared->turns.empty()) {
      const Turn turn = shared->turns.front();
      shared->turns.pop_front();
      shared->running = turn.function.context;
      lock.unlock();
      Call(turn);
      lock.lock();
      // An error is nothing that the stream waits for.
      if (!shared->stopped && turn.status == CUDA_SUCCESS) {
        visit([&](Session& session) {
          const HostFunctionDoneCommand command{turn.id};
          OutgoingCall done;
          done.function = static_cast<uint32_t>(Operation::kHostFunctionDone);
          done.thread = ThisThread().index;
          done.command = &command;
          done.command_bytes = sizeof command;
          static_cast<void>(session.Post(done, nullptr));  // fails with the session
        });
      }
      shared->running = nullptr;
      shared->change.notify_all();
    } else if (shared->waiting.empty()) {
      shared->work.wait(lock);
    } else {
      uint64_t seen = 0;
      visit([&](Session& session) { seen = session.rounds(); });
      if (shared->stopped || shared->waiting.empty() || !shared->turns.empty()) continue;
      visit([&](Session& session) { session.WaitForRound(seen); });
    }
  }
}

}  // namespace penstock::interposer
