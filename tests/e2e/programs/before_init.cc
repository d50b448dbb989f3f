// Before cuInit nearly everything says CUDA_ERROR_NOT_INITIALIZED; without a context, the calls
// that need one say CUDA_ERROR_INVALID_CONTEXT; after the context is gone they say so again.
#include "tests/e2e/programs/program.h"

namespace {

void NeedContext(CUresult expected) {
  CUdeviceptr address = 0;
  CUmodule module;
  CUstream stream;
  CUevent event;
  void* host = nullptr;
  size_t free_bytes = 0, total = 0;
#define REFUSED(call)                                                                  \
  do {                                                                                 \
    const CUresult result = (call);                                                    \
    EXPECT(result == expected, "%s gives %s instead of %s.", #call, ErrorName(result), \
           ErrorName(expected));                                                       \
  } while (0)
  REFUSED(cuMemAlloc(&address, 64));
  REFUSED(cuMemGetInfo(&free_bytes, &total));
  REFUSED(cuMemHostAlloc(&host, 64, 0));
  REFUSED(cuModuleLoadData(&module, kernels_ptx));
  REFUSED(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  REFUSED(cuEventCreate(&event, CU_EVENT_DEFAULT));
  REFUSED(cuCtxSynchronize());
  REFUSED(cuStreamSynchronize(nullptr));
  REFUSED(cuMemsetD8(0x1000, 0, 64));
}

}  // namespace

int main() {
  StartWatchdog();
  const CUresult expected = CUDA_ERROR_NOT_INITIALIZED;
  int count = 0, version = 0;
  CUdevice device;
  CUcontext context;
  REFUSED(cuDeviceGetCount(&count));
  REFUSED(cuDeviceGet(&device, 0));
  REFUSED(cuCtxCreate(&context, nullptr, 0, 0));
  REFUSED(cuCtxGetCurrent(&context));
  REFUSED(cuDevicePrimaryCtxRetain(&context, 0));
  NeedContext(CUDA_ERROR_NOT_INITIALIZED);
  CHECK(cuDriverGetVersion(&version));
  EXPECT(version >= 13000, "The driver's version is (%d).", version);
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuInit(1));

  CHECK(cuInit(0));
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  NeedContext(CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxCreate(&context, nullptr, 0, device));
  CUdeviceptr memory;
  CHECK(cuMemAlloc(&memory, 64));
  CHECK(cuCtxDestroy(context));
  NeedContext(CUDA_ERROR_INVALID_CONTEXT);

  CHECK(cuCtxCreate(&context, nullptr, 0, device));
  CHECK(cuMemAlloc(&memory, 64));
  const int value = 77;
  int back = 0;
  CHECK(cuMemcpyHtoD(memory, &value, sizeof value));
  CHECK(cuMemcpyDtoH(&back, memory, sizeof back));
  EXPECT(back == value, "A new context reads (%d) instead of (%d).", back, value);
  printf("before_init: ok\n");
}
