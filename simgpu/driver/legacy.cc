// First generations of functions whose arguments are still whole on a 64-bit machine. cuda.h maps
// their names to newer ones, but the exports are asked for: by programs that look names up
// themselves, and by the runtime, which wants several old versions. (Those that take 32-bit device
// pointers stay unsupported.)
#include "simgpu/driver/entry.h"

#undef cuCtxCreate
#undef cuEventDestroy
#undef cuLinkAddData
#undef cuLinkAddFile
#undef cuLinkCreate
#undef cuMemAdvise
#undef cuMemAllocHost
#undef cuMemPrefetchAsync
#undef cuStreamDestroy
#undef cuStreamGetCaptureInfo

using namespace simgpu;

extern "C" {
CUresult cuCtxCreate_v2(CUcontext*, unsigned int, CUdevice);
CUresult cuStreamGetCaptureInfo_v3(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                                   const CUgraphNode**, const CUgraphEdgeData**, size_t*);
}

SIMGPU_EXPORT cuCtxCreate(CUcontext* context, unsigned int flags, CUdevice device) {
  return cuCtxCreate_v2(context, flags, device);
}

// Attaching counts uses of the current context; flags must be 0, as documented.
SIMGPU_EXPORT cuCtxAttach(CUcontext* handle, unsigned int flags) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (handle == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  ++context->attachments;
  *handle = context->handle();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuCtxDetach(CUcontext handle) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterFailedContext(&context));
  if (context->handle() != handle) return CUDA_ERROR_INVALID_CONTEXT;
  return --context->attachments > 0 ? CUDA_SUCCESS : cuCtxDestroy_v2(handle);
}

SIMGPU_EXPORT cuStreamDestroy(CUstream stream) {
  return cuStreamDestroy_v2(stream);
}

SIMGPU_EXPORT cuEventDestroy(CUevent event) {
  return cuEventDestroy_v2(event);
}

SIMGPU_EXPORT cuMemAllocHost(void** pointer, unsigned int bytes) {
  return cuMemAllocHost_v2(pointer, bytes);
}

SIMGPU_EXPORT cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice device) {
  return cuMemAdvise_v2(address, bytes, advice, {CU_MEM_LOCATION_TYPE_DEVICE, device});
}

SIMGPU_EXPORT cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device,
                                 CUstream stream) {
  return cuMemPrefetchAsync_v2(address, bytes, {CU_MEM_LOCATION_TYPE_DEVICE, device}, 0, stream);
}

SIMGPU_EXPORT cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status,
                                     cuuint64_t* id) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

SIMGPU_EXPORT cuLinkCreate(unsigned int count, CUjit_option* options, void** values,
                           CUlinkState* link) {
  return cuLinkCreate_v2(count, options, values, link);
}

SIMGPU_EXPORT cuLinkAddData(CUlinkState link, CUjitInputType type, void* data, size_t bytes,
                            const char* name, unsigned int count, CUjit_option* options,
                            void** values) {
  return cuLinkAddData_v2(link, type, data, bytes, name, count, options, values);
}

SIMGPU_EXPORT cuLinkAddFile(CUlinkState link, CUjitInputType type, const char* path,
                            unsigned int count, CUjit_option* options, void** values) {
  return cuLinkAddFile_v2(link, type, path, count, options, values);
}
