#include "tools/penstock/layout.h"

#include <limits.h>
#include <unistd.h>

namespace penstock {

Result<Layout> FindLayout() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  if (length <= 0) return FailErrno("Cannot read (/proc/self/exe)");
  std::string prefix(path, length);
  for (int level = 0; level < 2; ++level) {
    const size_t slash = prefix.rfind('/');
    if (slash == std::string::npos) {
      return Fail(Code::kSystem, "The path of this program (" + prefix + ") has no folder.");
    }
    prefix.resize(slash);
  }
  Layout layout;
  layout.library_folder = prefix + "/lib/penstock";
  layout.interposer = layout.library_folder + "/libcuda.so.1";
  layout.daemon = prefix + "/bin/penstockd";
  if (access(layout.interposer.c_str(), R_OK) != 0) {
    return FailErrno("Cannot read the client library (" + layout.interposer + ")");
  }
  return layout;
}

}  // namespace penstock
