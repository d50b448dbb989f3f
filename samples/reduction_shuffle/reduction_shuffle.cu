// Sum and maximum of an array: shuffles within a warp, shared memory between warps, one atomic per
// block.
#include <climits>
#include <vector>

#include "../check.h"

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlock = 256;

struct Reduced {
  unsigned long long sum;
  int maximum;
};

__device__ long long WarpSum(long long value) {
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_down_sync(kAllLanes, value, offset);
  return value;
}

__device__ int WarpMaximum(int value) {
  for (int mask = 16; mask > 0; mask /= 2)
    value = max(value, __shfl_xor_sync(kAllLanes, value, mask));
  return value;
}

__global__ void Reduce(const int* input, int n, Reduced* result) {
  __shared__ long long sums[kBlock / 32];
  __shared__ int maxima[kBlock / 32];
  long long sum = 0;
  int maximum = INT_MIN;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    sum += input[i];
    maximum = max(maximum, input[i]);
  }
  sum = WarpSum(sum);
  maximum = WarpMaximum(maximum);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) {
    sums[warp] = sum;
    maxima[warp] = maximum;
  }
  __syncthreads();
  if (warp == 0) {
    sum = WarpSum(lane < kBlock / 32 ? sums[lane] : 0);
    maximum = WarpMaximum(lane < kBlock / 32 ? maxima[lane] : INT_MIN);
    if (lane == 0) {
      atomicAdd(&result->sum, static_cast<unsigned long long>(sum));
      atomicMax(&result->maximum, maximum);
    }
  }
}

int main() {
  const int n = 1'000'000;
  std::vector<int> input(n);
  Repeatable random(2);
  Reduced expected{0, INT_MIN};
  for (int& value : input) {
    value = static_cast<int>(random.Next(2'000'001)) - 1'000'000;
    expected.sum += static_cast<long long>(value);
    if (value > expected.maximum) expected.maximum = value;
  }

  int* device_input;
  Reduced* device_result;
  Reduced result{0, INT_MIN};
  CHECK(cudaMalloc(&device_input, n * sizeof(int)));
  CHECK(cudaMalloc(&device_result, sizeof(Reduced)));
  CHECK(cudaMemcpy(device_input, input.data(), n * sizeof(int), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(device_result, &result, sizeof(result), cudaMemcpyHostToDevice));
  Reduce<<<64, kBlock>>>(device_input, n, device_result);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(&result, device_result, sizeof(result), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(device_input));
  CHECK(cudaFree(device_result));

  const long long sum = static_cast<long long>(result.sum);
  if (result.sum != expected.sum || result.maximum != expected.maximum) {
    fprintf(stderr, "Sum (%lld) and maximum (%d) should be (%lld) and (%d).\n", sum, result.maximum,
            static_cast<long long>(expected.sum), expected.maximum);
    return 1;
  }
  printf("reduction_shuffle: %d elements, sum %lld, maximum %d, ok\n", n, sum, result.maximum);
  return 0;
}
