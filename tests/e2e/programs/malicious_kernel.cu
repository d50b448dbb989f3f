// Kernels that mean harm, for hostile.py: malicious_kernel MODE. Prints what the runtime says of
// it.
//
//   read, write     far outside of everything that is allocated
//   others          at the places where another program's memory lies, since all allocate alike
//   host            where a process has its stack and libraries
//   printf          more output than any buffer holds
//   spin            never ends; prints "spinning" first
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

__global__ void Read(const volatile uint32_t* place, uint32_t* sink) {
  *sink = *place;
}

__global__ void Write(volatile uint32_t* place) {
  *place = 0xbadbad;
}

__global__ void Shout() {
  for (int i = 0; i < 40; ++i) {
    printf(
        "block %d thread %d says %d: a line that is repeated until nobody can hear it any more\n",
        blockIdx.x, threadIdx.x, i);
  }
}

__global__ void Spin(volatile uint32_t* flag) {
  while (*flag == 0) {
  }
}

int Report(const char* what) {
  const cudaError_t error = cudaDeviceSynchronize();
  printf("%s: %s\n", what, cudaGetErrorName(error));
  return 0;
}

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "";
  uint32_t* memory = nullptr;
  if (cudaMalloc(&memory, 4096) != cudaSuccess || cudaMemset(memory, 0, 4096) != cudaSuccess) {
    fprintf(stderr, "There is no memory to begin with.\n");
    return 1;
  }
  if (strcmp(mode, "read") == 0) {
    Read<<<1, 1>>>(memory + (1ull << 34), memory);
  } else if (strcmp(mode, "write") == 0) {
    Write<<<1, 1>>>(memory - (1ull << 34));
  } else if (strcmp(mode, "others") == 0) {
    Write<<<1, 1>>>(memory + (64 << 10));
  } else if (strcmp(mode, "host") == 0) {
    Write<<<1, 1>>>(reinterpret_cast<uint32_t*>(argv));
  } else if (strcmp(mode, "printf") == 0) {
    Shout<<<16, 64>>>();
  } else if (strcmp(mode, "spin") == 0) {
    printf("spinning\n");
    fflush(stdout);
    Spin<<<1, 1>>>(memory);
  } else {
    fprintf(stderr, "There is no mode (%s).\n", mode);
    return 1;
  }
  return Report(mode);
}
