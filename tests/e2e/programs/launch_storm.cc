// Holds memory and launches kernels without end; only a signal stops it.
#include "tests/e2e/programs/driver_program.h"

int main() {
  constexpr unsigned kCount = 1 << 20;
  AddProgram program;
  CUdeviceptr data, ballast;
  CHECK(cuMemAlloc(&data, kCount * sizeof(unsigned)));
  CHECK(cuMemAlloc(&ballast, size_t{256} << 20));
  CHECK(cuMemsetD32(data, 0, kCount));
  for (unsigned long launches = 0;; ++launches) {
    CHECK(program.Add(data, kCount, 1));
    if (launches == 50) {
      puts("storming");
      fflush(stdout);
    }
  }
}
