// cudaDeviceReset, then the device is used again, also with kernels and variables of this program,
// which must be loaded anew: with their initial values. What failed before the reset, a kernel and
// the work behind it, says nothing after it.
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

__global__ void Fault(int* nowhere) {
  *nowhere = 1;
}

// A kernel fails; copies and launches of this thread stand behind it as the device is reset.
int FailAndReset(bool wait) {
  constexpr size_t kBytes = 1 << 20;
  int *memory, *pinned;
  cudaStream_t stream;
  CHECK(cudaMalloc(&memory, kBytes));
  CHECK(cudaMallocHost(&pinned, kBytes));
  CHECK(cudaStreamCreate(&stream));
  Fault<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(8));
  cudaMemcpyAsync(pinned, memory, kBytes, cudaMemcpyDeviceToHost, stream);
  cudaMemcpyAsync(memory, pinned, kBytes, cudaMemcpyHostToDevice, stream);
  for (int i = 0; i < 4; ++i) {
    AddBase<<<1, 1, 0, stream>>>(memory);
    usleep(10'000);
  }
  if (wait && cudaStreamSynchronize(stream) == cudaSuccess) {
    fprintf(stderr, "device_reset: A fault passes unseen.\n");
    return 1;
  }
  cudaDeviceReset();  // may say what it found
  cudaGetLastError();
  return 0;
}

int main() {
  alarm(90);
  for (int life = 0; life < 5; ++life) {
    if (life >= 3 && FailAndReset(life == 4) != 0) return 1;
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
  printf("device_reset: 5 lives, ok\n");
  return 0;
}
