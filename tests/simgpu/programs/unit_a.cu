// The first of two translation units with relocatable device code. Each uses what the other
// defines, and both have a local variable and function of the same name.
#include <cstdio>

#include "units.h"

extern __device__ int shared_counter;
extern __device__ int AddSeven(int a, int b);

static __device__ int local_value = 3;
static __device__ __noinline__ int Twice(int x) {
  return 2 * x + local_value;
}
__device__ int OfFirst(int x) {
  return x * 1000;
}

__global__ void RunFirst(int* result) {
  local_value += *result;  // so that the compiler does not know it
  *result = AddSeven(Twice(5), shared_counter);
}

int main() {
  int* memory = nullptr;
  int result[2] = {};
  cudaMalloc(&memory, sizeof(result));
  cudaMemset(memory, 0, sizeof(result));
  RunFirst<<<1, 1>>>(memory);
  LaunchSecond(memory + 1);
  const cudaError_t error = cudaMemcpy(result, memory, sizeof(result), cudaMemcpyDeviceToHost);
  printf("%s %d %d\n", cudaGetErrorName(error), result[0], result[1]);
  // 2 * 5 + 3 + 100 + 7; 2 * 7 - 11 + 100 + 7 + 1000
  return error == cudaSuccess && result[0] == 120 && result[1] == 1110 ? 0 : 1;
}
