// Functions of the program in streams, launched with cuLaunchHostFunc and cuStreamAddCallback: each
// runs when the stream gets there, and what follows waits until it has returned.
#include "tests/e2e/programs/program.h"

namespace {

constexpr size_t kWords = 1 << 20;  // 4 MB: too much to travel inside a call
constexpr size_t kBytes = kWords * sizeof(unsigned);

void Wait(const std::atomic<bool>& flag) {
  while (!flag) SleepMs(1);
}

// A callback's arguments, and what it did.
struct Seen {
  std::atomic<bool> called = false;
  CUstream stream = nullptr;
  CUresult status = CUDA_ERROR_UNKNOWN;
};
void CUDA_CB Note(CUstream stream, CUresult status, void* user) {
  auto* seen = static_cast<Seen*>(user);
  seen->stream = stream;
  seen->status = status;
  seen->called = true;
}

// --- The device writes, the host reads and writes, the device reads: no synchronisation between.

struct Relay {
  unsigned* words;
  unsigned seed;
  size_t wrong = ~size_t{0};
};

void Data(Gpu& gpu, CUstream stream) {
  CUdeviceptr device;
  CUdeviceptr counter;
  unsigned* words;
  CHECK(cuMemAlloc(&device, kBytes));
  CHECK(cuMemAlloc(&counter, sizeof(unsigned)));
  CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&words), kBytes, 0));
  constexpr unsigned kRounds = 6;
  Relay relays[kRounds];
  unsigned counts[kRounds];
  CHECK(cuMemsetD32(counter, 0, 1));
  CHECK(cuCtxSynchronize());
  memset(words, 0, kBytes);
  const unsigned count = kWords;
  for (unsigned round = 0; round < kRounds; ++round) {
    const unsigned theirs = 10 + round, ours = 100 + round;
    relays[round] = {words, theirs};
    CHECK(Launch(gpu.kernels.fill, BlocksFor(kWords), kBlock, stream, {&device, &count, &theirs}));
    CHECK(cuMemcpyDtoHAsync(words, device, kBytes, stream));
    CHECK(cuLaunchHostFunc(
        stream,
        [](void* user) {
          auto* relay = static_cast<Relay*>(user);
          relay->wrong = CountWrongOnHost(relay->words, kWords, relay->seed);
          SleepMs(5);  // long enough to be overtaken
          FillHost(relay->words, kWords, relay->seed + 90);
        },
        &relays[round]));
    CHECK(cuMemcpyHtoDAsync(device, words, kBytes, stream));
    CHECK(Launch(gpu.kernels.count_wrong, BlocksFor(kWords), kBlock, stream,
                 {&device, &count, &ours, &counter}));
  }
  CHECK(cuStreamSynchronize(stream));
  unsigned on_device = 0;
  CHECK(cuMemcpyDtoH(&on_device, counter, sizeof on_device));
  for (unsigned round = 0; round < kRounds; ++round) {
    EXPECT(relays[round].wrong == 0, "In round %u the function sees %zu wrong words.", round,
           relays[round].wrong);
    counts[round] = relays[round].seed;
  }
  EXPECT(on_device == 0, "The device sees %u wrong words.", on_device);
  EXPECT(counts[kRounds - 1] == 10 + kRounds - 1, "The functions have mixed up their data.");
  CHECK(cuMemFreeHost(words));
  CHECK(cuMemFree(device));
  CHECK(cuMemFree(counter));
  printf("data passes through %u functions\n", kRounds);
}

// --- A function that does not return holds its stream, its events and whoever waits for those; it
// holds nothing else.

struct Blocker {
  std::atomic<bool> entered = false, leave = false;
  CUresult inside = CUDA_SUCCESS, inside_stream = CUDA_SUCCESS;
  CUstream stream = nullptr;
};

void CUDA_CB Block(void* user) {
  auto* blocker = static_cast<Blocker*>(user);
  size_t free_bytes, total_bytes;
  blocker->inside = cuMemGetInfo(&free_bytes, &total_bytes);
  blocker->inside_stream = cuStreamSynchronize(blocker->stream);
  blocker->entered = true;
  Wait(blocker->leave);
}

