// The rules of order: what waits, what does not, and when client memory is touched. A kernel that
// spins until the test lets it go makes "the stream has not reached it yet" certain, without
// sleeps.
#include <catch2/catch.hpp>
#include <cstring>

#include "tests/server/raw_client.h"

namespace penstock::server {
namespace {

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
constexpr int kSilenceMs = 150;  // long enough to believe that no reply comes

WireMemoryKey KeyOf(const transport::MemoryRegion& region) {
  WireMemoryKey key;
  memcpy(&key, &region.key(), sizeof key);
  return key;
}

struct Registered {
  std::vector<std::byte> bytes;
  std::unique_ptr<transport::MemoryRegion> region;
  Registered(RawClient& client, size_t size) : bytes(size) {
    auto made =
        client.connection().Register(bytes.data(), size, transport::Access::kPeerReadsAndWrites);
    REQUIRE(made.has_value());
    region = std::move(*made);
  }
  void Fill(int value) { memset(bytes.data(), value, bytes.size()); }
  bool AllAre(int value) const {
    for (std::byte byte : bytes) {
      if (byte != static_cast<std::byte>(value)) return false;
    }
    return true;
  }
};

UploadCommand Upload(const Registered& from, uint64_t target, Handle stream, ReplyWhen when) {
  UploadCommand command{};
  command.target = target;
  command.stream = stream.bits;
  command.width = command.target_pitch = command.host_pitch = from.bytes.size();
  command.height = 1;
  command.place = HostPlace::kRegion;
  command.reply_when = when;
  command.key = KeyOf(*from.region);
  return command;
}

DownloadCommand Download(const Registered& to, uint64_t source, Handle stream, ReplyWhen when) {
  DownloadCommand command{};
  command.source = source;
  command.stream = stream.bits;
  command.width = command.source_pitch = command.host_pitch = to.bytes.size();
  command.height = 1;
  command.place = HostPlace::kRegion;
  command.reply_when = when;
  command.key = KeyOf(*to.region);
  return command;
}

uint64_t Zeroed(RawClient& client, uint64_t bytes) {
  const uint64_t address = client.Allocate(bytes);
  commands::CuMemsetD8Async command{};
  command.dstDevice = address;
  command.N = bytes;
  client.Post(command);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  return address;
}

template <typename Command>
uint64_t SendOperation(RawClient& client, Operation operation, const Command& command,
                       bool wants_reply, uint32_t thread = 0) {
  return client.Send(static_cast<uint32_t>(operation), command, wants_reply, thread,
                     kGatedCopyCost);
}

}  // namespace

TEST_CASE("a wait of one thread does not hold up another's call", "[server][waits]") {
  RawClient client;
  const uint64_t flag = Zeroed(client, 4);
  const Handle stream = client.NewStream();
  client.LaunchHold(stream, flag);
  const uint64_t waiting = client.Synchronize(stream, 1);
  const Reply other = client.Call(commands::CuMemGetInfo{}, 2);
  CHECK(other.came);
  CHECK(other.result == CUDA_SUCCESS);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  client.Release(flag);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
}

TEST_CASE("without deferred waits the other call is held up", "[server][waits]") {
  WorkerOptions options;
  options.deferred_waits = false;
  RawClient client(options);
  const uint64_t flag = Zeroed(client, 4);
  const Handle stream = client.NewStream();
  client.LaunchHold(stream, flag);
  const uint64_t waiting = client.Synchronize(stream, 1);
  const uint64_t other =
      client.Send(commands::CuMemGetInfo::kFunction, commands::CuMemGetInfo{}, true, 2);
  CHECK_FALSE(client.WaitFor(other, kSilenceMs).came);
  client.Release(flag);
  CHECK(client.WaitFor(other).result == CUDA_SUCCESS);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
}

TEST_CASE("an upload takes client memory when its stream reaches it", "[server][gate]") {
  const bool gate = GENERATE(true, false);
  WorkerOptions options;
  options.gate = gate;
  RawClient client(options);
  const uint64_t flag = Zeroed(client, 4), target = Zeroed(client, 1 << 20);
  const Handle stream = client.NewStream();
  Registered source(client, 1 << 20);
  source.Fill(1);
  client.LaunchHold(stream, flag);
  SendOperation(client, Operation::kUpload, Upload(source, target, stream, ReplyWhen::kNever),
                false);
  // The reply shows that the upload has been dealt with as far as it can be.
  REQUIRE(client.Call(commands::CuMemGetInfo{}).came);
  client.Receive(kSilenceMs);
  source.Fill(2);
  client.Release(flag);
  REQUIRE(client.WaitFor(client.Synchronize(stream)).result == CUDA_SUCCESS);
  // With the gate the new bytes arrive; without it the old ones, which shows what it is for.
  const auto bytes = client.DownloadInline(target + (1 << 20) - 16, 16, stream);
  CHECK(static_cast<int>(bytes[15]) == (gate ? 2 : 1));
}

TEST_CASE("a download writes client memory when its stream reaches it", "[server][gate]") {
  RawClient client;
  const uint64_t flag = Zeroed(client, 4), source = Zeroed(client, 3 << 20);
  const Handle stream = client.NewStream();
  Registered target(client, 3 << 20);
  target.Fill(9);
  client.LaunchHold(stream, flag);
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = source;
  fill.N = 3 << 20;
  fill.uc = 7;
  fill.hStream = stream.bits;
  client.Post(fill);
  const uint64_t sequence = SendOperation(client, Operation::kDownload,
                                          Download(target, source, stream, ReplyWhen::kDone), true);
  CHECK_FALSE(client.WaitFor(sequence, kSilenceMs).came);
  CHECK(target.AllAre(9));
  client.Release(flag);
  CHECK(client.WaitFor(sequence).result == CUDA_SUCCESS);
  CHECK(target.AllAre(7));
}

TEST_CASE("device to pinned memory, then back from it, without a wait between", "[server][gate]") {
  RawClient client;
  constexpr size_t kBytes = 5 << 20;
  const uint64_t flag = Zeroed(client, 4), first = Zeroed(client, kBytes),
                 second = Zeroed(client, kBytes);
  const Handle stream = client.NewStream();
  Registered pinned(client, kBytes);
  client.LaunchHold(stream, flag);
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = first;
  fill.N = kBytes;
  fill.uc = 5;
  fill.hStream = stream.bits;
  client.Post(fill);
  SendOperation(client, Operation::kDownload, Download(pinned, first, stream, ReplyWhen::kNever),
                false);
  SendOperation(client, Operation::kUpload, Upload(pinned, second, stream, ReplyWhen::kNever),
                false);
  client.Release(flag);
  REQUIRE(client.WaitFor(client.Synchronize(stream)).result == CUDA_SUCCESS);
  const auto bytes = client.DownloadInline(second + kBytes - 1024, 1024, stream);
  for (std::byte byte : bytes) REQUIRE(static_cast<int>(byte) == 5);
}

TEST_CASE("rows keep their place and what lies between is never written", "[server][copy]") {
  RawClient client;
  constexpr uint64_t kWidth = 1000, kPitch = 1536, kHeight = 700, kDevicePitch = 1024;
  const uint64_t device = Zeroed(client, kDevicePitch * kHeight);
  Registered source(client, kPitch * kHeight), target(client, kPitch * kHeight);
  for (uint64_t row = 0; row < kHeight; ++row) {
    memset(source.bytes.data() + row * kPitch, static_cast<int>(row % 200), kPitch);
  }
  target.Fill(250);
  UploadCommand up = Upload(source, device, kLegacyStream, ReplyWhen::kPulled);
  up.width = kWidth;
  up.height = kHeight;
  up.host_pitch = kPitch;
  up.target_pitch = kDevicePitch;
  CHECK(client.WaitFor(SendOperation(client, Operation::kUpload, up, true)).result == CUDA_SUCCESS);
  DownloadCommand down = Download(target, device, kLegacyStream, ReplyWhen::kDone);
  down.width = kWidth;
  down.height = kHeight;
  down.host_pitch = kPitch;
  down.source_pitch = kDevicePitch;
  CHECK(client.WaitFor(SendOperation(client, Operation::kDownload, down, true)).result ==
        CUDA_SUCCESS);
  for (uint64_t row = 0; row < kHeight; ++row) {
    const std::byte* begin = target.bytes.data() + row * kPitch;
    REQUIRE(static_cast<uint64_t>(begin[0]) == row % 200);
    REQUIRE(static_cast<uint64_t>(begin[kWidth - 1]) == row % 200);
    REQUIRE(static_cast<uint64_t>(begin[kWidth]) == 250);
    REQUIRE(static_cast<uint64_t>(begin[kPitch - 1]) == 250);
  }
}

TEST_CASE("a staging slot is released once it is read", "[server][copy]") {
  RawClient client;
  const uint64_t target = Zeroed(client, 4096);
  Registered slot(client, 4096);
  slot.Fill(3);
  UploadCommand command = Upload(slot, target, kLegacyStream, ReplyWhen::kNever);
  command.place = HostPlace::kStaged;
  command.slot = 17;
  SendOperation(client, Operation::kUpload, command, false);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  CHECK(client.slot_releases(17) == 1);
  // Also when the copy fails.
  command.target = 4096;
  SendOperation(client, Operation::kUpload, command, false);
  CHECK(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_ERROR_INVALID_VALUE);
  CHECK(client.slot_releases(17) == 2);
  CHECK(static_cast<int>(client.DownloadInline(target, 8, kLegacyStream)[7]) == 3);
}

TEST_CASE("many small uploads behind a kernel arrive, more than there are slots",
          "[server][copy]") {
  RawClient client;
  constexpr uint32_t kCopies = 450;
  const uint64_t flag = Zeroed(client, 4), target = Zeroed(client, kCopies * 8192);
  const Handle stream = client.NewStream();
  client.LaunchHold(stream, flag);
  std::vector<std::byte> body(sizeof(UploadCommand) + 8192);
  for (uint32_t i = 0; i < kCopies; ++i) {
    UploadCommand command{};
    command.target = target + uint64_t{i} * 8192;
    command.stream = stream.bits;
    command.width = command.target_pitch = command.host_pitch = 8192;
    command.height = 1;
    command.place = HostPlace::kInline;
    memcpy(body.data(), &command, sizeof command);
    memset(body.data() + sizeof command, static_cast<int>(i % 251), 8192);
    client.Send(static_cast<uint32_t>(Operation::kUpload), std::span<const std::byte>(body), false,
                0, 1);
  }
  REQUIRE(client.Call(commands::CuMemGetInfo{}).came);
  client.Release(flag);
  REQUIRE(client.WaitFor(client.Synchronize(stream)).result == CUDA_SUCCESS);
  for (uint32_t i = 0; i < kCopies; ++i) {
    const auto bytes = client.DownloadInline(target + uint64_t{i} * 8192 + 8184, 8, stream);
    REQUIRE(static_cast<uint32_t>(bytes[7]) == i % 251);
  }
}

TEST_CASE("a fault of a kernel ends the copies and waits behind it", "[server][gate]") {
  RawClient client;
  const uint64_t target = Zeroed(client, 1 << 20);
  Registered memory(client, 1 << 20);
  const Handle stream = client.NewStream();
  const Handle module = client.LoadModule(kFaultPtx);
  const Handle fault = client.GetFunction(module, "fault");
  const uint64_t flag = Zeroed(client, 4);
  client.LaunchHold(stream, flag);
  const uint64_t nowhere = 64;
  client.Launch(fault, stream, std::span(&nowhere, 1));
  UploadCommand up = Upload(memory, target, stream, ReplyWhen::kNever);
  up.place = HostPlace::kStaged;
  up.slot = 3;
  SendOperation(client, Operation::kUpload, up, false, 1);
  const uint64_t down = SendOperation(client, Operation::kDownload,
                                      Download(memory, target, stream, ReplyWhen::kDone), true, 2);
  const uint64_t waiting = client.Synchronize(stream, 4);
  const uint64_t window = client.Send(static_cast<uint32_t>(Operation::kWaitStreamProgress),
                                      WaitStreamProgressCommand{stream.bits, 2}, true, 5);
  client.Release(flag);
  CHECK(client.WaitFor(down).result == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(client.WaitFor(waiting).result == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(client.WaitFor(window).came);
  // The fault is the context's: every thread meets it, and the slot is the client's again.
  CHECK(client.Call(commands::CuMemAlloc{4096}, 6).result == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(client.slot_releases(3) == 1);
}

TEST_CASE("a stream's progress is told and can be waited for", "[server][progress]") {
  RawClient client;
  const uint64_t flag = Zeroed(client, 4), target = Zeroed(client, 4096);
  const Handle stream = client.NewStream();
  client.LaunchHold(stream, flag);
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = target;
  fill.N = 1;
  fill.hStream = stream.bits;
  for (int i = 0; i < 99; ++i) client.Post(fill);
  WaitStreamProgressCommand command{stream.bits, 50};
  const uint64_t waiting =
      client.Send(static_cast<uint32_t>(Operation::kWaitStreamProgress), command, true);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  CHECK(client.finished(stream) == 0);
  client.Release(flag);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
  CHECK(client.finished(stream) >= 50);
  // A client that counts more than the server is not left waiting.
  command.value = 1000;
  CHECK(client
            .WaitFor(
                client.Send(static_cast<uint32_t>(Operation::kWaitStreamProgress), command, true))
            .result == CUDA_SUCCESS);
  CHECK(client.finished(stream) >= 1000);
}

// A stream that has come to its end has nothing more to be seen when it is destroyed.
TEST_CASE("a session can make and destroy any number of streams, one after the other",
          "[server][progress]") {
  RawClient client;
  const uint64_t word = client.Allocate(4);
  int failures = 0;
  for (int i = 0; i < 30'000; ++i) {
    const Handle stream = client.NewStream();
    commands::CuMemsetD8Async fill{};
    fill.dstDevice = word;
    fill.N = 4;
    fill.hStream = stream.bits;
    client.Post(fill);
    const Reply reply =
        client.WaitFor(client.Send(static_cast<uint32_t>(Operation::kWaitStreamProgress),
                                   WaitStreamProgressCommand{stream.bits, 1}, true));
    if (!reply.came || reply.result != CUDA_SUCCESS) ++failures;
    commands::CuStreamDestroy destroy{};
    destroy.hStream = stream.bits;
    client.Post(destroy);
  }
  CHECK(failures == 0);
}

TEST_CASE("a free behind a running kernel delays only its own thread's questions",
          "[server][reaper]") {
  RawClient client;
  const uint64_t flag = Zeroed(client, 4), memory = Zeroed(client, 64 << 20);
  const uint64_t before =
      client.Call(commands::CuMemGetInfo{}).As<commands::CuMemGetInfoReply>().free;
  const Handle stream = client.NewStream();
  client.LaunchHold(stream, flag);
  client.Post(commands::CuMemFree{memory}, 1);
  const Reply other = client.Call(commands::CuMemGetInfo{}, 2);
  REQUIRE(other.came);
  CHECK(other.As<commands::CuMemGetInfoReply>().free == before);
  const uint64_t own =
      client.Send(commands::CuMemGetInfo::kFunction, commands::CuMemGetInfo{}, true, 1);
  CHECK_FALSE(client.WaitFor(own, kSilenceMs).came);
  // The range is gone at once.
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = memory;
  fill.N = 1;
  client.Post(fill, 2);
  CHECK(client.WaitFor(client.Synchronize(client.NewStream(), 2)).result ==
        CUDA_ERROR_INVALID_VALUE);
  client.Release(flag);
  const Reply reply = client.WaitFor(own);
  REQUIRE(reply.came);
  CHECK(reply.As<commands::CuMemGetInfoReply>().free >= before + (64 << 20));
}

TEST_CASE("an allocation that fails waits for frees under way", "[server][reaper]") {
  RawClient client;
  const uint64_t flag = Zeroed(client, 4);
  const uint64_t free =
      client.Call(commands::CuMemGetInfo{}).As<commands::CuMemGetInfoReply>().free;
  const uint64_t most = free * 3 / 4;
  const uint64_t memory = client.Allocate(most);
  client.LaunchHold(client.NewStream(), flag);
  client.Post(commands::CuMemFree{memory});
  const uint64_t second =
      client.Send(commands::CuMemAlloc::kFunction, commands::CuMemAlloc{most}, true);
  CHECK_FALSE(client.WaitFor(second, kSilenceMs).came);
  client.Release(flag);
  const Reply reply = client.WaitFor(second);
  REQUIRE(reply.came);
  CHECK(reply.result == CUDA_SUCCESS);
  CHECK(reply.As<commands::CuMemAllocReply>().dptr != 0);
}

}  // namespace penstock::server
