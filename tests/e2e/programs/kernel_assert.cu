// An assertion that fails in a kernel: CUDA_ERROR_ASSERT at the next synchronisation and for good,
// and its message on stderr, complete, at that moment. The program replaces its stderr by a file to
// see what is there, and prints the verdict on stdout.
#include <assert.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#undef NDEBUG

__global__ void Check(int limit) {
  assert(int(threadIdx.x) < limit);
}

int main() {
  alarm(90);
  char path[] = "/tmp/kernel_assert-XXXXXX";
  const int file = mkstemp(path);
  if (cudaFree(nullptr) != cudaSuccess) return 2;
  Check<<<1, 32>>>(32);
  if (cudaDeviceSynchronize() != cudaSuccess) return 3;
  const int real_stderr = dup(STDERR_FILENO);
  dup2(file, STDERR_FILENO);
  Check<<<1, 32>>>(31);
  const cudaError_t at_sync = cudaDeviceSynchronize();
  fflush(stderr);
  dup2(real_stderr, STDERR_FILENO);
  char text[8192] = "";
  const ssize_t length = pread(file, text, sizeof text - 1, 0);
  unlink(path);
  int* memory;
  const cudaError_t later = cudaMalloc(&memory, 4);
  if (at_sync != cudaErrorAssert || later != cudaErrorAssert) {
    fprintf(stderr, "kernel_assert: The errors are %s and %s.\n", cudaGetErrorName(at_sync),
            cudaGetErrorName(later));
    return 1;
  }
  if (length <= 0 || strstr(text, "kernel_assert.cu") == nullptr ||
      strstr(text, "Assertion `int(threadIdx.x) < limit` failed.") == nullptr ||
      strstr(text, "thread: [31,0,0]") == nullptr) {
    fprintf(stderr, "kernel_assert: The message is (%s).\n", text);
    return 1;
  }
  printf("kernel_assert: error %d with its message, ok\n", at_sync);
  return 0;
}
