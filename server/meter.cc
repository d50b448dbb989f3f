#include "server/meter.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/log.h"

namespace penstock::server {

Result<UniqueFd> MakeMeterFile() {
  UniqueFd file(memfd_create("penstock-meter", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid() || ftruncate(file.get(), sizeof(SessionMeter)) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return FailErrno("Cannot make a memory file");
  }
  return file;
}

SessionMeter* MapMeter(int file) {
  void* const memory =
      mmap(nullptr, sizeof(SessionMeter), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) return static_cast<SessionMeter*>(memory);  // zeros are its beginning
  LOG_WARNING("daemon", "Cannot map a session's numbers: %s.", strerror(errno));
  return nullptr;
}

void UnmapMeter(SessionMeter* meter) {
  if (meter != nullptr) munmap(meter, sizeof *meter);
}

}  // namespace penstock::server
