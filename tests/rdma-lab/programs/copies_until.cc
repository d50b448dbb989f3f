// Copies pinned and pageable memory to the device and back until FILE exists, and says after each
// round that every byte is right: something to break the fabric under. The first error ends it,
// with the error's name and the time that the failing round has taken.
//
// copies_until FILE
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "tests/e2e/programs/driver_program.h"

namespace {

constexpr size_t kPinned = (4 << 20) + 12, kPageable = (1 << 20) + 4;

void Fill(void* target, size_t bytes, unsigned round) {
  unsigned* words = static_cast<unsigned*>(target);
  for (size_t i = 0; i < bytes / sizeof(unsigned); ++i) {
    words[i] = static_cast<unsigned>(i) * 2654435761u + round * 40503u;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  AddProgram program;
  CUstream stream;
  CUdeviceptr device, other;
  void *sent, *received;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&device, kPinned));
  CHECK(cuMemAlloc(&other, kPageable));
  CHECK(cuMemHostAlloc(&sent, kPinned, 0));
  CHECK(cuMemHostAlloc(&received, kPinned, 0));
  std::vector<unsigned> pageable(kPageable / sizeof(unsigned)), back(pageable.size());

  unsigned round = 0;
  while (access(argv[1], F_OK) != 0) {
    ++round;
    Fill(sent, kPinned, round);
    Fill(pageable.data(), kPageable, ~round);
    memset(received, 0xEE, kPinned);
    const auto begin = std::chrono::steady_clock::now();
    CUresult result = cuMemcpyHtoDAsync(device, sent, kPinned, stream);
    const auto also = [&](auto call, auto... arguments) {
      if (result == CUDA_SUCCESS) result = call(arguments...);
    };
    also(cuMemcpyDtoHAsync, received, device, kPinned, stream);
    also(cuMemcpyHtoD, other, pageable.data(), kPageable);
    also(cuMemcpyDtoH, back.data(), other, kPageable);
    also(cuStreamSynchronize, stream);
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - begin);
    if (result != CUDA_SUCCESS) {
      const char* name = "an unknown error";
      cuGetErrorName(result, &name);
      printf("round %u fails: %s after %d ms\n", round, name, static_cast<int>(took.count()));
      return 3;
    }
    if (memcmp(sent, received, kPinned) != 0 || pageable != back) {
      printf("round %u is wrong\n", round);
      return 1;
    }
    printf("round %u\n", round);
    fflush(stdout);
  }
  printf("copies_until: ok\n");
  return 0;
}
