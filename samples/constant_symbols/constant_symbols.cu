// Variables that live on the device: constant memory, initialised and zeroed globals, copies to and
// from symbols, and the address of a symbol used as a plain pointer.
#include <cstring>
#include <vector>

#include "../check.h"

constexpr int kDegree = 4;

__constant__ int coefficients[kDegree + 1] = {1, 1, 1, 1, 1};
__constant__ int bias = -7;
__device__ unsigned evaluated;  // starts at zero
__device__ int largest = -1'000'000'000;
__device__ int results[1000];

__global__ void Evaluate(int n) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  if (x >= n) return;
  int value = 0;
  for (int power = kDegree; power >= 0; --power) value = value * (x % 10 - 5) + coefficients[power];
  results[x] = value + bias;
  atomicAdd(&evaluated, 1u);
  atomicMax(&largest, results[x]);
}

static int Reference(const int (&c)[kDegree + 1], int bias_value, int x) {
  int value = 0;
  for (int power = kDegree; power >= 0; --power) value = value * (x % 10 - 5) + c[power];
  return value + bias_value;
}

// Launches and compares everything the kernel wrote; returns the largest result.
static int Round(const int (&c)[kDegree + 1], int bias_value, unsigned evaluated_before) {
  const int n = 1000;
  Evaluate<<<8, 128>>>(n);
  CHECK(cudaGetLastError());
  std::vector<int> got(n);
  CHECK(cudaMemcpyFromSymbol(got.data(), results, n * sizeof(int)));
  int expected_largest = -1'000'000'000;
  for (int x = 0; x < n; ++x) {
    const int expected = Reference(c, bias_value, x);
    if (expected > expected_largest) expected_largest = expected;
    if (got[x] != expected) {
      fprintf(stderr, "Result (%d) is (%d) instead of (%d).\n", x, got[x], expected);
      exit(1);
    }
  }
  unsigned count = 0;
  int largest_got = 0;
  CHECK(cudaMemcpyFromSymbol(&count, evaluated, sizeof(count)));
  CHECK(cudaMemcpyFromSymbol(&largest_got, largest, sizeof(largest_got)));
  if (count != evaluated_before + n || largest_got != expected_largest) {
    fprintf(stderr, "Count (%u) and largest (%d) should be (%u) and (%d).\n", count, largest_got,
            evaluated_before + n, expected_largest);
    exit(1);
  }
  return largest_got;
}

int main() {
  // First with what the program's image says, then with what the host writes.
  const int ones[kDegree + 1] = {1, 1, 1, 1, 1};
  const int first = Round(ones, -7, 0);

  int mixed[kDegree + 1] = {9, -8, 7, -6, 5};
  CHECK(cudaMemcpyToSymbol(coefficients, mixed, sizeof(mixed)));
  mixed[2] = 70;  // one element in the middle, by offset
  CHECK(cudaMemcpyToSymbol(coefficients, &mixed[2], sizeof(int), 2 * sizeof(int)));
  const int new_bias = 1000;
  CHECK(cudaMemcpyToSymbol(bias, &new_bias, sizeof(new_bias)));

  size_t size = 0;
  void* address = nullptr;
  CHECK(cudaGetSymbolSize(&size, results));
  CHECK(cudaGetSymbolAddress(&address, results));
  if (size != 1000 * sizeof(int)) {
    fprintf(stderr, "The symbol has (%zu) bytes instead of (%zu).\n", size, 1000 * sizeof(int));
    return 1;
  }
  CHECK(cudaMemset(address, 0, size));
  const int second = Round(mixed, new_bias, 1000);

  printf("constant_symbols: largest %d, then %d, ok\n", first, second);
  return 0;
}
