// What the worker refuses: malformed frames end the session with a reason, mistakes of the program
// get CUDA's error and the session goes on, and no address outside its own memory is ever used.
#include <catch2/catch.hpp>
#include <cstring>

#include "tests/server/raw_client.h"

namespace penstock::server {
namespace {

template <typename Command>
std::vector<std::byte> Frame(FrameHeader header, const Command& command) {
  header.bytes = sizeof header + sizeof command;
  std::vector<std::byte> frame(header.bytes);
  memcpy(frame.data(), &header, sizeof header);
  memcpy(frame.data() + sizeof header, &command, sizeof command);
  return frame;
}

}  // namespace

TEST_CASE("a malformed frame ends the session with its reason", "[server][refusal]") {
  RawClient client;
  const commands::CuMemGetInfo info{};
  FrameHeader header = client.NextHeader(info.kFunction, 0);
  const char* reason = nullptr;
  std::vector<std::byte> frame = Frame(header, info);
  const auto set = [&frame](size_t offset, auto value) {
    memcpy(frame.data() + offset, &value, sizeof value);
  };
  switch (GENERATE(range(0, 10))) {
    case 0:
      frame.resize(16);
      set(0, uint32_t{16});
      reason = "impossible size";
      break;
    case 1:
      set(offsetof(FrameHeader, bytes), uint32_t{64});
      frame.resize(56);
      set(offsetof(FrameHeader, bytes), uint32_t{56});
      set(offsetof(FrameHeader, function), uint32_t{0x7777});
      reason = "not served";
      break;
    case 2:
      set(offsetof(FrameHeader, type), uint16_t{99});
      reason = "type";
      break;
    case 3:
      set(offsetof(FrameHeader, sequence), uint64_t{5});
      reason = "missing";
      break;
    case 4:
      set(offsetof(FrameHeader, epoch), uint32_t{2});
      reason = "epoch";
      break;
    case 5:
      set(offsetof(FrameHeader, thread), uint32_t{kMaxThreads});
      reason = "thread";
      break;
    case 6:
      set(offsetof(FrameHeader, acknowledged), uint64_t{1});
      reason = "acknowledges";
      break;
    case 7:
      set(offsetof(FrameHeader, subject), Handle::Make(HandleKind::kContext, 3, 77).bits);
      reason = "context that was never made";
      break;
    case 8:
      frame.resize(frame.size() + 8);
      set(offsetof(FrameHeader, bytes), static_cast<uint32_t>(frame.size()));
      reason = "followed";
      break;
    case 9:
      set(offsetof(FrameHeader, type), FrameType::kReply);
      reason = "type";
      break;
  }
  client.SendFrame(frame);
  REQUIRE(client.WaitForGoodbye());
  CHECK_THAT(client.goodbye(), Catch::Contains(reason));
}

TEST_CASE("a repeated frame is dropped", "[server][refusal]") {
  RawClient client;
  const auto free = [&client] {
    return client.Call(commands::CuMemGetInfo{}).As<commands::CuMemGetInfoReply>().free;
  };
  const uint64_t before = free();
  const FrameHeader header = client.NextHeader(commands::CuMemAlloc::kFunction, 0);
  FrameHeader asking = header;
  asking.flags = kNeedsReply;
  const auto frame = Frame(asking, commands::CuMemAlloc{64 << 20});
  client.SendFrame(frame);
  client.SendFrame(frame);
  REQUIRE(client.WaitFor(header.sequence).came);
  CHECK(before - free() == 64 << 20);
}

TEST_CASE("handles: stale ones get CUDA's error, impossible ones end the session",
          "[server][refusal]") {
  RawClient client;
  const Handle stream = client.NewStream();
  CHECK(client.WaitFor(client.Synchronize(stream)).result == CUDA_SUCCESS);
  client.Post(commands::CuStreamDestroy{stream.bits});
  CHECK(client.WaitFor(client.Synchronize(stream)).result == CUDA_ERROR_INVALID_HANDLE);
  // Again and again.
  CHECK(client.WaitFor(client.Synchronize(stream)).result == CUDA_ERROR_INVALID_HANDLE);
  const Handle event = client.Mint(HandleKind::kEvent);
  commands::CuEventCreate create{};
  create.phEvent = event.bits;
  client.Post(create);
  CHECK(client.Call(commands::CuEventQuery{event.bits}).result == CUDA_SUCCESS);
  SECTION("an event where a stream belongs") {
    client.Synchronize(event);
  }
  SECTION("a stream that was never minted") {
    client.Synchronize(Handle::Make(HandleKind::kStream, 1, 500));
  }
  SECTION("garbage") {
    client.Synchronize(Handle{0x7fff12345678});
  }
  CHECK(client.WaitForGoodbye());
}

TEST_CASE("a creation that failed leaves its error behind", "[server][refusal]") {
  RawClient client;
  const Handle stream = client.Mint(HandleKind::kStream);
  commands::CuStreamCreateWithPriority command{};
  command.phStream = stream.bits;
  command.flags = 0x40;  // no such flag
  client.Post(command, 1);
  // Any thread that uses the stream learns why there is none...
  CHECK(client.WaitFor(client.Synchronize(stream, 2)).result == CUDA_ERROR_INVALID_VALUE);
  // ... and the thread that made it at its next call that delivers, whatever it is about, once.
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream, 1)).result == CUDA_ERROR_INVALID_VALUE);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream, 1)).result == CUDA_SUCCESS);
}

