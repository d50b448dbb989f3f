// Kernels of every shape that a parameter block can have, and of every way to be named.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(call)                                                                         \
  do {                                                                                      \
    const cudaError_t error = (call);                                                       \
    if (error != cudaSuccess) {                                                             \
      fprintf(stderr, "line %d: %s gives %s.\n", __LINE__, #call, cudaGetErrorName(error)); \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

__device__ uint64_t g_sum;

struct Block {  // 4,088 bytes: with the pointer before it the 4 KB that every version takes
  uint32_t words[1022];
};

struct Mixed {
  uint8_t a;
  double b;
  uint16_t c;
  float4 d;
  uint8_t e;
};

__global__ void NoParameters() {
  g_sum = 17;
}

__global__ void OneBlock(uint64_t* sum, Block block) {
  uint64_t total = 0;
  for (const uint32_t word : block.words) total = total * 31 + word;
  *sum = total;
}

__global__ void MixedAlignment(uint8_t a, double b, uint16_t c, float4 d, Mixed mixed, uint8_t e,
                               int64_t f, uint64_t* sum) {
  *sum = a + static_cast<uint64_t>(b) * 3 + c * 5 + static_cast<uint64_t>(d.w) * 7 + mixed.a * 11 +
         static_cast<uint64_t>(mixed.b) * 13 + mixed.c * 17 +
         static_cast<uint64_t>(mixed.d.y) * 19 + mixed.e * 23 + e * 29 + f * 31;
}

__global__ void Empty(struct Nothing*, uint64_t* sum, bool yes, char letter) {
  *sum = yes ? letter : 0;
}

namespace a_namespace_with_a_name_that_is_long_enough_to_be_noticed {
template <typename First, typename Second, int kNumber>
struct Pair {
  First first;
  Second second;
};

template <typename Value, typename... Others>
__global__ void Templated(uint64_t* sum, Value value, Others... others) {
  const uint64_t parts[] = {static_cast<uint64_t>(others.first)..., 0};
  uint64_t total = static_cast<uint64_t>(value);
  for (const uint64_t part : parts) total = total * 3 + part;
  *sum = total;
}
}  // namespace a_namespace_with_a_name_that_is_long_enough_to_be_noticed

namespace {
__global__ void Hidden(uint64_t* sum) {
  *sum = 99;
}
}  // namespace

static __global__ void Static(uint64_t* sum) {
  *sum = 98;
}

uint64_t* g_device_sum;

void Expect(uint64_t expected, const char* what) {
  uint64_t sum = 0;
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(&sum, g_device_sum, sizeof sum, cudaMemcpyDeviceToHost));
  if (sum != expected) {
    fprintf(stderr, "%s gives %llu instead of %llu.\n", what, static_cast<unsigned long long>(sum),
            static_cast<unsigned long long>(expected));
    exit(1);
  }
  CHECK(cudaMemset(g_device_sum, 0, sizeof sum));
}

int main() {
  namespace named = a_namespace_with_a_name_that_is_long_enough_to_be_noticed;
  CHECK(cudaMalloc(&g_device_sum, sizeof(uint64_t)));
  NoParameters<<<1, 1>>>();
  uint64_t got = 0;
  CHECK(cudaMemcpyFromSymbol(&got, g_sum, sizeof got));
  if (got != 17) return 1;

  Block block;
  uint64_t expected = 0;
  for (uint32_t i = 0; i < 1022; ++i) {
    block.words[i] = i * 2654435761u;
    expected = expected * 31 + block.words[i];
  }
  OneBlock<<<1, 1>>>(g_device_sum, block);
  Expect(expected, "A block of 4 KB");

  Mixed mixed = {3, 5.0, 7, {0, 9, 0, 0}, 2};
  MixedAlignment<<<1, 1>>>(1, 2.0, 3, make_float4(0, 0, 0, 4), mixed, 5, 6, g_device_sum);
  Expect(1 + 6 + 15 + 28 + 33 + 65 + 119 + 171 + 46 + 145 + 186, "Parameters of mixed alignment");

  Empty<<<1, 1>>>(nullptr, g_device_sum, true, 'x');
  Expect('x', "A pointer to what nobody defines");

  using One = named::Pair<short, double, 7>;
  using Two = named::Pair<uint64_t, One, -3>;
  named::Templated<<<1, 1>>>(g_device_sum, 4.0f, One{5, 1.5}, Two{6, {7, 2.5}}, One{8, 0.5});
  Expect((((4 * 3 + 5) * 3 + 6) * 3 + 8) * 3, "A template of many arguments");
  Hidden<<<1, 1>>>(g_device_sum);
  Expect(99, "A kernel without a name outside");
  Static<<<1, 1>>>(g_device_sum);
  Expect(98, "A static kernel");

  // What is too large is refused when it is launched, and the next launch is right.
  NoParameters<<<1, 4096>>>();
  printf("4,096 threads: %s\n", cudaGetErrorName(cudaGetLastError()));
  NoParameters<<<dim3(1, 70000, 1), 1>>>();
  printf("70,000 blocks in y: %s\n", cudaGetErrorName(cudaGetLastError()));
  NoParameters<<<0, 1>>>();
  printf("no blocks: %s\n", cudaGetErrorName(cudaGetLastError()));
  NoParameters<<<1, 1, 1 << 20>>>();
  printf("a MiB of shared memory: %s\n", cudaGetErrorName(cudaGetLastError()));
  Static<<<1, 1>>>(g_device_sum);
  Expect(98, "A kernel after those");
  printf("kernel_kinds: ok\n");
  return 0;
}
