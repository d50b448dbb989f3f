#include <atomic>
#include <chrono>
#include <thread>

#include "tests/simgpu/driver_fixture.h"

using namespace simgpu_test;

namespace {

// A stream that is held by a word of host memory until Open.
class HeldStream {
 public:
  explicit HeldStream(unsigned flags) {
    REQUIRE_CUDA(cuStreamCreate(&stream, flags));
    Hold();
  }
  ~HeldStream() {
    Open();
    CHECK_CUDA(cuStreamSynchronize(stream));
    CHECK_CUDA(cuStreamDestroy(stream));
  }
  void Hold() {
    ++value_;
    REQUIRE_CUDA(cuStreamWaitValue32(stream, gate_.device(), value_, CU_STREAM_WAIT_VALUE_GEQ));
  }
  void Open() { gate_.Write(value_); }
  CUstream stream = nullptr;

 private:
  PinnedWord gate_;
  uint32_t value_ = 0;
};

}  // namespace

TEST_CASE("streams run beside each other and the caller", "[simgpu][stream]") {
  ScopedContext context;
  HeldStream held(CU_STREAM_NON_BLOCKING);
  CHECK(cuStreamQuery(held.stream) == CUDA_ERROR_NOT_READY);
  CUstream free_stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&free_stream, CU_STREAM_NON_BLOCKING));
  PinnedWord word;
  CHECK_CUDA(cuStreamWriteValue32(free_stream, word.device(), 5, 0));
  CHECK_CUDA(cuStreamSynchronize(free_stream));
  CHECK(word.Read() == 5);
  CHECK(cuStreamQuery(held.stream) == CUDA_ERROR_NOT_READY);
  held.Open();
  CHECK_CUDA(cuStreamSynchronize(held.stream));
  CHECK_CUDA(cuStreamQuery(held.stream));
  CHECK_CUDA(cuStreamDestroy(free_stream));
}

TEST_CASE("the legacy stream waits for blocking streams and they for it", "[simgpu][stream]") {
  ScopedContext context;
  PinnedWord word;
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 4));
  HeldStream blocking(CU_STREAM_DEFAULT);
  CHECK_CUDA(cuStreamWriteValue32(CU_STREAM_LEGACY, word.device(), 1, 0));
  CHECK(cuStreamQuery(CU_STREAM_LEGACY) == CUDA_ERROR_NOT_READY);
  CHECK(word.Read() == 0);
  // A second blocking stream queues behind the legacy stream's work.
  CUstream later = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&later, CU_STREAM_DEFAULT));
  CHECK_CUDA(cuMemcpyDtoDAsync(memory, word.device(), 4, later));
  CHECK(cuStreamQuery(later) == CUDA_ERROR_NOT_READY);
  blocking.Open();
  CHECK_CUDA(cuStreamSynchronize(later));
  CHECK(word.Read() == 1);
  uint32_t copied = 0;
  CHECK_CUDA(cuMemcpyDtoH(&copied, memory, 4));
  CHECK(copied == 1);
  CHECK_CUDA(cuStreamDestroy(later));
}

TEST_CASE("the legacy stream does not wait for non-blocking streams", "[simgpu][stream]") {
  ScopedContext context;
  PinnedWord word;
  HeldStream held(CU_STREAM_NON_BLOCKING);
  CHECK_CUDA(cuStreamWriteValue32(CU_STREAM_LEGACY, word.device(), 1, 0));
  CHECK_CUDA(cuStreamSynchronize(CU_STREAM_LEGACY));
  CHECK(word.Read() == 1);
  CHECK(cuStreamQuery(held.stream) == CUDA_ERROR_NOT_READY);
}

