// The other end of the shared memory baseline: a child process that answers messages in a page that
// both map, with nothing in between. Both ends wake each other as transport/shm does: they look for
// a while, giving way to others, and then sleep on a unix socket.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace penstock::perf {

class SharedPeer {
 public:
  // Forks: make it before there are threads.
  SharedPeer();
  ~SharedPeer();
  SharedPeer(const SharedPeer&) = delete;
  SharedPeer& operator=(const SharedPeer&) = delete;

  // One message of request_bytes there, one of reply_bytes back; both at most 4096.
  void PingPong(uint32_t request_bytes, uint32_t reply_bytes);

 private:
  struct Page;
  Page* page_ = nullptr;
  int socket_ = -1;
  pid_t child_ = -1;
};

}  // namespace penstock::perf