void Holding(Gpu& gpu, CUstream stream) {
  CUstream other, follower;
  CUevent before, after, follows;
  CUdeviceptr words;
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  CHECK(cuStreamCreate(&follower, CU_STREAM_NON_BLOCKING));
  for (CUevent* event : {&before, &after, &follows}) CHECK(cuEventCreate(event, 0));
  CHECK(cuMemAlloc(&words, 2 * sizeof(unsigned)));
  CHECK(cuMemsetD32(words, 0, 2));
  CHECK(cuCtxSynchronize());
  Blocker blocker;
  blocker.stream = stream;
  CHECK(Launch(gpu.kernels.increment, 1, 1, stream, {&words}));
  CHECK(cuEventRecord(before, stream));
  CHECK(cuLaunchHostFunc(stream, Block, &blocker));
  CHECK(cuEventRecord(after, stream));
  CHECK(Launch(gpu.kernels.increment, 1, 1, stream, {&words}));
  CHECK(cuStreamWaitEvent(follower, after, 0));
  CHECK(cuEventRecord(follows, follower));
  Wait(blocker.entered);
  CHECK(cuEventSynchronize(before));
  const CUdeviceptr second = words + sizeof(unsigned);
  for (int i = 0; i < 50; ++i) {
    CHECK(Launch(gpu.kernels.increment, 1, 1, other, {&second}));
    CHECK(cuStreamSynchronize(other));
    EXPECT_CODE(CUDA_ERROR_NOT_READY, cuEventQuery(after));
    EXPECT_CODE(CUDA_ERROR_NOT_READY, cuEventQuery(follows));
    EXPECT_CODE(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
  }
  unsigned values[2];
  CHECK(cuMemcpyDtoHAsync(values, words, sizeof values, other));
  CHECK(cuStreamSynchronize(other));
  EXPECT(values[0] == 1, "Work behind the function has run (%u).", values[0]);
  EXPECT(values[1] == 50, "Another stream has done %u rounds of 50.", values[1]);
  blocker.leave = true;
  CHECK(cuEventSynchronize(follows));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuMemcpyDtoH(values, words, sizeof values));
  EXPECT(values[0] == 2, "Work behind the function has not run (%u).", values[0]);
  EXPECT(blocker.inside == CUDA_ERROR_NOT_PERMITTED, "cuMemGetInfo in a function gives %s.",
         ErrorName(blocker.inside));
  EXPECT(blocker.inside_stream == CUDA_ERROR_NOT_PERMITTED,
         "cuStreamSynchronize in a function gives %s.", ErrorName(blocker.inside_stream));
  for (CUevent event : {before, after, follows}) CHECK(cuEventDestroy(event));
  CHECK(cuStreamDestroy(other));
  CHECK(cuStreamDestroy(follower));
  CHECK(cuMemFree(words));
  printf("a function holds its stream and no other\n");
}

// --- Many of them, more than a stream's queue holds: every one once, in order.

struct Chain {
  unsigned next = 0;
  unsigned wrong = 0;
};
struct Link {
  Chain* chain;
  unsigned number;
};

void Order(Gpu& gpu, CUstream stream) {
  constexpr unsigned kLinks = 3000;
  Chain chain;
  std::vector<Link> links(kLinks);
  const auto step = [](void* user) {
    auto* link = static_cast<Link*>(user);
    if (link->chain->next++ != link->number) ++link->chain->wrong;
  };
  for (unsigned i = 0; i < kLinks; ++i) {
    links[i] = {&chain, i};
    if (i % 3 == 0) CHECK(Launch(gpu.kernels.nothing, 1, 1, stream, {}));
    if (i % 2 == 0) {
      CHECK(cuLaunchHostFunc(stream, step, &links[i]));
    } else {
      CHECK(cuStreamAddCallback(
          stream,
          [](CUstream, CUresult, void* user) {
            auto* link = static_cast<Link*>(user);
            if (link->chain->next++ != link->number) ++link->chain->wrong;
          },
          &links[i], 0));
    }
  }
  CHECK(cuStreamSynchronize(stream));
  EXPECT(chain.next == kLinks && chain.wrong == 0, "Of %u functions %u ran, %u out of order.",
         kLinks, chain.next, chain.wrong);
  printf("%u functions ran in order\n", kLinks);
}

// --- Every way to name a stream; the callback gets the name that the program used.

void Names(CUstream stream) {
  for (CUstream name :
       {stream, static_cast<CUstream>(nullptr), CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
    Seen seen;
    CHECK(cuStreamAddCallback(name, Note, &seen, 0));
    CHECK(cuCtxSynchronize());
    EXPECT(seen.called, "A callback has not run when the context is synchronised.");
    EXPECT(seen.stream == name, "A callback gets another stream.");
    EXPECT(seen.status == CUDA_SUCCESS, "A callback gets %s.", ErrorName(seen.status));
  }
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuLaunchHostFunc(stream, nullptr, nullptr));
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuStreamAddCallback(stream, nullptr, nullptr, 0));
  Seen never;
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuStreamAddCallback(stream, Note, &never, 1));
  const auto garbage = reinterpret_cast<CUstream>(0x123456780);
  EXPECT_CODE(CUDA_ERROR_INVALID_HANDLE, cuStreamAddCallback(garbage, Note, &never, 0));
  CHECK(cuCtxSynchronize());
  EXPECT(!never.called, "A refused callback runs.");
  printf("callbacks get their stream's name\n");
}

// --- The legacy stream waits for a function in a blocking stream, and is waited for.

