// Devices: everything comes with the hello, so that the 112 attributes which each copy of the CUDA
// runtime asks for cost no round trip.
#include <cctype>
#include <cstdio>
#include <cstring>

#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

// Initialised, and the device exists.
const Device* Find(Call& call, CUdevice ordinal) {
  if (!call.ready()) return nullptr;
  const Device* const device = call.client().FindDevice(ordinal);
  if (device == nullptr) call.Refuse(CUDA_ERROR_INVALID_DEVICE);
  return device;
}

CUresult Uuid(Call& call, CUuuid* uuid, CUdevice ordinal) {
  const Device* const device = Find(call, ordinal);
  if (device == nullptr || !call.Out(uuid)) return call.result();
  memcpy(uuid->bytes, device->info.uuid, sizeof uuid->bytes);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CuDeviceGet(CUdevice* device, int ordinal) {
  Call call(Function::kCuDeviceGet, Call::kInitialised);
  if (Find(call, ordinal) == nullptr || !call.Out(device)) return call.result();
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CuDeviceGetCount(int* count) {
  Call call(Function::kCuDeviceGetCount, Call::kInitialised);
  if (!call.ready() || !call.Out(count)) return call.result();
  *count = static_cast<int>(call.client().devices().size());
  return CUDA_SUCCESS;
}

CUresult CuDeviceGetName(char* name, int len, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetName, Call::kInitialised);
  const Device* const device = Find(call, ordinal);
  if (device == nullptr || !call.Out(name)) return call.result();
  if (len <= 0) return CUDA_ERROR_INVALID_VALUE;
  snprintf(name, static_cast<size_t>(len), "%s", device->info.name);
  return CUDA_SUCCESS;
}

CUresult CuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetUuid, Call::kInitialised);
  return Uuid(call, uuid, ordinal);
}

CUresult CuDeviceTotalMem(size_t* bytes, CUdevice ordinal) {
  Call call(Function::kCuDeviceTotalMem, Call::kInitialised);
  const Device* const device = Find(call, ordinal);
  if (device == nullptr || !call.Out(bytes)) return call.result();
  *bytes = device->info.total_memory;
  return CUDA_SUCCESS;
}

CUresult CuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetAttribute, Call::kInitialised);
  const Device* const device = Find(call, ordinal);
  if (device == nullptr || !call.Out(value)) return call.result();
  return device->Attribute(attribute, value);
}

CUresult CuDeviceGetExecAffinitySupport(int* value, CUexecAffinityType, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetExecAffinitySupport, Call::kInitialised);
  if (Find(call, ordinal) == nullptr || !call.Out(value)) return call.result();
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult CuDeviceGetProperties(CUdevprop* properties, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetProperties, Call::kInitialised);
  const Device* const device = Find(call, ordinal);
  if (device == nullptr || !call.Out(properties)) return call.result();
  const auto attribute = [&](CUdevice_attribute id) { return device->AttributeOr(id, 0); };
  *properties = CUdevprop{};
  properties->maxThreadsPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  properties->maxThreadsDim[0] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X);
  properties->maxThreadsDim[1] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y);
  properties->maxThreadsDim[2] = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z);
  properties->maxGridSize[0] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X);
  properties->maxGridSize[1] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y);
  properties->maxGridSize[2] = attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z);
  properties->sharedMemPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  properties->totalConstantMemory = attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  properties->SIMDWidth = attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  properties->memPitch = attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  properties->regsPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  properties->clockRate = attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  properties->textureAlign = attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  return CUDA_SUCCESS;
}

CUresult CuDeviceComputeCapability(int* major, int* minor, CUdevice ordinal) {
  Call call(Function::kCuDeviceComputeCapability, Call::kInitialised);
  const Device* const device = Find(call, ordinal);
  if (device == nullptr || !call.Out(major) || !call.Out(minor)) return call.result();
  *major = device->AttributeOr(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0);
  *minor = device->AttributeOr(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0);
  return CUDA_SUCCESS;
}

// "[domain]:[bus]:[device].[function]", where domain and function may be missing.
CUresult CuDeviceGetByPCIBusId(CUdevice* ordinal, const char* text) {
  Call call(Function::kCuDeviceGetByPCIBusId, Call::kInitialised);
  if (!call.ready() || !call.Out(ordinal) || !call.Out(text)) return call.result();
  unsigned domain = 0, bus = 0, device = 0;
  if (sscanf(text, "%x:%x:%x", &domain, &bus, &device) != 3) {
    domain = 0;
    if (sscanf(text, "%x:%x", &bus, &device) != 2) return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < call.client().devices().size(); ++i) {
    const Device& candidate = call.client().devices()[i];
    if (candidate.AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0) == static_cast<int>(domain) &&
        candidate.AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0) == static_cast<int>(bus) &&
        candidate.AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0) == static_cast<int>(device)) {
      *ordinal = static_cast<CUdevice>(i);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult CuDeviceGetPCIBusId(char* text, int len, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetPCIBusId, Call::kInitialised);
  const Device* const device = Find(call, ordinal);
  if (device == nullptr || !call.Out(text)) return call.result();
  if (len <= 0) return CUDA_ERROR_INVALID_VALUE;
  snprintf(text, static_cast<size_t>(len), "%04x:%02x:%02x.0",
           device->AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0),
           device->AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0),
           device->AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0));
  return CUDA_SUCCESS;
}

// Peer access is not forwarded yet, so no pair of devices has it.
CUresult CuDeviceCanAccessPeer(int* can_access, CUdevice device, CUdevice peer) {
  Call call(Function::kCuDeviceCanAccessPeer, Call::kInitialised);
  if (Find(call, device) == nullptr || Find(call, peer) == nullptr || !call.Out(can_access)) {
    return call.result();
  }
  *can_access = 0;
  return CUDA_SUCCESS;
}

CUresult CuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute, CUdevice source,
                                 CUdevice target) {
  Call call(Function::kCuDeviceGetP2PAttribute, Call::kInitialised);
  if (Find(call, source) == nullptr || Find(call, target) == nullptr || !call.Out(value)) {
    return call.result();
  }
  if (source == target) return CUDA_ERROR_INVALID_DEVICE;
  *value = 0;
  return CUDA_SUCCESS;
}

// The default pool of a device has a fixed handle, so that asking for it is local. Other pools are
// not forwarded yet, which leaves nothing else to set.
CUresult CuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetDefaultMemPool, Call::kInitialised);
  if (Find(call, ordinal) == nullptr || !call.Out(pool)) return call.result();
  *pool = reinterpret_cast<CUmemoryPool>(DefaultMemoryPool(static_cast<uint32_t>(ordinal)).bits);
  return CUDA_SUCCESS;
}

CUresult CuDeviceGetMemPool(CUmemoryPool* pool, CUdevice ordinal) {
  Call call(Function::kCuDeviceGetMemPool, Call::kInitialised);
  if (Find(call, ordinal) == nullptr || !call.Out(pool)) return call.result();
  *pool = reinterpret_cast<CUmemoryPool>(DefaultMemoryPool(static_cast<uint32_t>(ordinal)).bits);
  return CUDA_SUCCESS;
}

CUresult CuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool pool) {
  Call call(Function::kCuDeviceSetMemPool, Call::kInitialised);
  if (Find(call, ordinal) == nullptr) return call.result();
  return reinterpret_cast<uint64_t>(pool) == DefaultMemoryPool(static_cast<uint32_t>(ordinal)).bits
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace penstock::interposer
