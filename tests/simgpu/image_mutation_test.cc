// Damaged fat binaries: what nvcc wrote, with header fields and payloads changed, is refused with a
// reason or loads, through the driver API. An image has no length of its own that can be trusted,
// so each lies at the start of a mapping that ends with a page that nobody may read.
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/simgpu/driver_fixture.h"
#include "tests/simgpu/mutations.h"

using namespace simgpu_test;

namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class GuardedImage {
 public:
  explicit GuardedImage(size_t bytes) : mapped_((bytes + 2 * kPage) / kPage * kPage) {
    memory_ = static_cast<char*>(
        mmap(nullptr, mapped_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory_ != MAP_FAILED);
    REQUIRE(munmap(memory_ + mapped_, kPage) == 0);
  }
  ~GuardedImage() { munmap(memory_, mapped_); }
  const void* Fill(const std::string& image) {
    std::memset(memory_, 0, mapped_);
    std::memcpy(memory_, image.data(), image.size());
    return memory_;
  }

 private:
  static constexpr size_t kPage = 4096;
  size_t mapped_;
  char* memory_ = nullptr;
};

}  // namespace

TEST_CASE("mutated fat binaries are refused with a reason or load", "[simgpu][mutation]") {
  setenv("SIMGPU_LOG", "none", 1);
  ScopedContext context;
  Mutator mutator(21);
  size_t free_before = 0;
  size_t total = 0;
  REQUIRE_CUDA(cuMemGetInfo(&free_before, &total));
  int refused = 0;
  int loaded = 0;
  for (const char* name : {"size", "speed", "none"}) {
    const std::string original =
        ReadFile(std::string(PENSTOCK_KERNELS "/warp_") + name + ".fatbin");
    REQUIRE(original.size() > 1000);
    GuardedImage guarded(original.size());
    CUmodule module = nullptr;
    REQUIRE_CUDA(cuModuleLoadData(&module, guarded.Fill(original)));
    CHECK_CUDA(cuModuleUnload(module));
    for (int round = Mutations(PENSTOCK_MUTATIONS) / 3; round > 0; --round) {
      std::string image = original;
      switch (mutator.Below(4)) {
        case 0:
          mutator.Bytes(&image, 0, image.size());
          break;
        case 1:  // what is cut off reads as zeros
          image.resize(1 + mutator.Below(image.size()));
          break;
        default:  // the container's header and the first entry's
          mutator.Bytes(&image, 4, 16 + 64);
      }
      char log[512] = "";
      CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
      void* values[] = {log, reinterpret_cast<void*>(sizeof(log))};
      const CUresult result = cuModuleLoadDataEx(&module, guarded.Fill(image), 2, options, values);
      if (result == CUDA_SUCCESS) {
        ++loaded;
        CHECK_CUDA(cuModuleUnload(module));
        continue;
      }
      ++refused;
      INFO(log);
      CHECK(std::strlen(log) > 10);
      const bool honest =
          result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_INVALID_PTX ||
          result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_OUT_OF_MEMORY ||
          result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
      CHECK(honest);
    }
  }
  CHECK(refused > 100);
  CHECK(loaded > 10);
  size_t free_after = 0;
  REQUIRE_CUDA(cuMemGetInfo(&free_after, &total));
  CHECK(free_after == free_before);
#ifndef __SANITIZE_ADDRESS__  // which keeps what was freed
  rusage usage{};
  REQUIRE(getrusage(RUSAGE_SELF, &usage) == 0);
  CHECK(usage.ru_maxrss < 256 * 1024);
#endif
}
