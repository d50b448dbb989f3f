#include "server/driver.h"

#include <dlfcn.h>
#include <unistd.h>
#include <climits>
#include <cstdlib>

#include "server/process.h"

namespace penstock::server {
namespace {

std::string RealPath(const std::string& path) {
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) == nullptr ? std::string() : std::string(resolved);
}

}  // namespace

Result<Driver> OpenDriver(const std::string& library) {
  auto driver = LoadDriver(library.c_str());
  if (!driver) {
    std::string advice;
    if (library == "libcuda.so.1") {
      advice =
          " Install NVIDIA's driver on this machine, or start penstockd with --driver sim for "
          "the simulated GPU.";
    }
    return Fail(Code::kUnavailable, driver.error().message + advice);
  }
  Dl_info info = {};
  const std::string executable = ExecutablePath();
  const std::string own =
      RealPath(executable.substr(0, executable.rfind('/')) + "/../lib/penstock/libcuda.so.1");
  if (!own.empty() && dladdr(reinterpret_cast<void*>(driver->cuInit), &info) != 0 &&
      info.dli_fname != nullptr && RealPath(info.dli_fname) == own) {
    return Fail(Code::kInvalidArgument, "Driver (" + own +
                                            ") is Penstock's client library. Take it out of "
                                            "LD_LIBRARY_PATH, or name the driver with --driver.");
  }
  return driver;
}

const char* ErrorName(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  if (driver.cuGetErrorName == nullptr || driver.cuGetErrorName(result, &name) != CUDA_SUCCESS ||
      name == nullptr) {
    return "unknown error";
  }
  return name;
}

}  // namespace penstock::server
