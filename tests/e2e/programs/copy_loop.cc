// Copies large buffers to the device and back until CUDA reports an error, which it then prints.
// Data that comes back without an error must be what was sent.
#include <vector>

#include "tests/e2e/programs/driver_program.h"

int main() {
  constexpr size_t kCount = 16 << 20;  // 64 MiB
  AddProgram program;
  std::vector<unsigned> sent(kCount), received(kCount);
  CUdeviceptr data;
  CHECK(cuMemAlloc(&data, kCount * sizeof(unsigned)));
  for (unsigned round = 0;; ++round) {
    for (size_t i = 0; i < kCount; ++i) sent[i] = static_cast<unsigned>(i) * 2654435761u + round;
    CUresult result = cuMemcpyHtoD(data, sent.data(), kCount * sizeof(unsigned));
    if (result == CUDA_SUCCESS) {
      result = cuMemcpyDtoH(received.data(), data, kCount * sizeof(unsigned));
    }
    if (result != CUDA_SUCCESS) {
      const char* name = "an unknown error";
      cuGetErrorName(result, &name);
      printf("%s\n", name);
      fflush(stdout);
      return 3;
    }
    if (received != sent) {
      puts("wrong");
      return 1;
    }
    puts("copying");
    fflush(stdout);
  }
}
