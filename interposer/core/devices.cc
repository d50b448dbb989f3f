// Attributes follow one of three policies. Most are forwarded. Those that promise something about
// the relation between device and host, or a function that is not forwarded, are zero: a program
// that asks first takes another way, and one that does not gets CUDA_ERROR_NOT_SUPPORTED. A few
// have a value of our own.
#include "interposer/core/devices.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>
#include <tuple>

namespace penstock::interposer {
namespace {

constexpr int kZero[] = {
    CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT,
    CU_DEVICE_ATTRIBUTE_INTEGRATED,
    CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    CU_DEVICE_ATTRIBUTE_TCC_DRIVER,
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH,
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
    CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
    CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
    CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS,
    CU_DEVICE_ATTRIBUTE_NUMA_CONFIG,
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_D3D12_CIG_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK,
    CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH,
    CU_DEVICE_ATTRIBUTE_VULKAN_CIG_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED,
};

struct Override {
  int attribute, value;
};
constexpr Override kOverrides[] = {
    // Host pointers given to copies are told apart by address, which is what this promises.
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    // Registered with the transport, so that copies need no staging.
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    // The NUMA nodes of the server mean nothing here.
    {CU_DEVICE_ATTRIBUTE_NUMA_ID, -1},
    {CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1},
};

using PciAddress = std::tuple<int32_t, int32_t, int32_t>;

PciAddress PciAddressOf(const Device& device) {
  const int32_t* const attributes = device.info.attributes;
  return {attributes[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID], attributes[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID],
          attributes[CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID]};
}

// The place in `devices` that an entry of CUDA_VISIBLE_DEVICES names, or -1.
int FindEntry(const std::vector<Device>& devices, std::string_view entry) {
  while (!entry.empty() && isspace(static_cast<unsigned char>(entry.front()))) {
    entry.remove_prefix(1);
  }
  while (!entry.empty() && isspace(static_cast<unsigned char>(entry.back()))) {
    entry.remove_suffix(1);
  }
  if (entry.empty()) return -1;
  if (isdigit(static_cast<unsigned char>(entry.front()))) {
    const std::string number(entry);
    char* end = nullptr;
    const unsigned long value = strtoul(number.c_str(), &end, 10);
    return *end == '\0' && value < devices.size() ? static_cast<int>(value) : -1;
  }
  constexpr size_t kPrefix = 4;  // "GPU-", or "MIG-" for a slice of one
  if (entry.size() <= kPrefix) return -1;
  int found = -1;
  for (size_t i = 0; i < devices.size(); ++i) {
    const std::string uuid = UuidText(devices[i].info);
    if (uuid.compare(0, kPrefix, entry, 0, kPrefix) != 0 || uuid.size() < entry.size() ||
        strncasecmp(uuid.data(), entry.data(), entry.size()) != 0) {
      continue;
    }
    if (found >= 0) return -1;  // ambiguous
    found = static_cast<int>(i);
  }
  return found;
}

}  // namespace

CUresult Device::Attribute(int attribute, int* value) const {
  if (attribute <= 0 || attribute >= static_cast<int>(kDeviceAttributeSlots)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (const Override& override : kOverrides) {
    if (override.attribute == attribute) {
      *value = override.value;
      return CUDA_SUCCESS;
    }
  }
  if (std::find(std::begin(kZero), std::end(kZero), attribute) != std::end(kZero)) {
    *value = 0;
    return CUDA_SUCCESS;
  }
  if (info.attribute_known[attribute] == 0) return CUDA_ERROR_INVALID_VALUE;
  *value = info.attributes[attribute];
  return CUDA_SUCCESS;
}

int Device::AttributeOr(int attribute, int fallback) const {
  int value = fallback;
  return Attribute(attribute, &value) == CUDA_SUCCESS ? value : fallback;
}

void MakeDistinct(std::vector<Device>* devices) {
  std::set<PciAddress> addresses;
  std::set<std::string> uuids;
  for (Device& device : *devices) {
    int32_t& domain = device.info.attributes[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID];
    while (!addresses.insert(PciAddressOf(device)).second) ++domain;
    device.info.attribute_known[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID] = 1;
    while (!uuids.insert(UuidText(device.info)).second) ++device.info.uuid[15];
  }
}

std::vector<Device> VisibleDevices(std::vector<Device> devices,
                                   const std::optional<std::string>& visible,
                                   const std::string& order) {
  if (order == "PCI_BUS_ID") {
    std::stable_sort(devices.begin(), devices.end(), [](const Device& a, const Device& b) {
      return PciAddressOf(a) < PciAddressOf(b);
    });
  }
  if (!visible.has_value()) return devices;
  std::vector<Device> chosen;
  std::vector<bool> taken(devices.size(), false);
  std::string_view rest(*visible);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const int place = FindEntry(devices, rest.substr(0, comma));
    if (place < 0) break;
    if (taken[place]) return {};
    taken[place] = true;
    chosen.push_back(devices[place]);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return chosen;
}

}  // namespace penstock::interposer
