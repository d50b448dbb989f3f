// Does what its arguments say with the memory of device 0, one line of output for each:
//   info        free and total bytes, and what cuDeviceTotalMem says
//   alloc:N     allocates N MiB; async:N from the default pool, in stream order
//   free        frees the newest allocation, on whichever way it came; sync waits for the device
//   churn:N     100 times: allocates N MiB, in stream order, and frees it again behind a memset
//   say:WORD    prints it; read waits for a line of stdin
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

const char* Name(CUresult result) {
  const char* name = "an unknown error";
  cuGetErrorName(result, &name);
  return name;
}

void Must(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  printf("%s gives %s\n", what, Name(result));
  exit(1);
}

struct Block {
  CUdeviceptr address;
  bool pooled;
};

CUresult Churn(CUstream stream, size_t bytes) {
  for (int round = 0; round < 100; ++round) {
    CUdeviceptr address = 0;
    CUresult result = cuMemAllocAsync(&address, bytes, stream);
    if (result == CUDA_SUCCESS) result = cuMemsetD8Async(address, 1, 4096, stream);
    if (result == CUDA_SUCCESS) result = cuMemFreeAsync(address, stream);
    if (result != CUDA_SUCCESS) return result;
  }
  return cuStreamSynchronize(stream);
}

}  // namespace

int main(int argc, char** argv) {
  CUdevice device;
  CUcontext context;
  CUstream stream;
  Must(cuInit(0), "cuInit");
  Must(cuDeviceGet(&device, 0), "cuDeviceGet");
  Must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  Must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  Must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  std::vector<Block> blocks;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t colon = word.find(':');
    const std::string verb = word.substr(0, colon);
    const std::string rest = colon == std::string::npos ? "" : word.substr(colon + 1);
    const size_t bytes = strtoull(rest.c_str(), nullptr, 10) << 20;
    CUdeviceptr address = 0;
    CUresult result = CUDA_SUCCESS;
    if (verb == "info") {
      size_t free_bytes = 0, total = 0, device_total = 0;
      Must(cuMemGetInfo(&free_bytes, &total), "cuMemGetInfo");
      Must(cuDeviceTotalMem(&device_total, device), "cuDeviceTotalMem");
      printf("%zu %zu %zu\n", free_bytes, total, device_total);
    } else if (verb == "alloc" || verb == "async") {
      const bool pooled = verb == "async";
      result = pooled ? cuMemAllocAsync(&address, bytes, stream) : cuMemAlloc(&address, bytes);
      if (result == CUDA_SUCCESS) blocks.push_back({address, pooled});
    } else if (verb == "free") {
      const Block block = blocks.back();
      blocks.pop_back();
      result = block.pooled ? cuMemFreeAsync(block.address, stream) : cuMemFree(block.address);
    } else if (verb == "sync") {
      result = cuCtxSynchronize();
    } else if (verb == "churn") {
      result = Churn(stream, bytes);
    } else if (verb == "say") {
      printf("%s\n", rest.c_str());
    } else if (verb == "read") {
      while (getchar() > '\n') {
      }
    }
    if (verb != "info" && verb != "say") printf("%s %s\n", word.c_str(), Name(result));
    fflush(stdout);
  }
  return 0;
}
