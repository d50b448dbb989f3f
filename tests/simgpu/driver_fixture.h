// Helpers for tests that use the simulated driver through the driver API alone.
#pragma once

#include <cuda.h>

#include <catch2/catch.hpp>
#include <cstdint>
#include <cstdlib>

#define CHECK_CUDA(expression) CHECK((expression) == CUDA_SUCCESS)
#define REQUIRE_CUDA(expression) REQUIRE((expression) == CUDA_SUCCESS)

namespace simgpu_test {

constexpr size_t kMemoryBytes = size_t{64} << 20;

// Two devices of 64 MiB; the same in every test of a program, since cuInit reads them once.
inline void Initialise() {
  setenv("SIMGPU_DEVICES", "2", 1);
  setenv("SIMGPU_MEMORY", "64M", 1);
  unsetenv("SIMGPU_CC");
  unsetenv("CUDA_VISIBLE_DEVICES");
  REQUIRE_CUDA(cuInit(0));
}

// A context of its own, current while the object lives.
class ScopedContext {
 public:
  explicit ScopedContext(CUdevice device = 0) {
    Initialise();
    REQUIRE_CUDA(cuCtxCreate_v4(&handle_, nullptr, 0, device));
  }
  ~ScopedContext() { CHECK_CUDA(cuCtxDestroy(handle_)); }
  CUcontext get() const { return handle_; }

 private:
  CUcontext handle_ = nullptr;
};

// A word that the host writes and streams read.
class PinnedWord {
 public:
  PinnedWord() {
    REQUIRE_CUDA(cuMemHostAlloc(reinterpret_cast<void**>(&word_), 64, 0));
    *word_ = 0;
  }
  ~PinnedWord() { CHECK_CUDA(cuMemFreeHost(word_)); }
  CUdeviceptr device() const { return reinterpret_cast<CUdeviceptr>(word_); }
  void Write(uint32_t value) { __atomic_store_n(word_, value, __ATOMIC_RELEASE); }
  uint32_t Read() const { return __atomic_load_n(word_, __ATOMIC_ACQUIRE); }

 private:
  uint32_t* word_ = nullptr;
};

}  // namespace simgpu_test
