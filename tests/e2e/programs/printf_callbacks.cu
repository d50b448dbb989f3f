// What a kernel prints before a callback or a host function of its stream comes out before what
// that prints, with no synchronisation between. At the end the program leaves while a function has
// not had its turn: it neither runs nor keeps the program.
#include <cuda_runtime.h>
#include <stdio.h>
#include <unistd.h>

#define CHECK(call)                                                               \
  do {                                                                            \
    const cudaError_t check_error = (call);                                       \
    if (check_error != cudaSuccess) {                                             \
      fprintf(stderr, "%s fails: %s.\n", #call, cudaGetErrorString(check_error)); \
      _exit(1);                                                                   \
    }                                                                             \
  } while (0)

__global__ void Say(int round) {
  printf("kernel %d\n", round);
}

// As long as the program lives, and then some.
__global__ void Hold() {
  const long long start = clock64();
  while (clock64() - start < 3'000'000'000) {
  }
}

void Print(const char* who, int round) {
  printf("%s %d\n", who, round);
  fflush(stdout);
}

int main() {
  alarm(90);
  printf("what the host says first comes first\n");  // and waits in stdout's buffer meanwhile
  cudaStream_t stream, other;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  static int rounds[20];
  for (int round = 0; round < 20; ++round) {
    rounds[round] = round;
    Say<<<1, 1, 0, stream>>>(round);
    CHECK(cudaGetLastError());
    if (round % 2 == 0) {
      CHECK(cudaLaunchHostFunc(
          stream, [](void* user) { Print("function", *static_cast<int*>(user)); }, &rounds[round]));
    } else {
      CHECK(cudaStreamAddCallback(
          stream,
          [](cudaStream_t, cudaError_t error, void* user) {
            if (error != cudaSuccess) _exit(1);
            Print("callback", *static_cast<int*>(user));
          },
          &rounds[round], 0));
    }
  }
  CHECK(cudaStreamSynchronize(stream));
  printf("printf_callbacks: all said in order, ok\n");
  fflush(stdout);
  Hold<<<1, 1, 0, other>>>();
  CHECK(cudaLaunchHostFunc(
      other, [](void*) { Print("much too late", 0); }, nullptr));
  _exit(0);
}
