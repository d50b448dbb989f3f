// Threads of our own inside somebody else's program: they take no signals (the program's handlers
// must not run on them) and carry a name that a debugger shows.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

namespace penstock::transport {

// False when the system has no thread to give.
template <typename F>
bool StartThread(std::thread& thread, const char* name, F&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    thread = std::thread([name, body = std::forward<F>(body)]() mutable {
      pthread_setname_np(pthread_self(), name);
      body();
    });
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace penstock::transport
