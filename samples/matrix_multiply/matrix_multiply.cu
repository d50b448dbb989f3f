// C = A x B by tiles in shared memory, with a barrier before and after each tile.
#include <vector>

#include "../check.h"

constexpr int kTile = 16;

// A is rows x inner, B is inner x columns, all row-major and of any size.
__global__ void Multiply(const float* a, const float* b, float* c, int rows, int inner,
                         int columns) {
  __shared__ float tile_a[kTile][kTile];
  __shared__ float tile_b[kTile][kTile];
  const int row = blockIdx.y * kTile + threadIdx.y;
  const int column = blockIdx.x * kTile + threadIdx.x;
  float sum = 0;
  for (int start = 0; start < inner; start += kTile) {
    const int k_a = start + threadIdx.x;
    const int k_b = start + threadIdx.y;
    tile_a[threadIdx.y][threadIdx.x] = row < rows && k_a < inner ? a[row * inner + k_a] : 0.0f;
    tile_b[threadIdx.y][threadIdx.x] =
        k_b < inner && column < columns ? b[k_b * columns + column] : 0.0f;
    __syncthreads();
    for (int k = 0; k < kTile; ++k) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
    __syncthreads();
  }
  if (row < rows && column < columns) c[row * columns + column] = sum;
}

int main() {
  const int rows = 150, inner = 170, columns = 200;
  std::vector<float> a(rows * inner), b(inner * columns), c(rows * columns, -1.0f);
  Repeatable random(1);
  // Small integers: every product and sum is exact, so the comparison can be too.
  for (float& value : a) value = static_cast<int>(random.Next(17)) - 8;
  for (float& value : b) value = static_cast<int>(random.Next(17)) - 8;

  float *device_a, *device_b, *device_c;
  CHECK(cudaMalloc(&device_a, a.size() * sizeof(float)));
  CHECK(cudaMalloc(&device_b, b.size() * sizeof(float)));
  CHECK(cudaMalloc(&device_c, c.size() * sizeof(float)));
  CHECK(cudaMemcpy(device_a, a.data(), a.size() * sizeof(float), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(device_b, b.data(), b.size() * sizeof(float), cudaMemcpyHostToDevice));

  const dim3 block(kTile, kTile);
  const dim3 grid((columns + kTile - 1) / kTile, (rows + kTile - 1) / kTile);
  Multiply<<<grid, block>>>(device_a, device_b, device_c, rows, inner, columns);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(c.data(), device_c, c.size() * sizeof(float), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(device_a));
  CHECK(cudaFree(device_b));
  CHECK(cudaFree(device_c));

  double trace = 0;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      float expected = 0;
      for (int k = 0; k < inner; ++k) expected += a[row * inner + k] * b[k * columns + column];
      const float got = c[row * columns + column];
      if (got != expected) {
        fprintf(stderr, "C[%d][%d] is (%g) instead of (%g).\n", row, column, got, expected);
        return 1;
      }
      if (row == column) trace += got;
    }
  }
  printf("matrix_multiply: %dx%dx%d, trace %.0f, ok\n", rows, inner, columns, trace);
  return 0;
}
