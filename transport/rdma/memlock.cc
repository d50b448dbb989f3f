#include "transport/rdma/memlock.h"

#include <sys/resource.h>

#include <cerrno>

namespace penstock::transport::rdma {

std::string MemlockAdvice(int error) {
  if (error != ENOMEM && error != EAGAIN && error != EPERM) return "";
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return " The process may lock only so much (RLIMIT_MEMLOCK is " +
         std::to_string(limit.rlim_cur / 1024) +
         " KiB); allow more with \"ulimit -l unlimited\", LimitMEMLOCK=infinity in the systemd "
         "unit, or \"--ulimit memlock=-1\" of the container.";
}

}  // namespace penstock::transport::rdma
