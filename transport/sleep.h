// Sleeping on an epoll descriptor with a deadline in nanoseconds, and what to sleep for.
#pragma once

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "common/clock.h"

namespace penstock::transport {

// epoll_wait in nanoseconds: its millisecond is the longest part of a wait for a short kernel. By
// number, because the C library has the name only since 2.35; older kernels (before 5.11) get the
// millisecond.
inline int SleepOn(int fd, epoll_event* events, int max_events, Deadline deadline) {
#ifdef SYS_epoll_pwait2
  timespec left;
  const int ready = static_cast<int>(syscall(SYS_epoll_pwait2, fd, events, max_events,
                                             deadline.ppoll_timeout(&left), nullptr, size_t{0}));
  if (ready >= 0 || errno != ENOSYS) return ready;
#endif
  return epoll_wait(fd, events, max_events, deadline.poll_timeout_ms());
}

// The sleeper wakes when `fd` is readable; the event carries its number.
inline bool WatchReadable(int epoll, int fd) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = fd;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace penstock::transport
