#include "simgpu/driver/device.h"

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "interop/export_tables.h"
#include "simgpu/driver/entry.h"
#include "simgpu/driver/log.h"

namespace simgpu {
namespace {

constexpr int kMaxDevices = MemoryLedger::kDevices;
constexpr size_t kDefaultMemory = size_t{4} << 30;

// "4G", "512M", "1048576": a number of bytes with an optional binary unit.
size_t ParseBytes(const char* text, size_t fallback) {
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  const unsigned long long number = strtoull(text, &end, 0);
  size_t unit = 1;
  switch (*end) {
    case 'k':
    case 'K':
      unit = size_t{1} << 10;
      break;
    case 'm':
    case 'M':
      unit = size_t{1} << 20;
      break;
    case 'g':
    case 'G':
      unit = size_t{1} << 30;
      break;
    case 't':
    case 'T':
      unit = size_t{1} << 40;
      break;
    case '\0':
      break;
    default:
      unit = 0;
  }
  if (number == 0 || unit == 0) {
    LogWarning("SIMGPU_MEMORY (%s) is not a number of bytes: the default is used.", text);
    return fallback;
  }
  return number * unit;
}

Limits LimitsOf(int major, int minor) {
  const int cc = major * 10 + minor;
  constexpr int kKilo = 1024;
  if (cc >= 120) return {1536, 24, 100 * kKilo, 99 * kKilo, kKilo};
  if (cc >= 90) return {2048, 32, 228 * kKilo, 227 * kKilo, kKilo};
  if (cc == 89) return {1536, 24, 100 * kKilo, 99 * kKilo, kKilo};
  if (cc >= 86) return {1536, 16, 100 * kKilo, 99 * kKilo, kKilo};
  if (cc >= 80) return {2048, 32, 164 * kKilo, 163 * kKilo, kKilo};
  return {1024, 16, 64 * kKilo, 64 * kKilo, 0};
}

// The part of a "GPU-xxxxxxxx-..." name: hexadecimal digits of the uuid, dashes skipped.
bool UuidStartsWith(const CUuuid& uuid, std::string_view text) {
  size_t digit = 0;
  for (char c : text) {
    if (c == '-') continue;
    if (digit >= 32) return false;
    const unsigned byte = static_cast<unsigned char>(uuid.bytes[digit / 2]);
    const unsigned nibble = digit % 2 == 0 ? byte >> 4 : byte & 15;
    const char expected = "0123456789abcdef"[nibble];
    if ((c | 0x20) != expected && c != expected) return false;
    ++digit;
  }
  return digit > 0;
}

// Which physical devices are seen, in order. As documented: what follows an invalid or repeated
// entry is ignored.
std::vector<int> VisibleOrdinals(const std::vector<std::unique_ptr<Device>>& physical) {
  std::vector<int> visible;
  const char* variable = getenv("CUDA_VISIBLE_DEVICES");
  if (variable == nullptr) {
    for (size_t i = 0; i < physical.size(); ++i) visible.push_back(static_cast<int>(i));
    return visible;
  }
  std::string_view rest(variable);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    std::string entry(rest.substr(0, comma));
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    while (!entry.empty() && entry.front() == ' ') entry.erase(0, 1);
    while (!entry.empty() && entry.back() == ' ') entry.pop_back();
    int found = -1;
    if (entry.rfind("GPU-", 0) == 0) {
      for (const auto& device : physical) {
        if (UuidStartsWith(device->uuid, std::string_view(entry).substr(4))) {
          found = device->physical_ordinal;
          break;
        }
      }
    } else if (!entry.empty()) {
      char* end = nullptr;
      const long number = strtol(entry.c_str(), &end, 10);
      if (*end == '\0' && number >= 0 && number < static_cast<long>(physical.size())) {
        found = static_cast<int>(number);
      }
    }
    if (found < 0) break;
    for (int seen : visible) {
      if (seen == found) return {};
    }
    visible.push_back(found);
  }
  return visible;
}

}  // namespace

bool Device::Charge(size_t bytes) {
  if (ledger != nullptr) return ledger->Charge(physical_ordinal, bytes, memory_bytes);
  size_t used = used_bytes.load();
  do {
    if (bytes > memory_bytes - used) return false;
  } while (!used_bytes.compare_exchange_weak(used, used + bytes));
  return true;
}

void Device::Refund(size_t bytes) {
  if (ledger != nullptr) return ledger->Refund(physical_ordinal, bytes);
  used_bytes -= bytes;
}

size_t Device::FreeBytes() const {
  const size_t used = ledger != nullptr ? ledger->Used(physical_ordinal) : used_bytes.load();
  return used < memory_bytes ? memory_bytes - used : 0;
}

namespace {

// SIMGPU_GPUDIRECT says how a NIC's writes are ordered; without it there is no GPUDirect.
bool ParseGpuDirect(const char* text, int* writes_ordering) {
  if (text == nullptr || *text == '\0' || std::strcmp(text, "0") == 0) return false;
  if (std::strcmp(text, "none") == 0) {
    *writes_ordering = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE;
  } else if (std::strcmp(text, "owner") == 0) {
    *writes_ordering = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
  } else if (std::strcmp(text, "all") == 0) {
    *writes_ordering = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES;
  } else {
    LogWarning("SIMGPU_GPUDIRECT (%s) is none of none, owner and all: there is no GPUDirect.",
               text);
    return false;
  }
  return true;
}

}  // namespace

