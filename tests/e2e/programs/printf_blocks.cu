// Many blocks print; all lines are on stdout, complete, when the synchronising call returns.
//
// The program replaces its stdout by a pipe to see what is there at that moment, and prints the
// verdict on the real one.
#include <cuda_runtime.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <string>
#include <vector>

#define CHECK(call)                                                               \
  do {                                                                            \
    const cudaError_t check_error = (call);                                       \
    if (check_error != cudaSuccess) {                                             \
      fprintf(stderr, "%s fails: %s.\n", #call, cudaGetErrorString(check_error)); \
      _exit(1);                                                                   \
    }                                                                             \
  } while (0)

__global__ void Speak(int turn) {
  printf("turn %d block %d thread %d of a line that is long enough to be torn: %08x %f\n", turn,
         blockIdx.x, threadIdx.x, blockIdx.x * 40503u + threadIdx.x, blockIdx.x / 4.0);
}

constexpr int kBlocks = 24, kThreads = 16;

// What the file holds up to now.
std::string Contents(const char* path) {
  std::string text;
  char buffer[65536];
  FILE* file = fopen(path, "r");
  if (file == nullptr) return text;
  for (size_t bytes; (bytes = fread(buffer, 1, sizeof buffer, file)) > 0;)
    text.append(buffer, bytes);
  fclose(file);
  return text;
}

int main() {
  alarm(90);
  char path[] = "/tmp/printf_blocks-XXXXXX";
  const int file = mkstemp(path);
  fflush(stdout);
  const int real_stdout = dup(STDOUT_FILENO);
  dup2(file, STDOUT_FILENO);
  CHECK(cudaFree(nullptr));

  const char* failure = nullptr;
  size_t lines_before = 0;
  for (int turn = 0; turn < 3 && failure == nullptr; ++turn) {
    Speak<<<kBlocks, kThreads>>>(turn);
    CHECK(cudaGetLastError());
    if (turn == 0) {
      CHECK(cudaDeviceSynchronize());
    } else if (turn == 1) {
      CHECK(cudaStreamSynchronize(0));
    } else {
      int* memory;
      int word;
      CHECK(cudaMalloc(&memory, sizeof(int)));
      CHECK(cudaMemcpy(&word, memory, sizeof(int), cudaMemcpyDeviceToHost));
      CHECK(cudaDeviceSynchronize());
    }
    fflush(stdout);
    const std::string text = Contents(path);
    size_t lines = 0;
    for (const char c : text) lines += c == '\n';
    if (lines - lines_before != kBlocks * kThreads) failure = "Lines are missing at the sync.";
    lines_before = lines;
    for (int block = 0; block < kBlocks && failure == nullptr; ++block) {
      for (int thread = 0; thread < kThreads; ++thread) {
        char expected[200];
        snprintf(expected, sizeof expected,
                 "turn %d block %d thread %d of a line that is long enough to be torn: %08x %f\n",
                 turn, block, thread, block * 40503u + thread, block / 4.0);
        if (text.find(expected) == std::string::npos) failure = "A line is torn or wrong.";
      }
    }
  }
  dup2(real_stdout, STDOUT_FILENO);
  unlink(path);
  if (failure != nullptr) {
    fprintf(stderr, "printf_blocks: %s\n", failure);
    return 1;
  }
  printf("printf_blocks: 3 times %d lines, ok\n", kBlocks * kThreads);
  return 0;
}
