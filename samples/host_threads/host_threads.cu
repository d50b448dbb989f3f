// Several host threads drive one GPU, each with its own stream, memory and events.
#include <thread>
#include <vector>

#include "../check.h"

constexpr int kThreads = 6;
constexpr int kRounds = 15;
constexpr int kCount = 10'000;

__global__ void Step(unsigned* data, int n, unsigned multiplier) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] = data[i] * multiplier + 1u;
}

// Returns the sum of the thread's results, or exits the program at the first wrong one.
static unsigned Work(unsigned id) {
  CHECK(cudaSetDevice(0));
  cudaStream_t stream;
  cudaEvent_t done;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  unsigned* device;
  CHECK(cudaMalloc(&device, kCount * sizeof(unsigned)));

  std::vector<unsigned> host(kCount), expected(kCount);
  for (int i = 0; i < kCount; ++i) host[i] = expected[i] = i * (id + 1);
  CHECK(cudaMemcpyAsync(device, host.data(), kCount * sizeof(unsigned), cudaMemcpyHostToDevice,
                        stream));
  for (unsigned round = 0; round < kRounds; ++round) {
    const unsigned multiplier = 2 * (round + id) + 1;
    Step<<<(kCount + 127) / 128, 128, 0, stream>>>(device, kCount, multiplier);
    CHECK(cudaGetLastError());
    for (unsigned& value : expected) value = value * multiplier + 1u;
    if (round % 5 == 4) {  // look at the intermediate state now and then
      CHECK(cudaEventRecord(done, stream));
      CHECK(cudaEventSynchronize(done));
      unsigned first = 0;
      CHECK(cudaMemcpy(&first, device, sizeof(first), cudaMemcpyDeviceToHost));
      if (first != expected[0]) {
        fprintf(stderr, "Thread (%u) sees (%u) instead of (%u) in round (%u).\n", id, first,
                expected[0], round);
        exit(1);
      }
    }
  }
  CHECK(cudaMemcpyAsync(host.data(), device, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost,
                        stream));
  CHECK(cudaStreamSynchronize(stream));
  unsigned sum = 0;
  for (int i = 0; i < kCount; ++i) {
    if (host[i] != expected[i]) {
      fprintf(stderr, "Thread (%u): element (%d) is (%u) instead of (%u).\n", id, i, host[i],
              expected[i]);
      exit(1);
    }
    sum += host[i];
  }
  CHECK(cudaFree(device));
  CHECK(cudaEventDestroy(done));
  CHECK(cudaStreamDestroy(stream));
  return sum;
}

int main() {
  std::vector<unsigned> sums(kThreads);
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < kThreads; ++id) {
    threads.emplace_back([id, &sums] { sums[id] = Work(id); });
  }
  for (std::thread& thread : threads) thread.join();
  unsigned total = 0;
  for (unsigned id = 0; id < kThreads; ++id) total = total * 31u + sums[id];
  printf("host_threads: %d threads of %d rounds, checksum %08x, ok\n", kThreads, kRounds, total);
  return 0;
}
