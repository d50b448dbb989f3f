#include "server/probe.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <csignal>
#include <cstring>

#include "common/clock.h"
#include "common/unique_fd.h"
#include "server/driver.h"
#include "server/process.h"

namespace penstock::server {
namespace {

struct ProbeHeader {
  uint32_t ok = 0;
  int32_t driver_version = 0;
  uint32_t device_count = 0;
  char error[500] = {};
};

Status Check(const Driver& driver, CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return {};
  return Fail(Code::kUnavailable, std::string(what) + " fails with " + ErrorName(driver, result) +
                                      " (" + std::to_string(result) + ").");
}

Result<DeviceInfo> Describe(const Driver& driver, int ordinal, uint64_t* reserved) {
  DeviceInfo info = {};
  CUdevice device;
  RETURN_IF_ERROR(Check(driver, driver.cuDeviceGet(&device, ordinal), "cuDeviceGet"));
  RETURN_IF_ERROR(Check(driver, driver.cuDeviceGetName(info.name, sizeof info.name, device),
                        "cuDeviceGetName"));
  CUuuid uuid = {};
  RETURN_IF_ERROR(Check(driver, driver.cuDeviceGetUuid_v2(&uuid, device), "cuDeviceGetUuid"));
  memcpy(info.uuid, uuid.bytes, sizeof info.uuid);
  size_t total = 0;
  RETURN_IF_ERROR(Check(driver, driver.cuDeviceTotalMem_v2(&total, device), "cuDeviceTotalMem"));
  info.total_memory = total;
  for (uint32_t i = 1; i < kDeviceAttributeSlots; ++i) {
    int value = 0;
    const auto attribute = static_cast<CUdevice_attribute>(i);
    if (driver.cuDeviceGetAttribute(&value, attribute, device) != CUDA_SUCCESS) continue;
    info.attributes[i] = value;
    info.attribute_known[i] = 1;
  }
  unsigned flags = 0;
  int active = 0;
  if (driver.cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS) {
    info.primary_flags = flags;
  }
  CUcontext context;
  RETURN_IF_ERROR(
      Check(driver, driver.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain"));
  RETURN_IF_ERROR(Check(driver, driver.cuCtxSetCurrent(context), "cuCtxSetCurrent"));
  int least = 0, greatest = 0;
  driver.cuCtxGetStreamPriorityRange(&least, &greatest);
  info.least_priority = least;
  info.greatest_priority = greatest;
  size_t free_bytes = 0, all = 0;
  RETURN_IF_ERROR(Check(driver, driver.cuMemGetInfo_v2(&free_bytes, &all), "cuMemGetInfo"));
  *reserved = all - free_bytes;
  driver.cuCtxSetCurrent(nullptr);
  driver.cuDevicePrimaryCtxRelease_v2(device);
  return info;
}

Result<Inventory> Look(const std::string& library) {
  ASSIGN_OR_RETURN(const Driver driver, OpenDriver(library));
  RETURN_IF_ERROR(Check(driver, driver.cuInit(0), "cuInit"));
  Inventory inventory;
  RETURN_IF_ERROR(
      Check(driver, driver.cuDriverGetVersion(&inventory.driver_version), "cuDriverGetVersion"));
  int count = 0;
  RETURN_IF_ERROR(Check(driver, driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  for (int i = 0; i < count && i < static_cast<int>(kMaxDevices); ++i) {
    uint64_t reserved = 0;
    ASSIGN_OR_RETURN(DeviceInfo info, Describe(driver, i, &reserved));
    inventory.devices.push_back(info);
    inventory.reserved_memory.push_back(reserved);
  }
  return inventory;
}

bool WriteAll(int fd, const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = write(fd, next, bytes);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    next += wrote;
    bytes -= wrote;
  }
  return true;
}

// Everything until the other end closes.
Result<std::string> ReadAll(int fd, Deadline deadline) {
  std::string text;
  char buffer[4096];
  while (true) {
    pollfd waiting = {fd, POLLIN, 0};
    const int ready = poll(&waiting, 1, deadline.poll_timeout_ms());
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) return Fail(Code::kTimeout, "The driver does not start in time.");
    const ssize_t got = read(fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FailErrno("Cannot read from the probe process");
    if (got == 0) return text;
    text.append(buffer, got);
  }
}

}  // namespace

Result<Inventory> ProbeDriver(const std::string& library, int timeout_ms) {
  ASSIGN_OR_RETURN(UniqueFd path, SealedFile("penstock-driver", std::as_bytes(std::span(library))));
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return FailErrno("Cannot make a pipe");
  UniqueFd reading(ends[0]), writing(ends[1]);
  const int given[] = {path.get(), writing.get()};
  ASSIGN_OR_RETURN(Child child, SpawnSelf("--probe", given));
  writing.reset();
  auto bytes = ReadAll(reading.get(), Deadline::After(timeout_ms));
  kill(child.pid, SIGKILL);  // it has answered, or hangs
  int status = 0;
  while (waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!bytes) return tl::unexpected<Error>(bytes.error());
  ProbeHeader header;
  if (bytes->size() < sizeof header) {
    return Fail(Code::kUnavailable, "The process that opens the driver (" + library +
                                        ") ends without an answer, with wait status " +
                                        std::to_string(status) + ".");
  }
  memcpy(&header, bytes->data(), sizeof header);
  header.error[sizeof header.error - 1] = '\0';
  if (header.ok == 0) return Fail(Code::kUnavailable, header.error);
  Inventory inventory;
  inventory.driver_version = header.driver_version;
  if (header.device_count > kMaxDevices ||
      bytes->size() !=
          sizeof header + header.device_count * (sizeof(DeviceInfo) + sizeof(uint64_t))) {
    return Fail(Code::kInternal, "The probe process gives an answer of the wrong size.");
  }
  inventory.devices.resize(header.device_count);
  inventory.reserved_memory.resize(header.device_count);
  if (header.device_count != 0) {
    const char* const infos = bytes->data() + sizeof header;
    const size_t info_bytes = header.device_count * sizeof(DeviceInfo);
    memcpy(inventory.devices.data(), infos, info_bytes);
    memcpy(inventory.reserved_memory.data(), infos + info_bytes,
           header.device_count * sizeof(uint64_t));
  }
  return inventory;
}

int ProbeMain() {
  auto library = ReadSealedFile(3, 4096);
  if (!library) return 1;
  auto inventory = Look(*library);
  ProbeHeader header;
  if (!inventory) {
    CopyText(header.error, inventory.error().message);
    WriteAll(4, &header, sizeof header);
    return 1;
  }
  header.ok = 1;
  header.driver_version = inventory->driver_version;
  header.device_count = static_cast<uint32_t>(inventory->devices.size());
  WriteAll(4, &header, sizeof header);
  WriteAll(4, inventory->devices.data(), inventory->devices.size() * sizeof(DeviceInfo));
  WriteAll(4, inventory->reserved_memory.data(),
           inventory->reserved_memory.size() * sizeof(uint64_t));
  _exit(0);  // the driver's own exit work is of no use here
}

}  // namespace penstock::server
