// What counts against a slot's memory, and when it is given back.
#include <catch2/catch.hpp>
#include <cstdlib>

#include "tests/server/raw_client.h"
#include "transport/inproc/inproc.h"

namespace penstock::server {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr int kSilenceMs = 150;  // long enough to believe that no reply comes

// One test needs a second device; the simulated GPU looks when it is started.
const int kTwoDevices = setenv("SIMGPU_DEVICES", "2", 1);

WorkerOptions Slot(uint64_t bytes) {
  WorkerOptions options;
  options.device_count = 2;
  options.memory_limit = bytes;
  return options;
}

uint64_t FreeBytes(RawClient& client) {
  const Reply reply = client.Call(commands::CuMemGetInfo{});
  REQUIRE(reply.came);
  return reply.As<commands::CuMemGetInfoReply>().free;
}

uint64_t SendAllocAsync(RawClient& client, uint64_t bytes, Handle stream) {
  commands::CuMemAllocAsync command{};
  command.bytesize = bytes;
  command.hStream = stream.bits;
  return client.Send(commands::CuMemAllocAsync::kFunction, command, true);
}

uint64_t AllocateAsync(RawClient& client, uint64_t bytes, Handle stream) {
  const Reply reply = client.WaitFor(SendAllocAsync(client, bytes, stream));
  REQUIRE(reply.came);
  REQUIRE(reply.result == CUDA_SUCCESS);
  return reply.As<commands::CuMemAllocAsyncReply>().dptr;
}

void FreeAsync(RawClient& client, uint64_t address, Handle stream) {
  commands::CuMemFreeAsync command{};
  command.dptr = address;
  command.hStream = stream.bits;
  client.Post(command);
}

CUresult Allocate(RawClient& client, uint64_t bytes) {
  return static_cast<CUresult>(client.Call(commands::CuMemAlloc{bytes}).result);
}

// A word of zeros; it costs the slot its 512 bytes.
uint64_t Flag(RawClient& client) {
  const uint64_t word = client.Allocate(4);
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = word;
  fill.N = 4;
  client.Post(fill);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  return word;
}

Reply CreateContext(RawClient& client, Handle handle) {
  commands::CuCtxCreate command{};
  command.pctx = handle.bits;
  return client.Call(command);
}

}  // namespace

