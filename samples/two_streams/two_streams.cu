// Copies and kernels of two streams overlap; an event lets the second stream wait for the first.
//
// Each chunk goes up, is worked on and comes back on its own stream, from pinned memory. At the end
// stream 1 joins both halves after an event of stream 0, with no wait on the host in between.
#include "../check.h"

constexpr int kStreams = 2;
constexpr int kChunks = 8;
constexpr int kChunk = 1 << 16;
constexpr int kCount = kChunks * kChunk;
constexpr int kRounds = 20;

// A few rounds of integer work, so that a kernel takes about as long as its copies.
__host__ __device__ inline unsigned Stir(unsigned x) {
  for (int round = 0; round < kRounds; ++round) x = (x ^ (x >> 7)) * 2654435761u + round;
  return x;
}

__global__ void StirAll(unsigned* data, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] = Stir(data[i]);
}

// Element i of the upper half takes on element i of the lower half.
__global__ void Join(unsigned* data, int half) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < half) data[half + i] ^= data[i];
}

int main() {
  unsigned *host, *device;
  CHECK(cudaMallocHost(&host, kCount * sizeof(unsigned)));
  CHECK(cudaMalloc(&device, kCount * sizeof(unsigned)));
  for (int i = 0; i < kCount; ++i) host[i] = 3u * i + 1u;

  cudaStream_t streams[kStreams];
  for (cudaStream_t& stream : streams) {
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  cudaEvent_t begin, end, lower_done;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventCreateWithFlags(&lower_done, cudaEventDisableTiming));

  // The lower half of the chunks is stream 0's, the upper half stream 1's.
  CHECK(cudaEventRecord(begin, streams[0]));
  for (int step = 0; step < kChunks / kStreams; ++step) {
    for (int s = 0; s < kStreams; ++s) {
      const int start = (s * (kChunks / kStreams) + step) * kChunk;
      CHECK(cudaMemcpyAsync(device + start, host + start, kChunk * sizeof(unsigned),
                            cudaMemcpyHostToDevice, streams[s]));
      StirAll<<<kChunk / 256, 256, 0, streams[s]>>>(device + start, kChunk);
      CHECK(cudaGetLastError());
    }
  }
  CHECK(cudaEventRecord(lower_done, streams[0]));
  CHECK(cudaStreamWaitEvent(streams[1], lower_done, 0));
  Join<<<kCount / 2 / 256, 256, 0, streams[1]>>>(device, kCount / 2);
  CHECK(cudaGetLastError());
  CHECK(
      cudaMemcpyAsync(host, device, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost, streams[1]));
  CHECK(cudaEventRecord(end, streams[1]));
  CHECK(cudaEventSynchronize(end));
  CHECK(cudaEventQuery(lower_done));

  float elapsed_ms = -1;
  CHECK(cudaEventElapsedTime(&elapsed_ms, begin, end));
  if (!(elapsed_ms > 0) || elapsed_ms > 60'000) {
    fprintf(stderr, "The elapsed time (%g ms) is not plausible.\n", elapsed_ms);
    return 1;
  }

  unsigned checksum = 0;
  for (int i = 0; i < kCount; ++i) {
    unsigned expected = Stir(3u * i + 1u);
    if (i >= kCount / 2) expected ^= Stir(3u * (i - kCount / 2) + 1u);
    if (host[i] != expected) {
      fprintf(stderr, "Element (%d) is (%08x) instead of (%08x).\n", i, host[i], expected);
      return 1;
    }
    checksum = checksum * 31u + host[i];
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  CHECK(cudaEventDestroy(lower_done));
  for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
  CHECK(cudaFree(device));
  CHECK(cudaFreeHost(host));
  printf("two_streams: %d chunks of %d elements, checksum %08x, ok\n", kChunks, kChunk, checksum);
  return 0;
}