TEST_CASE("each thread has its own per-thread stream", "[simgpu][stream]") {
  ScopedContext context;
  unsigned long long mine = 0;
  unsigned long long other = 0;
  unsigned long long legacy = 0;
  CHECK_CUDA(cuStreamGetId(CU_STREAM_PER_THREAD, &mine));
  CHECK_CUDA(cuStreamGetId(CU_STREAM_LEGACY, &legacy));
  std::thread([&] {
    cuCtxSetCurrent(context.get());
    cuStreamGetId(CU_STREAM_PER_THREAD, &other);
  }).join();
  CHECK(mine != 0);
  CHECK(other != 0);
  CHECK(mine != other);
  CHECK(mine != legacy);
}

TEST_CASE("an event holds another stream back until it is reached", "[simgpu][stream][event]") {
  ScopedContext context;
  HeldStream first(CU_STREAM_NON_BLOCKING);
  CUstream second = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
  CUevent event = nullptr;
  REQUIRE_CUDA(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CHECK_CUDA(cuEventQuery(event));  // never recorded: complete
  PinnedWord word;
  CHECK_CUDA(cuStreamWriteValue32(first.stream, word.device(), 1, 0));
  CHECK_CUDA(cuEventRecord(event, first.stream));
  CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
  CHECK_CUDA(cuStreamWaitEvent(second, event, 0));
  CHECK_CUDA(cuStreamWaitValue32(second, word.device(), 1, CU_STREAM_WAIT_VALUE_EQ));
  CHECK_CUDA(cuStreamWriteValue32(second, word.device(), 2, 0));
  CHECK(cuStreamQuery(second) == CUDA_ERROR_NOT_READY);
  first.Open();
  CHECK_CUDA(cuEventSynchronize(event));
  CHECK_CUDA(cuStreamSynchronize(second));
  CHECK(word.Read() == 2);
  CHECK_CUDA(cuEventDestroy(event));
  CHECK_CUDA(cuStreamDestroy(second));
}

TEST_CASE("a wait keeps the recording that it saw", "[simgpu][event]") {
  ScopedContext context;
  CUstream quick = nullptr;
  CUstream waiting = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&quick, CU_STREAM_NON_BLOCKING));
  REQUIRE_CUDA(cuStreamCreate(&waiting, CU_STREAM_NON_BLOCKING));
  CUevent event = nullptr;
  REQUIRE_CUDA(cuEventCreate(&event, 0));
  CHECK_CUDA(cuEventRecord(event, quick));
  CHECK_CUDA(cuStreamWaitEvent(waiting, event, 0));
  HeldStream held(CU_STREAM_NON_BLOCKING);
  CHECK_CUDA(cuEventRecord(event, held.stream));
  CHECK_CUDA(cuStreamSynchronize(waiting));
  CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
  held.Open();
  CHECK_CUDA(cuEventDestroy(event));
  CHECK_CUDA(cuStreamDestroy(quick));
  CHECK_CUDA(cuStreamDestroy(waiting));
}

