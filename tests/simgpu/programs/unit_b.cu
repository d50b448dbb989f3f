#include "units.h"

__device__ int shared_counter = 100;
__device__ int AddSeven(int a, int b) {
  return a + b + 7;
}
extern __device__ int OfFirst(int x);

static __device__ int local_value = 11;
static __device__ __noinline__ int Twice(int x) {
  return 2 * x - local_value;
}

__global__ void RunSecond(int* result) {
  local_value += *result;
  *result = AddSeven(Twice(7), shared_counter) + OfFirst(1);
}

void LaunchSecond(int* result) {
  RunSecond<<<1, 1>>>(result);
}
