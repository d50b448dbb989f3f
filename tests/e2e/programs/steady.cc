// Answers line by line, so that a test can look at one session while something happens to another:
// "round" does verified work and says right or wrong, "free" says how many bytes of memory are
// free.
#include <cstring>
#include <vector>

#include "tests/e2e/programs/driver_program.h"

int main() {
  constexpr unsigned kCount = 50'000;
  AddProgram program;
  std::vector<unsigned> host(kCount);
  unsigned round = 0;
  char line[64];
  while (fgets(line, sizeof(line), stdin) != nullptr) {
    if (strcmp(line, "free\n") == 0) {
      size_t free_bytes, total_bytes;
      CHECK(cuMemGetInfo(&free_bytes, &total_bytes));
      printf("%zu\n", free_bytes);
    } else {
      ++round;
      CUdeviceptr data;
      CHECK(cuMemAlloc(&data, kCount * sizeof(unsigned)));
      for (unsigned i = 0; i < kCount; ++i) host[i] = i * round;
      CHECK(cuMemcpyHtoD(data, host.data(), kCount * sizeof(unsigned)));
      CHECK(program.Add(data, kCount, 7));
      CHECK(program.Add(data, kCount, round));
      CHECK(cuMemcpyDtoH(host.data(), data, kCount * sizeof(unsigned)));
      CHECK(cuMemFree(data));
      bool right = true;
      for (unsigned i = 0; i < kCount; ++i) right &= host[i] == i * round + 7 + round;
      puts(right ? "right" : "wrong");
    }
    fflush(stdout);
  }
  return 0;
}
