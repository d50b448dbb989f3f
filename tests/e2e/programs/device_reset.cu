// cudaDeviceReset, then the device is used again, also with kernels and variables of this program,
// which must be loaded anew: with their initial values.
#include <cuda_runtime.h>
#include <stdio.h>
#include <unistd.h>

#define CHECK(call)                                                               \
  do {                                                                            \
    const cudaError_t check_error = (call);                                       \
    if (check_error != cudaSuccess) {                                             \
      fprintf(stderr, "%s fails: %s.\n", #call, cudaGetErrorString(check_error)); \
      return 1;                                                                   \
    }                                                                             \
  } while (0)

__device__ int base = 40;

__global__ void AddBase(int* value) {
  *value += base++;
}

int main() {
  alarm(90);
  for (int life = 0; life < 3; ++life) {
    int* memory;
    int value = 1;
    CHECK(cudaMalloc(&memory, sizeof value));
    CHECK(cudaMemcpy(memory, &value, sizeof value, cudaMemcpyHostToDevice));
    AddBase<<<1, 1>>>(memory);
    AddBase<<<1, 1>>>(memory);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost));
    if (value != 1 + 40 + 41) {
      fprintf(stderr, "device_reset: Life (%d) computes (%d).\n", life, value);
      return 1;
    }
    CHECK(cudaDeviceReset());
    if (cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDeviceToHost) == cudaSuccess) {
      fprintf(stderr, "device_reset: Memory outlives the reset.\n");
      return 1;
    }
    cudaGetLastError();
  }
  printf("device_reset: 3 lives, ok\n");
  return 0;
}
