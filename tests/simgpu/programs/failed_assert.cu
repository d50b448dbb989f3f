// A failed assertion: its message is on stderr, the error is 710 and stays until the reset.
#include <cassert>
#include <cstdio>

__global__ void MustBeThree(int number) {
  assert(number == 3);
}

int failures = 0;

void Expect(cudaError_t result, cudaError_t expected, const char* what) {
  if (result == expected) return;
  printf("%s gives %s, not %s\n", what, cudaGetErrorName(result), cudaGetErrorName(expected));
  ++failures;
}

int main() {
  MustBeThree<<<2, 3>>>(3);
  Expect(cudaDeviceSynchronize(), cudaSuccess, "An assertion that holds");
  MustBeThree<<<1, 2>>>(4);
  Expect(cudaDeviceSynchronize(), cudaErrorAssert, "One that fails");
  void* memory = nullptr;
  Expect(cudaMalloc(&memory, 4), cudaErrorAssert, "A call after it");
  Expect(cudaDeviceReset(), cudaSuccess, "The reset");
  Expect(cudaMalloc(&memory, 4), cudaSuccess, "A call after the reset");
  MustBeThree<<<1, 1>>>(3);
  Expect(cudaDeviceSynchronize(), cudaSuccess, "A kernel after the reset");
  return failures;
}
