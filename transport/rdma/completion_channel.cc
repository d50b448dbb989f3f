#include "transport/rdma/completion_channel.h"

#include <fcntl.h>

#include <cerrno>

#include "transport/sleep.h"

namespace penstock::transport::rdma {

ibv_comp_channel* MakeCompletionChannel(Verbs& verbs, ibv_context* context, int epoll) {
  ibv_comp_channel* channel = verbs.CreateCompChannel(context);
  if (channel == nullptr) return nullptr;
  if (fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK) == 0 &&
      WatchReadable(epoll, channel->fd)) {
    return channel;
  }
  const int error = errno;
  verbs.DestroyCompChannel(channel);
  errno = error;
  return nullptr;
}

}  // namespace penstock::transport::rdma