TEST_CASE("event times are measured on the stream", "[simgpu][event]") {
  ScopedContext context;
  HeldStream stream(0);
  CUevent start = nullptr;
  CUevent end = nullptr;
  CUevent untimed = nullptr;
  REQUIRE_CUDA(cuEventCreate(&start, 0));
  REQUIRE_CUDA(cuEventCreate(&end, CU_EVENT_BLOCKING_SYNC));
  REQUIRE_CUDA(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  float milliseconds = -1;
  CHECK(cuEventElapsedTime(&milliseconds, start, end) == CUDA_ERROR_INVALID_HANDLE);
  CHECK_CUDA(cuEventRecord(start, stream.stream));
  stream.Open();
  CHECK_CUDA(cuEventSynchronize(start));
  stream.Hold();
  CHECK_CUDA(cuEventRecord(end, stream.stream));
  CHECK(cuEventElapsedTime(&milliseconds, start, end) == CUDA_ERROR_NOT_READY);
  const auto before = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - before < std::chrono::milliseconds(3)) {
  }
  stream.Open();
  CHECK_CUDA(cuEventSynchronize(end));
  CHECK_CUDA(cuEventElapsedTime(&milliseconds, start, end));
  CHECK(milliseconds >= 3.0f);
  CHECK(milliseconds < 60'000.0f);
  CHECK_CUDA(cuEventRecord(untimed, stream.stream));
  CHECK_CUDA(cuEventSynchronize(untimed));
  CHECK(cuEventElapsedTime(&milliseconds, start, untimed) == CUDA_ERROR_INVALID_HANDLE);
  for (CUevent event : {start, end, untimed}) CHECK_CUDA(cuEventDestroy(event));
}

TEST_CASE("every condition of a wait on a word is honoured", "[simgpu][memops]") {
  ScopedContext context;
  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  PinnedWord word;
  struct Case {
    unsigned condition;
    uint32_t before, value, after;
  };
  const Case cases[] = {
      {CU_STREAM_WAIT_VALUE_EQ, 6, 7, 7},
      {CU_STREAM_WAIT_VALUE_GEQ, 6, 7, 9},
      {CU_STREAM_WAIT_VALUE_GEQ, 0xfffffff0u, 2, 3},  // cyclic
      {CU_STREAM_WAIT_VALUE_AND, 0x0f, 0x10, 0x30},
      {CU_STREAM_WAIT_VALUE_NOR, 0xffffff00u, 0xff, 0xfffffe00u},
  };
  for (const Case& c : cases) {
    word.Write(c.before);
    CHECK_CUDA(cuStreamWaitValue32(stream, word.device(), c.value, c.condition));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
    std::thread([&] { word.Write(c.after); }).join();
    CHECK_CUDA(cuStreamSynchronize(stream));
  }
  CHECK_CUDA(cuStreamDestroy(stream));
}

TEST_CASE("64-bit words and batches work; bad ones are refused whole", "[simgpu][memops]") {
  ScopedContext context;
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 64));
  CHECK_CUDA(cuMemsetD8(memory, 0, 64));
  CUstreamBatchMemOpParams operations[3] = {};
  operations[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  operations[0].writeValue.address = memory;
  operations[0].writeValue.value64 = 0x1122334455667788ull;
  operations[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  operations[1].waitValue.address = memory;
  operations[1].waitValue.value64 = 0x1122334455667788ull;
  operations[1].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  operations[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operations[2].writeValue.address = memory + 8;
  operations[2].writeValue.value = 42;
  CHECK_CUDA(cuStreamBatchMemOp(nullptr, 3, operations, 0));
  uint64_t words[2] = {};
  CHECK_CUDA(cuMemcpyDtoH(words, memory, 16));
  CHECK(words[0] == 0x1122334455667788ull);
  CHECK(words[1] == 42);

  operations[0].writeValue.value64 = 1;
  operations[2].writeValue.address = memory + 64;
  CHECK(cuStreamBatchMemOp(nullptr, 3, operations, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK_CUDA(cuMemcpyDtoH(words, memory, 16));
  CHECK(words[0] == 0x1122334455667788ull);
  CHECK(cuStreamWriteValue32(nullptr, memory + 2, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamWriteValue64(nullptr, memory + 4, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamWaitValue32(nullptr, memory, 1, 9) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuStreamWaitValue32(nullptr, 4096, 1, 0) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("the launch queue holds 1,024 operations and then blocks the caller",
          "[simgpu][stream]") {
  ScopedContext context;
  PinnedWord word;
  HeldStream held(CU_STREAM_NON_BLOCKING);
  for (int i = 0; i < 1023; ++i) {
    REQUIRE(cuStreamWriteValue32(held.stream, word.device(), 1, 0) == CUDA_SUCCESS);
  }
  std::atomic<bool> returned{false};
  std::thread blocked([&] {
    cuCtxSetCurrent(context.get());
    cuStreamWriteValue32(held.stream, word.device(), 2, 0);
    returned = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK_FALSE(returned);
  held.Open();
  blocked.join();
  CHECK(returned);
  CHECK_CUDA(cuStreamSynchronize(held.stream));
  CHECK(word.Read() == 2);
}

TEST_CASE("freeing waits for the device", "[simgpu][stream]") {
  ScopedContext context;
  HeldStream held(CU_STREAM_NON_BLOCKING);
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 100));
  std::atomic<bool> freed{false};
  std::thread other([&] {
    cuCtxSetCurrent(context.get());
    cuMemFree(memory);
    freed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_FALSE(freed);
  held.Open();
  other.join();
  CHECK(freed);
}

TEST_CASE("host functions run in the stream's order and may not call CUDA", "[simgpu][stream]") {
  ScopedContext context;
  HeldStream held(0);
  struct Seen {
    int order = 0;
    int first = 0;
    int second = 0;
    CUresult inside = CUDA_SUCCESS;
    CUresult status = CUDA_ERROR_UNKNOWN;
  } seen;
  CHECK_CUDA(cuLaunchHostFunc(
      held.stream,
      [](void* user) {
        auto* s = static_cast<Seen*>(user);
        s->first = ++s->order;
        CUdeviceptr memory = 0;
        s->inside = cuMemAlloc(&memory, 1);
      },
      &seen));
  CHECK_CUDA(cuStreamAddCallback(
      held.stream,
      [](CUstream, CUresult status, void* user) {
        auto* s = static_cast<Seen*>(user);
        s->second = ++s->order;
        s->status = status;
      },
      &seen, 0));
  CHECK(seen.order == 0);
  held.Open();
  CHECK_CUDA(cuStreamSynchronize(held.stream));
  CHECK(seen.first == 1);
  CHECK(seen.second == 2);
  CHECK(seen.inside == CUDA_ERROR_NOT_PERMITTED);
  CHECK(seen.status == CUDA_SUCCESS);
}

TEST_CASE("garbage and freed handles are refused", "[simgpu][handles]") {
  ScopedContext context;
  const auto garbage = reinterpret_cast<void*>(0x1234567890);
  CHECK(cuStreamSynchronize(static_cast<CUstream>(garbage)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventQuery(static_cast<CUevent>(garbage)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventRecord(nullptr, nullptr) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuModuleUnload(static_cast<CUmodule>(garbage)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuLibraryUnload(static_cast<CUlibrary>(garbage)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuLaunchKernel(static_cast<CUfunction>(garbage), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr,
                       nullptr) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuCtxSetCurrent(static_cast<CUcontext>(garbage)) == CUDA_ERROR_INVALID_CONTEXT);
  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreate(&stream, 0));
  CHECK_CUDA(cuStreamDestroy(stream));
  CHECK(cuStreamDestroy(stream) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuStreamSynchronize(stream) == CUDA_ERROR_INVALID_HANDLE);
  CUevent event = nullptr;
  REQUIRE_CUDA(cuEventCreate(&event, 0));
  // A handle of one kind is no handle of another.
  CHECK(cuStreamQuery(reinterpret_cast<CUstream>(event)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK_CUDA(cuEventDestroy(event));
  CHECK(cuEventDestroy(event) == CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("priorities are clamped to the range", "[simgpu][stream]") {
  ScopedContext context;
  int least = -1;
  int greatest = 1;
  CHECK_CUDA(cuCtxGetStreamPriorityRange(&least, &greatest));
  CHECK(least == 0);
  CHECK(greatest < 0);
  CUstream stream = nullptr;
  REQUIRE_CUDA(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -1000));
  int priority = 0;
  CHECK_CUDA(cuStreamGetPriority(stream, &priority));
  CHECK(priority == greatest);
  unsigned flags = 0;
  CHECK_CUDA(cuStreamGetFlags(stream, &flags));
  CHECK(flags == CU_STREAM_NON_BLOCKING);
  CHECK_CUDA(cuStreamDestroy(stream));
}