void Legacy(Gpu& gpu, CUstream blocking) {
  CUdeviceptr word;
  CHECK(cuMemAlloc(&word, sizeof(unsigned)));
  CHECK(cuMemsetD32(word, 0, 1));
  struct Order {
    std::atomic<int> step = 0;
    int first = 0, second = 0;
  } order;
  CHECK(cuLaunchHostFunc(
      blocking,
      [](void* user) {
        SleepMs(20);
        static_cast<Order*>(user)->first = ++static_cast<Order*>(user)->step;
      },
      &order));
  CHECK(Launch(gpu.kernels.increment, 1, 1, nullptr, {&word}));
  CHECK(cuLaunchHostFunc(
      nullptr,
      [](void* user) { static_cast<Order*>(user)->second = ++static_cast<Order*>(user)->step; },
      &order));
  unsigned value = 0;
  CHECK(cuMemcpyDtoH(&value, word, sizeof value));  // synchronises with all of them
  EXPECT(order.first == 1 && order.second == 2 && value == 1,
         "The functions run as number %d and %d, and the kernel's value is %u.", order.first,
         order.second, value);
  CHECK(cuMemFree(word));
  printf("the legacy stream waits for functions\n");
}

// --- What is enqueued runs, though its stream or its context is destroyed.

void Leaving(Gpu& gpu) {
  Door door;
  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  door.HoldStream(gpu.kernels, stream);
  Seen seen;
  CHECK(cuStreamAddCallback(stream, Note, &seen, 0));
  CHECK(cuStreamDestroy(stream));
  EXPECT(!seen.called, "A callback runs before its turn.");
  door.Open();
  Wait(seen.called);
  EXPECT(seen.stream == stream && seen.status == CUDA_SUCCESS, "The callback gets %s.",
         ErrorName(seen.status));
  door.CheckPatience();

  CUcontext context;
  CHECK(cuCtxCreate(&context, nullptr, 0, gpu.device));
  std::atomic<int> runs = 0;
  for (int i = 0; i < 3; ++i) {
    CHECK(cuLaunchHostFunc(
        nullptr,
        [](void* user) {
          SleepMs(5);
          ++*static_cast<std::atomic<int>*>(user);
        },
        &runs));
  }
  CHECK(cuCtxDestroy(context));
  EXPECT(runs == 3, "%d of 3 functions ran before their context was destroyed.", runs.load());
  printf("functions outlive their stream\n");
}

// --- In a context that has failed, callbacks are called with the error; host functions are not.

void Failing(Gpu& gpu) {
  CUcontext context;
  CHECK(cuCtxCreate(&context, nullptr, 0, gpu.device));
  {
    Kernels kernels;
    kernels.Load();
    Door door;
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    Seen before, after[3];
    std::atomic<bool> ran = false;
    CHECK(cuStreamAddCallback(stream, Note, &before, 0));
    door.HoldStream(kernels, stream);
    const CUdeviceptr nowhere = 0x10;
    const int value = 1;
    CHECK(Launch(kernels.write, 1, 1, stream, {&nowhere, &value}));
    CHECK(cuStreamAddCallback(stream, Note, &after[0], 0));
    CHECK(cuLaunchHostFunc(
        stream, [](void* user) { *static_cast<std::atomic<bool>*>(user) = true; }, &ran));
    CHECK(cuStreamAddCallback(stream, Note, &after[1], 0));
    CHECK(cuStreamAddCallback(stream, Note, &after[2], 0));
    Wait(before.called);
    EXPECT(before.status == CUDA_SUCCESS, "Before the fault a callback gets %s.",
           ErrorName(before.status));
    EXPECT(!after[0].called, "A callback runs before its turn.");
    door.Open();
    for (Seen& seen : after) {
      Wait(seen.called);
      EXPECT(seen.status == CUDA_ERROR_ILLEGAL_ADDRESS, "After the fault a callback gets %s.",
             ErrorName(seen.status));
      EXPECT(seen.stream == stream, "A callback gets another stream.");
    }
    EXPECT(!ran, "A host function runs after the fault.");
    EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
    EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamAddCallback(stream, Note, &before, 0));
    EXPECT_CODE(CUDA_ERROR_ILLEGAL_ADDRESS, cuLaunchHostFunc(
                                                stream, [](void*) {}, nullptr));
  }
  static_cast<void>(cuCtxDestroy(context));
  gpu.MakeCurrent();
  printf("callbacks are told of a fault\n");
}

}  // namespace

int main() {
  StartWatchdog();
  Gpu gpu;
  CUstream blocking, other;
  CHECK(cuStreamCreate(&blocking, 0));
  CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  for (CUstream stream : {blocking, other}) {
    Data(gpu, stream);
    Holding(gpu, stream);
    Order(gpu, stream);
  }
  Names(blocking);
  Legacy(gpu, blocking);
  Leaving(gpu);
  Failing(gpu);
  Data(gpu, blocking);
  printf("host_functions: all is right, ok\n");
}
