// The smallest whole CUDA program: allocate, copy in, launch, copy out, free.
#include <vector>

#include "../check.h"

__global__ void Add(const float* a, const float* b, float* sum, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sum[i] = a[i] + b[i];
}

int main() {
  const int n = 1'000'003;  // no multiple of the block size: the last block is ragged
  const size_t bytes = n * sizeof(float);
  std::vector<float> a(n), b(n), sum(n, -1.0f);
  for (int i = 0; i < n; ++i) {
    a[i] = 0.5f * i;
    b[i] = 2.0f * i;
  }

  float *device_a, *device_b, *device_sum;
  CHECK(cudaMalloc(&device_a, bytes));
  CHECK(cudaMalloc(&device_b, bytes));
  CHECK(cudaMalloc(&device_sum, bytes));
  CHECK(cudaMemcpy(device_a, a.data(), bytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(device_b, b.data(), bytes, cudaMemcpyHostToDevice));

  const int block = 256;
  Add<<<(n + block - 1) / block, block>>>(device_a, device_b, device_sum, n);
  CHECK(cudaGetLastError());

  CHECK(cudaMemcpy(sum.data(), device_sum, bytes, cudaMemcpyDeviceToHost));
  CHECK(cudaFree(device_a));
  CHECK(cudaFree(device_b));
  CHECK(cudaFree(device_sum));

  double total = 0;
  for (int i = 0; i < n; ++i) {
    if (sum[i] != 2.5f * i) {
      fprintf(stderr, "Element (%d) is (%g) instead of (%g).\n", i, sum[i], 2.5f * i);
      return 1;
    }
    total += sum[i];
  }
  printf("vector_add: %d elements, total %.1f, ok\n", n, total);
  return 0;
}
