// Functions of the program in its streams, as the worker sees them: numbers that it sends when the
// stream is there, and whose return it awaits.
#include <catch2/catch.hpp>

#include "tests/server/raw_client.h"

namespace penstock::server {
namespace {

constexpr uint32_t kFunction = static_cast<uint32_t>(Operation::kHostFunction);
constexpr uint32_t kDone = static_cast<uint32_t>(Operation::kHostFunctionDone);
constexpr int kSilenceMs = 150;  // long enough to believe that nothing comes
constexpr std::string_view kFaultPtx = R"(
.version 7.5
.target sm_75
.address_size 64
.visible .entry fault(.param .u64 where) {
  .reg .u64 %rd<2>;
  ld.param.u64 %rd1, [where];
  st.global.u32 [%rd1], 1;
  ret;
}
)";

uint64_t ZeroedWord(RawClient& client) {
  const uint64_t word = client.Allocate(4);
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = word;
  fill.N = 4;
  client.Post(fill);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  return word;
}

void Enqueue(RawClient& client, Handle stream, uint64_t id) {
  client.Send(kFunction, HostFunctionCommand{stream.bits, id}, false, 0, kHostFunctionCost);
}

void Return(RawClient& client, uint64_t id) {
  client.Send(kDone, HostFunctionDoneCommand{id}, false);
}

}  // namespace

TEST_CASE("a host function has its turn when its stream is there, and the stream waits for it",
          "[server][host_function]") {
  RawClient client;
  const uint64_t flag = ZeroedWord(client);
  const Handle stream = client.NewStream(), other = client.NewStream();
  client.LaunchHold(stream, flag);
  Enqueue(client, stream, 1);
  Enqueue(client, stream, 2);
  CHECK_FALSE(client.WaitForTurn(1, kSilenceMs).came);
  client.Release(flag);
  CHECK(client.WaitForTurn(1).result == CUDA_SUCCESS);
  CHECK_FALSE(client.WaitForTurn(2, kSilenceMs).came);
  const uint64_t waiting = client.Synchronize(stream);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  CHECK(client.WaitFor(client.Synchronize(other)).result == CUDA_SUCCESS);
  Return(client, 1);
  CHECK(client.WaitForTurn(2).result == CUDA_SUCCESS);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  Return(client, 2);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
}

TEST_CASE("a stream that is destroyed still gives its functions their turn",
          "[server][host_function]") {
  RawClient client;
  const uint64_t flag = ZeroedWord(client);
  const Handle stream = client.NewStream();
  client.LaunchHold(stream, flag);
  Enqueue(client, stream, 1);
  Enqueue(client, stream, 2);
  commands::CuStreamDestroy destroy{};
  destroy.hStream = stream.bits;
  client.Post(destroy);
  const uint64_t waiting =
      client.Send(commands::CuCtxSynchronize_v2::kFunction, commands::CuCtxSynchronize_v2{}, true);
  client.Release(flag);
  CHECK(client.WaitForTurn(1).result == CUDA_SUCCESS);
  Return(client, 1);
  CHECK(client.WaitForTurn(2).result == CUDA_SUCCESS);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  Return(client, 2);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
}

TEST_CASE("functions of a failed context come with its error, in order",
          "[server][host_function]") {
  RawClient client;
  const Handle stream = client.NewStream();
  const Handle fault = client.GetFunction(client.LoadModule(kFaultPtx), "fault");
  const uint64_t flag = ZeroedWord(client);
  const uint64_t nowhere = 64;
  Enqueue(client, stream, 1);
  client.LaunchHold(stream, flag);
  client.Launch(fault, stream, std::span(&nowhere, 1));
  Enqueue(client, stream, 2);
  Enqueue(client, stream, 3);
  CHECK(client.WaitForTurn(1).result == CUDA_SUCCESS);
  Return(client, 1);
  client.Release(flag);
  CHECK(client.WaitForTurn(3).result == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(client.WaitForTurn(2).result == CUDA_ERROR_ILLEGAL_ADDRESS);
  // One that comes later is refused, and nothing is left behind.
  Enqueue(client, stream, 4);
  CHECK(client.WaitForTurn(4).result == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(client.turns() == std::vector<uint64_t>{1, 2, 3, 4});
}

TEST_CASE("functions of a context that is reset are told so", "[server][host_function]") {
  RawClient client;
  const uint64_t flag = ZeroedWord(client);
  const Handle stream = client.NewStream();
  Enqueue(client, stream, 1);
  Enqueue(client, stream, 2);
  CHECK(client.WaitForTurn(1).result == CUDA_SUCCESS);
  const uint64_t reset = client.Send(commands::CuDevicePrimaryCtxReset::kFunction,
                                     commands::CuDevicePrimaryCtxReset{}, true);
  CHECK(client.WaitForTurn(2).result == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(client.WaitFor(reset).result == CUDA_SUCCESS);
  // The first one returns late: that is nobody's fault.
  Return(client, 1);
  Enqueue(client, kLegacyStream, 3);
  CHECK(client.WaitForTurn(3).result == CUDA_SUCCESS);
  static_cast<void>(flag);
}

TEST_CASE("a function for a stream that is gone is refused", "[server][host_function]") {
  RawClient client;
  const Handle stream = client.NewStream();
  commands::CuStreamDestroy destroy{};
  destroy.hStream = stream.bits;
  client.Post(destroy);
  Enqueue(client, stream, 1);
  CHECK(client.WaitForTurn(1).result == CUDA_ERROR_INVALID_HANDLE);
  // Who waits for the answer has it, and does not hear it twice.
  const uint64_t asked = client.Send(kFunction, HostFunctionCommand{stream.bits, 2}, true);
  CHECK(client.WaitFor(asked).result == CUDA_ERROR_INVALID_HANDLE);
  CHECK_FALSE(client.WaitForTurn(2, kSilenceMs).came);
}

TEST_CASE("what no honest client says of host functions ends its session",
          "[server][host_function]") {
  enum Kind { kNoNumber, kTwice, kEarly, kNever, kShort, kNeverMadeStream };
  const Kind kind = GENERATE(kNoNumber, kTwice, kEarly, kNever, kShort, kNeverMadeStream);
  CAPTURE(kind);
  RawClient client;
  const uint64_t flag = ZeroedWord(client);
  const Handle stream = client.NewStream();
  client.LaunchHold(stream, flag);
  Enqueue(client, stream, 5);
  switch (kind) {
    case kNoNumber:
      Enqueue(client, stream, 0);
      break;
    case kTwice:
      Enqueue(client, stream, 5);
      break;
    case kEarly:
      Return(client, 5);
      break;
    case kNever:
      Return(client, 6);
      break;
    case kShort:
      client.Send(kFunction, uint64_t{stream.bits}, false);
      break;
    case kNeverMadeStream:
      Enqueue(client, Handle::Make(HandleKind::kStream, 1, 4711), 6);
      break;
  }
  CHECK(client.WaitForGoodbye());
  client.Release(flag);
}

}  // namespace penstock::server