TEST_CASE("memory counts in the pieces in which the driver takes it", "[server][quota]") {
  CHECK(Quota::CountOf(1, false) == 512);
  CHECK(Quota::CountOf(512, false) == 512);
  CHECK(Quota::CountOf(kMiB - 1, false) == kMiB);
  CHECK(Quota::CountOf(kMiB, false) == 2 * kMiB);
  CHECK(Quota::CountOf(2 * kMiB, false) == 2 * kMiB);
  CHECK(Quota::CountOf(2 * kMiB + 1, false) == 4 * kMiB);
  CHECK(Quota::CountOf(2 * kMiB + 1, true) == 2 * kMiB + 512);
  CHECK(Quota::CountOf(UINT64_MAX, false) == UINT64_MAX);
  RawClient client(Slot(8 * kMiB));
  CHECK(Allocate(client, 3 * kMiB) == CUDA_SUCCESS);
  CHECK(FreeBytes(client) == 4 * kMiB);
  CHECK(Allocate(client, 4 * kMiB + 1) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(Allocate(client, 4 * kMiB) == CUDA_SUCCESS);
  CHECK(Allocate(client, 1) == CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_CASE("memory freed in stream order is back when its stream gets there, whatever others do",
          "[server][quota]") {
  RawClient client(Slot(64 * kMiB));
  const uint64_t flag = Flag(client);
  const Handle held = client.NewStream(), stream = client.NewStream();
  client.LaunchHold(held, flag);
  FreeAsync(client, AllocateAsync(client, 40 * kMiB, stream), stream);
  CHECK(Allocate(client, 40 * kMiB) == CUDA_SUCCESS);
  client.Release(flag);
}

TEST_CASE("memory freed behind a running kernel delays no question, and counts until then",
          "[server][quota]") {
  RawClient client(Slot(64 * kMiB));
  const uint64_t flag = Flag(client);
  const Handle stream = client.NewStream();
  const uint64_t memory = AllocateAsync(client, 40 * kMiB, stream);
  client.LaunchHold(stream, flag);
  FreeAsync(client, memory, stream);
  CHECK(FreeBytes(client) == 24 * kMiB - 512);
  const uint64_t waiting =
      client.Send(commands::CuMemAlloc::kFunction, commands::CuMemAlloc{30 * kMiB}, true);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  client.Release(flag);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
  CHECK(FreeBytes(client) == 34 * kMiB - 512);
}

TEST_CASE("what a stream frees is there for what it allocates behind that", "[server][quota]") {
  RawClient client(Slot(64 * kMiB));
  const uint64_t flag = Flag(client);
  const Handle stream = client.NewStream();
  const uint64_t memory = AllocateAsync(client, 40 * kMiB, stream);
  client.LaunchHold(stream, flag);
  FreeAsync(client, memory, stream);
  const uint64_t first = AllocateAsync(client, 30 * kMiB, stream);
  FreeAsync(client, first, stream);
  AllocateAsync(client, 30 * kMiB, stream);
  // 10 MiB of the first piece are left, and 24 MiB of the slot: no piece is large enough.
  const uint64_t waiting = SendAllocAsync(client, 32 * kMiB, stream);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  client.Release(flag);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
  CHECK(FreeBytes(client) == 2 * kMiB - 512);
}

TEST_CASE("pool memory counts on the device of its pool", "[server][quota]") {
  RawClient client(Slot(64 * kMiB));
  FreeBytes(client);
  commands::CuMemAllocFromPoolAsync command{};
  command.bytesize = 40 * kMiB;
  command.pool = Handle::Make(HandleKind::kMemoryPool, 0, 1).bits;
  client.set_context(PrimaryContext(1));
  const Handle stream = client.NewStream();
  command.hStream = stream.bits;
  client.set_context(PrimaryContext(0));
  Reply reply = client.Call(command);
  CHECK(reply.result == CUDA_SUCCESS);
  CHECK(FreeBytes(client) == 64 * kMiB);
  commands::CuMemAllocAsync of_stream{};
  of_stream.bytesize = 10 * kMiB;
  of_stream.hStream = stream.bits;
  CHECK(client.Call(of_stream).result == CUDA_SUCCESS);
  CHECK(FreeBytes(client) == 64 * kMiB);
  client.set_context(PrimaryContext(1));
  CHECK(FreeBytes(client) == 14 * kMiB);
}

TEST_CASE("a slot holds one context; every further one counts until it is gone",
          "[server][quota]") {
  WorkerOptions options = Slot(64 * kMiB);
  options.context_bytes.fill(40 * kMiB);
  RawClient client(options);
  CHECK(FreeBytes(client) == 64 * kMiB);
  const Handle second = client.Mint(HandleKind::kContext);
  CHECK(CreateContext(client, second).result == CUDA_SUCCESS);
  CHECK(FreeBytes(client) == 24 * kMiB);
  CHECK(CreateContext(client, client.Mint(HandleKind::kContext)).result ==
        CUDA_ERROR_OUT_OF_MEMORY);
  client.set_context(second);
  client.Allocate(20 * kMiB);
  client.set_context(PrimaryContext(0));
  CHECK(FreeBytes(client) == 4 * kMiB);
  commands::CuCtxDestroy destroy{};
  destroy.ctx = second.bits;
  CHECK(client.Call(destroy).result == CUDA_SUCCESS);
  CHECK(FreeBytes(client) == 64 * kMiB);
}

// What the driver has not destroyed yet is not to be had by another.
TEST_CASE("the memory of a context is back when the driver has destroyed it", "[server][quota]") {
  static uint64_t left_meanwhile;
  static RawClient* asked;
  Driver driver = RawClient::Sim();
  driver.cuCtxDestroy_v2 = [](CUcontext context) {
    left_meanwhile = asked->worker().quota()->left(0);
    return RawClient::Sim().cuCtxDestroy_v2(context);
  };
  auto [mine, theirs] = transport::inproc::MakePair();
  RawClient client(Slot(64 * kMiB), driver, std::move(mine), std::move(theirs));
  asked = &client;
  const Handle second = client.Mint(HandleKind::kContext);
  CHECK(CreateContext(client, second).result == CUDA_SUCCESS);
  client.set_context(second);
  client.Allocate(20 * kMiB);
  client.set_context(PrimaryContext(0));
  commands::CuCtxDestroy destroy{};
  destroy.ctx = second.bits;
  CHECK(client.Call(destroy).result == CUDA_SUCCESS);
  CHECK(left_meanwhile == 44 * kMiB);
  CHECK(FreeBytes(client) == 64 * kMiB);
}

}  // namespace penstock::server
