#include "server/worker/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <cstdio>

#include "common/log.h"
#include "server/worker/outbox.h"

namespace penstock::server {

Status Output::Capture() {
  for (int i = 0; i < 2; ++i) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return FailErrno("Cannot make a pipe");
    pipes_[i] = UniqueFd(ends[0]);
    const UniqueFd writing(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    fcntl(ends[0], F_SETPIPE_SZ, 1 << 20);  // as far as the user's limit allows
    if (dup2(writing.get(), i + 1) < 0) return FailErrno("Cannot redirect output");
  }
  stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC));
  if (!stop_.valid()) return FailErrno("Cannot make an eventfd");
  thread_ = std::thread([this] { Loop(); });
  return {};
}

Output::~Output() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t wrote = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void Output::Drain(int index) {
  char buffer[16384];
  while (true) {
    const ssize_t got = read(pipes_[index].get(), buffer, sizeof buffer);
    if (got <= 0) return;
    if (waiting_[index].size() + got > kMostWaiting) {
      LOG_WARNING("output", "Kernel output (%zd bytes) is dropped: the client takes none.", got);
      continue;
    }
    waiting_[index].append(buffer, got);
  }
}

void Output::Loop() {
  while (true) {
    pollfd fds[] = {
        {pipes_[0].get(), POLLIN, 0}, {pipes_[1].get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (poll(fds, 3, -1) < 0) continue;
    if (fds[2].revents != 0) return;
    std::lock_guard lock(mutex_);
    for (int i = 0; i < 2; ++i) {
      if (fds[i].revents != 0) Drain(i);
    }
  }
}

void Output::Forward(Outbox& outbox) {
  if (!pipes_[0].valid()) return;
  fflush(stdout);  // of this process's libc, where a driver in this process buffers it
  std::lock_guard lock(mutex_);
  for (int i = 0; i < 2; ++i) {
    Drain(i);
    if (waiting_[i].empty()) continue;
    outbox.Output(static_cast<uint32_t>(i + 1), waiting_[i]);
    waiting_[i].clear();
  }
}

}  // namespace penstock::server
