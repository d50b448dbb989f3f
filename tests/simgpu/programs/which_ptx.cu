// Says which of the architectures that it was compiled for ran. Usage: which_ptx RESULT, where
// RESULT is a value of __CUDA_ARCH__ or the name of the error that is expected instead.
#include <cstdio>
#include <string>

__global__ void Which(int* result) {
#ifdef __CUDA_ARCH__
  *result = __CUDA_ARCH__;
#endif
}

int main(int count, char** arguments) {
  int* memory = nullptr;
  int architecture = 0;
  cudaError_t error = cudaMalloc(&memory, sizeof(int));
  if (error == cudaSuccess) {
    Which<<<1, 1>>>(memory);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) {
    error = cudaMemcpy(&architecture, memory, sizeof(int), cudaMemcpyDeviceToHost);
  }
  const std::string result =
      error == cudaSuccess ? std::to_string(architecture) : cudaGetErrorName(error);
  printf("%s\n", result.c_str());
  return count == 2 && result == arguments[1] ? 0 : 1;
}