TEST_CASE("a posted failure goes to the thread that issued it", "[server][refusal]") {
  RawClient client;
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = 4096;
  fill.N = 16;
  client.Post(fill, 5);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream, 6)).result == CUDA_SUCCESS);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream, 5)).result == CUDA_ERROR_INVALID_VALUE);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream, 5)).result == CUDA_SUCCESS);
}

TEST_CASE("no call takes an address outside the session's memory", "[server][refusal]") {
  RawClient client;
  const uint64_t memory = client.Allocate(4096);
  // Memory of the worker's process, freed memory, the end of an allocation, and wrap-around.
  std::vector<std::byte> own(4096);
  const uint64_t freed = client.Allocate(4096);
  client.Post(commands::CuMemFree{freed});
  const auto own_address = reinterpret_cast<uint64_t>(own.data());
  const uint64_t bad =
      GENERATE_COPY(own_address, freed, memory + 4095, uint64_t{0}, UINT64_MAX - 4);
  const auto refused = [&client](uint64_t sequence) {
    Reply reply = client.WaitFor(sequence);
    if (reply.result == CUDA_SUCCESS) reply = client.WaitFor(client.Synchronize(kLegacyStream));
    return reply.came && reply.result == CUDA_ERROR_INVALID_VALUE;
  };
  const auto sent = [&client](const auto& command) {
    return client.Send(command.kFunction, command, true, 0, 1);
  };
  CHECK(refused(sent(commands::CuMemcpyDtoDAsync{bad, memory, 16, 0})));
  CHECK(refused(sent(commands::CuMemcpyDtoDAsync{memory, bad, 16, 0})));
  CHECK(refused(sent(commands::CuMemcpy2DAsync{0, bad, memory, 8, 8, 8, 2})));
  CHECK(refused(sent(commands::CuMemcpy2DAsync{0, memory, bad, 8, 8, 8, 2})));
  commands::CuMemsetD8Async d8{};
  d8.dstDevice = bad;
  d8.N = 16;
  CHECK(refused(sent(d8)));
  commands::CuMemsetD16Async d16{};
  d16.dstDevice = bad;
  d16.N = 8;
  CHECK(refused(sent(d16)));
  commands::CuMemsetD32Async d32{};
  d32.dstDevice = bad;
  d32.N = 4;
  CHECK(refused(sent(d32)));
  commands::CuMemsetD2D8Async d2d8{};
  d2d8.dstDevice = bad;
  d2d8.dstPitch = d2d8.Width = 8;
  d2d8.Height = 2;
  CHECK(refused(sent(d2d8)));
  commands::CuMemsetD2D16Async d2d16{};
  d2d16.dstDevice = bad;
  d2d16.dstPitch = 8;
  d2d16.Width = 4;
  d2d16.Height = 2;
  CHECK(refused(sent(d2d16)));
  commands::CuMemsetD2D32Async d2d32{};
  d2d32.dstDevice = bad;
  d2d32.dstPitch = 8;
  d2d32.Width = 2;
  d2d32.Height = 2;
  CHECK(refused(sent(d2d32)));
  if (bad != 0) {  // freeing null is fine
    CHECK(refused(sent(commands::CuMemFree{bad})));
    CHECK(refused(sent(commands::CuMemFreeAsync{bad, 0})));
  }
  const std::vector<std::byte> bytes(16);
  CHECK(client.UploadInline(bad, bytes, kLegacyStream).result == CUDA_ERROR_INVALID_VALUE);
  DownloadCommand download{};
  download.source = bad;
  download.width = download.source_pitch = download.host_pitch = 16;
  download.height = 1;
  download.place = HostPlace::kInline;
  download.reply_when = ReplyWhen::kDone;
  CHECK(client.WaitFor(client.Send(static_cast<uint32_t>(Operation::kDownload), download, true))
            .result == CUDA_ERROR_INVALID_VALUE);
  // And the session goes on.
  CHECK(client.Call(commands::CuMemGetInfo{}).result == CUDA_SUCCESS);
  for (std::byte byte : own) REQUIRE(byte == std::byte{0});
}

