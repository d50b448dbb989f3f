// The default streams of two threads overlap when the program is compiled with --default-stream
// per-thread: a kernel of each waits for a word that the other's kernel writes. Compiled without
// it, both use the legacy default stream, the kernels run one after the other, and this program
// fails: the build makes both.
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <thread>

#define CHECK(call)                                                               \
  do {                                                                            \
    const cudaError_t check_error = (call);                                       \
    if (check_error != cudaSuccess) {                                             \
      fprintf(stderr, "%s fails: %s.\n", #call, cudaGetErrorString(check_error)); \
      _exit(1);                                                                   \
    }                                                                             \
  } while (0)

// Shorter than the other programs' limit, for the legacy variant really runs into it.
constexpr long long kLimit = 3'000'000'000;

__global__ void Meet(volatile int* mine, volatile int* other, int* gave_up) {
  *mine = 1;
  __threadfence();
  const long long start = clock64();
  while (*other == 0) {
    if (clock64() - start > kLimit) {
      *gave_up = 1;
      return;
    }
  }
}

int main() {
  alarm(90);
  int* words;
  CHECK(cudaMalloc(&words, 4 * sizeof(int)));
  CHECK(cudaMemset(words, 0, 4 * sizeof(int)));
  CHECK(cudaDeviceSynchronize());
  int gave_up[2] = {-1, -1};
  std::thread threads[2];
  for (int t = 0; t < 2; ++t) {
    threads[t] = std::thread([&, t] {
      Meet<<<1, 1>>>(words + t, words + 1 - t, words + 2 + t);
      CHECK(cudaGetLastError());
      CHECK(cudaStreamSynchronize(0));
      CHECK(cudaMemcpy(&gave_up[t], words + 2 + t, sizeof(int), cudaMemcpyDeviceToHost));
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (gave_up[0] != 0 || gave_up[1] != 0) {
    fprintf(stderr, "The default streams of two threads do not overlap.\n");
    return 1;
  }
  printf("per_thread_overlap: two default streams met, ok\n");
  return 0;
}