std::vector<std::unique_ptr<Device>> MakeDevices() {
  const char* count_text = getenv("SIMGPU_DEVICES");
  int count = count_text == nullptr ? 1 : atoi(count_text);
  if (count < 0) count = 0;
  if (count > kMaxDevices) count = kMaxDevices;
  int major = 12;
  int minor = 0;
  if (const char* cc = getenv("SIMGPU_CC"); cc != nullptr && *cc != '\0') {
    char* end = nullptr;
    major = static_cast<int>(strtol(cc, &end, 10));
    minor = *end == '.' ? atoi(end + 1) : 0;
    if (major < 5 || minor < 0 || minor > 9) {
      LogWarning("SIMGPU_CC (%s) is not a compute capability such as 9.0: 12.0 is used.", cc);
      major = 12;
      minor = 0;
    }
  }
  std::vector<std::unique_ptr<Device>> physical;
  for (int i = 0; i < count; ++i) {
    auto device = std::make_unique<Device>();
    device->physical_ordinal = i;
    // "simgpu" and the number, in the layout of a version 4 UUID: the same in every process, so
    // that CUDA_VISIBLE_DEVICES can name it.
    const unsigned char uuid[16] = {
        0x73, 0x69, 0x6d, 0x67, 0x70, 0x75, 0x40, 0x00,
        0x80, 0,    0,    0,    0,    0,    0,    static_cast<unsigned char>(i + 1)};
    std::memcpy(device->uuid.bytes, uuid, sizeof(uuid));
    device->pci_domain = 0;
    device->pci_bus = i + 1;
    device->pci_device = 0;
    device->cc_major = major;
    device->cc_minor = minor;
    device->limits = LimitsOf(major, minor);
    device->memory_bytes = ParseBytes(getenv("SIMGPU_MEMORY"), kDefaultMemory);
    device->gpu_direct = ParseGpuDirect(getenv("SIMGPU_GPUDIRECT"), &device->writes_ordering);
    physical.push_back(std::move(device));
  }
  std::vector<std::unique_ptr<Device>> devices;
  for (int ordinal : VisibleOrdinals(physical)) {
    devices.push_back(std::move(physical[static_cast<size_t>(ordinal)]));
    devices.back()->ordinal = static_cast<int>(devices.size()) - 1;
  }
  return devices;
}

CUresult FindDevice(CUdevice number, Device** device) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  State* const s = state();
  if (number < 0 || number >= static_cast<int>(s->devices.size())) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *device = s->devices[static_cast<size_t>(number)].get();
  return CUDA_SUCCESS;
}

}  // namespace simgpu

#undef cuDeviceGetUuid
#undef cuDeviceTotalMem

using namespace simgpu;

SIMGPU_EXPORT cuDeviceGet(CUdevice* device, int ordinal) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Device* found = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(ordinal, &found));
  *device = ordinal;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetCount(int* count) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<int>(state()->devices.size());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetName(char* name, int length, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::strncpy(name, "Simulated GPU (simgpu)", static_cast<size_t>(length));
  name[length - 1] = '\0';
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *uuid = device->uuid;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetUuid(CUuuid* uuid, CUdevice number) {
  return cuDeviceGetUuid_v2(uuid, number);
}

SIMGPU_EXPORT cuDeviceGetLuid(char*, unsigned int*, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  return CUDA_ERROR_NOT_SUPPORTED;  // Windows only
}

SIMGPU_EXPORT cuDeviceTotalMem_v2(size_t* bytes, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *bytes = device->memory_bytes;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return DeviceAttribute(*device, attribute, value) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMGPU_EXPORT cuDeviceComputeCapability(int* major, int* minor, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (major == nullptr || minor == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *major = device->cc_major;
  *minor = device->cc_minor;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetProperties(CUdevprop* properties, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (properties == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    DeviceAttribute(*device, which, &value);
    return value;
  };
  properties->maxThreadsPerBlock = kMaxThreadsPerBlock;
  for (int i = 0; i < 3; ++i) {
    properties->maxThreadsDim[i] = kMaxBlockDim[i];
    properties->maxGridSize[i] = static_cast<int>(kMaxGridDim[i]);
  }
  properties->sharedMemPerBlock = kSharedPerBlock;
  properties->totalConstantMemory = attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  properties->SIMDWidth = attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  properties->memPitch = attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  properties->regsPerBlock = kRegistersPerSm;
  properties->clockRate = attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  properties->textureAlign = attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetPCIBusId(char* text, int length, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (text == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  snprintf(text, static_cast<size_t>(length), "%04X:%02X:%02X.0", device->pci_domain,
           device->pci_bus, device->pci_device);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetByPCIBusId(CUdevice* number, const char* text) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (number == nullptr || text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  unsigned domain = 0;
  unsigned bus = 0;
  unsigned slot = 0;
  if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    domain = 0;
    if (sscanf(text, "%x:%x", &bus, &slot) != 2) return CUDA_ERROR_INVALID_VALUE;
  }
  for (const auto& device : state()->devices) {
    if (static_cast<unsigned>(device->pci_domain) == domain &&
        static_cast<unsigned>(device->pci_bus) == bus &&
        static_cast<unsigned>(device->pci_device) == slot) {
      *number = device->ordinal;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

SIMGPU_EXPORT cuDeviceCanAccessPeer(int* can, CUdevice from, CUdevice to) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(from, &device));
  SIMGPU_RETURN_IF_ERROR(FindDevice(to, &device));
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *can = from != to ? 1 : 0;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice from,
                                      CUdevice to) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(from, &device));
  SIMGPU_RETURN_IF_ERROR(FindDevice(to, &device));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (from == to) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
      *value = 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

SIMGPU_EXPORT cuDeviceGetExecAffinitySupport(int* supported, CUexecAffinityType, CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (supported == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *supported = 0;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuDeviceGetTexture1DLinearMaxWidth(size_t* width, CUarray_format, unsigned,
                                                 CUdevice number) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (width == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *width = size_t{1} << 27;
  return CUDA_SUCCESS;
}
