// A byte histogram with atomics on shared memory, merged with atomics on global memory.
#include <vector>

#include "../check.h"

constexpr int kBins = 256;

__global__ void Histogram(const unsigned char* data, int n, unsigned* bins) {
  __shared__ unsigned local[kBins];
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) local[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&local[data[i]], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += blockDim.x) atomicAdd(&bins[i], local[i]);
}

int main() {
  const int n = 1'000'000;
  std::vector<unsigned char> data(n);
  std::vector<unsigned> bins(kBins, 77), expected(kBins, 0);
  Repeatable random(3);
  for (unsigned char& value : data) {
    value = static_cast<unsigned char>(random.Next(16) * random.Next(18));  // an uneven spread
    ++expected[value];
  }

  unsigned char* device_data;
  unsigned* device_bins;
  CHECK(cudaMalloc(&device_data, n));
  CHECK(cudaMalloc(&device_bins, kBins * sizeof(unsigned)));
  CHECK(cudaMemcpy(device_data, data.data(), n, cudaMemcpyHostToDevice));
  CHECK(cudaMemset(device_bins, 0, kBins * sizeof(unsigned)));
  Histogram<<<32, 256>>>(device_data, n, device_bins);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(bins.data(), device_bins, kBins * sizeof(unsigned), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(device_data));
  CHECK(cudaFree(device_bins));

  int fullest = 0;
  for (int i = 0; i < kBins; ++i) {
    if (bins[i] != expected[i]) {
      fprintf(stderr, "Bin (%d) holds (%u) instead of (%u).\n", i, bins[i], expected[i]);
      return 1;
    }
    if (bins[i] > bins[fullest]) fullest = i;
  }
  printf("histogram_atomics: %d bytes, fullest bin %d with %u, ok\n", n, fullest, bins[fullest]);
  return 0;
}