namespace {

uint64_t SendModule(RawClient& client, uint64_t bytes, const JitOption* option) {
  LoadModuleCommand command{};
  command.handle = client.Mint(HandleKind::kLibrary).bits;
  command.kind = ModuleKind::kLibrary;
  command.format = ImageFormat::kContainer;
  command.part_count = 1;
  command.option_count = option != nullptr ? 1 : 0;
  ModulePart part{};
  part.bytes = bytes;
  part.bounced = 1;
  std::vector<std::byte> body(sizeof command + sizeof part +
                              (option != nullptr ? sizeof *option : 0));
  memcpy(body.data(), &command, sizeof command);
  memcpy(body.data() + sizeof command, &part, sizeof part);
  if (option != nullptr) memcpy(body.data() + sizeof command + sizeof part, option, sizeof *option);
  return client.Send(static_cast<uint32_t>(Operation::kLoadModule),
                     std::span<const std::byte>(body), true);
}

}  // namespace

TEST_CASE("no option of a module names memory of the worker", "[server][refusal]") {
  RawClient client;
  JitOption option{};
  SECTION("a table of functions") {
    option.is_library_option = 1;
    option.option = CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE;
  }
  SECTION("a log buffer") {
    option.option = CU_JIT_ERROR_LOG_BUFFER;
  }
  option.value = reinterpret_cast<uint64_t>(&option);
  SendModule(client, 64, &option);
  REQUIRE(client.WaitForGoodbye());
  CHECK_THAT(client.goodbye(), Catch::Contains("holds an address"));
}

TEST_CASE("images that are only claimed take a bounded amount of memory", "[server][refusal]") {
  RawClient client;
  // None of them is ever sent. Two have room, and whatever comes then is refused.
  constexpr uint64_t kBytes = (uint64_t{1} << 31) - 4096;
  SendModule(client, kBytes, nullptr);
  SendModule(client, kBytes, nullptr);
  CHECK(client.WaitFor(SendModule(client, kBytes, nullptr), 60'000).result ==
        CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(client.WaitFor(SendModule(client, 1 << 20, nullptr)).result == CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_CASE("zero bytes are fine anywhere", "[server][refusal]") {
  RawClient client;
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = 4096;
  client.Post(fill);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
}

TEST_CASE("a launch needs the kernel's whole parameter block", "[server][refusal]") {
  RawClient client;
  const uint64_t flag = client.Allocate(4);
  client.LaunchHold(kLegacyStream, flag);  // loads the module, and waits for its flag
  client.Release(flag);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  const uint64_t two[] = {flag, flag};
  client.Launch(client.hold(), kLegacyStream, two);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_ERROR_INVALID_VALUE);
  client.Launch(client.hold(), kLegacyStream, {});
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_ERROR_INVALID_VALUE);
  CHECK(client.Call(commands::CuMemGetInfo{}).result == CUDA_SUCCESS);
}

TEST_CASE("contexts can be made and destroyed, and take their objects along", "[server][context]") {
  RawClient client;
  const Handle context = client.Mint(HandleKind::kContext);
  commands::CuCtxCreate create{};
  create.pctx = context.bits;
  REQUIRE(client.Call(create).result == CUDA_SUCCESS);
  client.set_context(context);
  const Handle stream = client.NewStream();
  const uint64_t memory = client.Allocate(1 << 20);
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = memory;
  fill.N = 1 << 20;
  fill.uc = 1;
  fill.hStream = stream.bits;
  client.Post(fill);
  CHECK(client.WaitFor(client.Synchronize(stream)).result == CUDA_SUCCESS);
  CHECK(static_cast<int>(client.DownloadInline(memory + 77, 1, stream)[0]) == 1);
  client.set_context(PrimaryContext(0));
  CHECK(client.Call(commands::CuCtxDestroy{context.bits}).result == CUDA_SUCCESS);
  CHECK(client.WaitFor(client.Synchronize(stream)).result == CUDA_ERROR_INVALID_HANDLE);
  fill.hStream = 0;
  client.Post(fill);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_ERROR_INVALID_VALUE);
  client.set_context(context);
  CHECK(client.Call(commands::CuMemGetInfo{}).result == CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

TEST_CASE("a primary context can be reset and used again", "[server][context]") {
  RawClient client;
  const uint64_t memory = client.Allocate(4096);
  REQUIRE(client.Call(commands::CuDevicePrimaryCtxReset{0, {}}).result == CUDA_SUCCESS);
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = memory;
  fill.N = 1;
  client.Post(fill);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_ERROR_INVALID_VALUE);
  const uint64_t again = client.Allocate(4096);
  const std::vector<std::byte> bytes(16, std::byte{42});
  CHECK(client.UploadInline(again, bytes, kLegacyStream).result == CUDA_SUCCESS);
  CHECK(client.DownloadInline(again, 16, kLegacyStream) == bytes);
}

}  // namespace penstock::server
