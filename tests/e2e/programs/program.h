// What the test programs share. They are plain CUDA programs: nothing in them knows of Penstock,
// and each of them is also run directly on a driver, where the same must hold.
//
// A program prints only what is the same in every right run (the runner compares the outputs of
// different routes), complains on stderr, and ends with status 0 (right), 1 (wrong) or 3 (still not
// done after PROGRAM_LIMIT_S seconds: whatever should not wait does wait).
#pragma once

#include <cuda.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

extern "C" const char kernels_ptx[];  // kernels.cu

// The clocks after which a kernel gives up at its door: some 20 to 40 seconds.
constexpr long long kKernelLimit = 40'000'000'000;
constexpr unsigned kBlock = 256;

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void Fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "%s: %s\n", program_invocation_short_name, text);
  fflush(nullptr);
  _exit(1);  // other threads may be inside calls that never return
}

inline const char* ErrorName(CUresult result) {
  const char* name = nullptr;
  return cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr ? name : "unknown";
}

#define CHECK(call)                                                                     \
  do {                                                                                  \
    const CUresult check_result = (call);                                               \
    if (check_result != CUDA_SUCCESS) {                                                 \
      Fail("%s:%d: %s gives %s (%d).", strrchr("/" __FILE__, '/') + 1, __LINE__, #call, \
           ErrorName(check_result), static_cast<int>(check_result));                    \
    }                                                                                   \
  } while (0)

#define EXPECT_CODE(expected, call)                                                            \
  do {                                                                                         \
    const CUresult check_result = (call);                                                      \
    if (check_result != (expected)) {                                                          \
      Fail("%s:%d: %s gives %s (%d) instead of %s.", strrchr("/" __FILE__, '/') + 1, __LINE__, \
           #call, ErrorName(check_result), static_cast<int>(check_result), #expected);         \
    }                                                                                          \
  } while (0)

#define EXPECT(condition, ...)           \
  do {                                   \
    if (!(condition)) Fail(__VA_ARGS__); \
  } while (0)

// Ends a program that hangs, with a status of its own.
inline void StartWatchdog() {
  const char* limit = getenv("PROGRAM_LIMIT_S");
  struct sigaction action = {};
  action.sa_handler = [](int) {
    static const char kText[] = "The program is not done within its time.\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kText, sizeof kText - 1);
    _exit(3);
  };
  sigaction(SIGALRM, &action, nullptr);
  alarm(limit != nullptr ? atoi(limit) : 90);
}

inline void SleepMs(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Pattern(seed, i) of kernels.cu.
inline unsigned Pattern(unsigned seed, unsigned i) {
  return (i + seed) * 2654435761u ^ seed;
}

inline void FillHost(void* target, size_t count, unsigned seed) {
  unsigned* words = static_cast<unsigned*>(target);
  for (size_t i = 0; i < count; ++i) words[i] = Pattern(seed, static_cast<unsigned>(i));
}

inline size_t CountWrongOnHost(const void* source, size_t count, unsigned seed) {
  const unsigned* words = static_cast<const unsigned*>(source);
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong += words[i] != Pattern(seed, static_cast<unsigned>(i));
  return wrong;
}

// Kernels of one context.
struct Kernels {
  CUmodule module = nullptr;
  CUfunction hold, hold_then_copy, meet, fill, count_wrong, add, increment, nothing, write, delay;

  // Into the current context.
  void Load() {
    CHECK(cuModuleLoadData(&module, kernels_ptx));
    const struct {
      CUfunction* function;
      const char* name;
    } names[] = {{&hold, "Hold"},
                 {&hold_then_copy, "HoldThenCopy"},
                 {&meet, "Meet"},
                 {&fill, "Fill"},
                 {&count_wrong, "CountWrong"},
                 {&add, "Add"},
                 {&increment, "Increment"},
                 {&nothing, "Nothing"},
                 {&write, "Write"},
                 {&delay, "Delay"}};
    for (const auto& [function, name] : names) {
      CHECK(cuModuleGetFunction(function, module, name));
    }
  }
};

inline CUresult Launch(CUfunction function, unsigned grid, unsigned block, CUstream stream,
                       std::initializer_list<const void*> parameters) {
  void* pointers[8];
  size_t count = 0;
  for (const void* parameter : parameters) pointers[count++] = const_cast<void*>(parameter);
  return cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, pointers, nullptr);
}

inline unsigned BlocksFor(size_t count) {
  return static_cast<unsigned>((count + kBlock - 1) / kBlock);
}

// The first device with a context that is current here, and the kernels in it.
struct Gpu {
  CUdevice device = 0;
  CUcontext context = nullptr;
  Kernels kernels;

  Gpu() {
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate(&context, nullptr, 0, device));
    kernels.Load();
  }
  void MakeCurrent() const { CHECK(cuCtxSetCurrent(context)); }
};

// The door at which kernels wait. Opened through a stream of its own that waits for nobody.
class Door {
 public:
  Door() {
    CHECK(cuMemAlloc(&words_, 2 * sizeof(int)));
    CHECK(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    Close();
  }
  CUdeviceptr words() const { return words_; }
  void Close() {
    CHECK(cuMemsetD32Async(words_, 0, 2, stream_));
    CHECK(cuStreamSynchronize(stream_));
  }
  void Open() { CHECK(cuMemsetD32Async(words_, 1, 1, stream_)); }
  // Puts a kernel on the stream that ends when the door opens.
  void HoldStream(const Kernels& kernels, CUstream stream) {
    const long long limit = kKernelLimit;
    CHECK(Launch(kernels.hold, 1, 1, stream, {&words_, &limit}));
  }
  // Fails if a kernel gave up. Afterwards the memory is free for other use.
  void CheckPatience() {
    int gave_up = 0;
    CHECK(cuMemcpyDtoHAsync(&gave_up, words_ + sizeof(int), sizeof(int), stream_));
    CHECK(cuStreamSynchronize(stream_));
    EXPECT(gave_up == 0, "A kernel waits at its door for longer than its limit.");
  }

 private:
  CUdeviceptr words_ = 0;
  CUstream stream_ = nullptr;
};
