// What an address is, as the address plan knows it.
#include <cstring>

#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

// An address and what it lies in; neither for memory that CUDA does not know.
struct Place {
  CUdeviceptr address = 0;
  std::optional<DeviceAllocation> device;
  std::shared_ptr<HostAllocation> host;
  bool known() const { return device.has_value() || host != nullptr; }
};

Place Locate(Call& call, CUdeviceptr address) {
  Place place;
  place.address = address;
  place.device = call.objects().plan.FindDevice(address, call.session().index());
  if (!place.device.has_value()) {
    place.host = call.objects().plan.FindHost(reinterpret_cast<const void*>(address));
  }
  return place;
}

template <typename T>
CUresult Give(void* data, T value) {
  memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}

// The value; INVALID_VALUE where the attribute does not apply to such memory, with the null value
// of its type written.
CUresult Answer(void* data, CUpointer_attribute attribute, const Place& place) {
  const bool device = place.device.has_value(), host = place.host != nullptr;
  const ContextRecord* const context = device ? place.device->context
                                       : host ? place.host->context
                                              : nullptr;
  const CUdeviceptr base = device ? place.device->base
                           : host ? reinterpret_cast<CUdeviceptr>(place.host->base)
                                  : 0;
  const size_t bytes = device ? place.device->bytes : host ? place.host->bytes : 0;
  const auto applies = [](bool it_does) {
    return it_does ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      Give(data, context == nullptr ? uint64_t{0} : context->handle.bits);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      Give<unsigned>(data, device ? CU_MEMORYTYPE_DEVICE : host ? CU_MEMORYTYPE_HOST : 0);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      Give<CUdeviceptr>(data, device ? place.address : 0);
      return applies(device);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      Give<CUdeviceptr>(data, host ? place.address : 0);
      return applies(host);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      Give<unsigned>(data, 0);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_MAPPED:
      Give<unsigned>(data, place.known() ? 1 : 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      Give<uint64_t>(data, device ? place.device->buffer_id : host ? place.host->buffer_id : 0);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      Give<int>(data, context == nullptr ? CU_DEVICE_INVALID : static_cast<int>(context->device));
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      Give<CUdeviceptr>(data, base);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      Give<size_t>(data, bytes);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      Give<uint64_t>(data, 0);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      Give<unsigned>(data, place.known() ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                                         : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE);
      return applies(place.known());
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      Give<uint64_t>(data, 0);
      return applies(device && place.device->pooled);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

CUresult CuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  Call call(Function::kCuPointerGetAttribute, Call::kContext);
  if (!call.ready() || !call.Out(data)) return call.result();
  // *data changes only on success.
  const Place place = Locate(call, address);
  uint64_t trial = 0;
  const CUresult result = Answer(&trial, attribute, place);
  return result == CUDA_SUCCESS ? Answer(data, attribute, place) : result;
}

// Unlike the single question, this one answers for any address: with null values where an attribute
// does not apply.
CUresult CuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr address) {
  Call call(Function::kCuPointerGetAttributes, Call::kContext);
  if (!call.ready() || !call.Out(attributes) || !call.Out(data)) return call.result();
  const Place place = Locate(call, address);
  for (unsigned i = 0; i < count; ++i) {
    if (data[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (Answer(data[i], attributes[i], place) == CUDA_ERROR_NOT_SUPPORTED) {
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace penstock::interposer
