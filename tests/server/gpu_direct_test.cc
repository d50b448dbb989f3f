// Bulk data straight between NICs and device memory: the real worker and the real rdma transport, a
// fabric whose devices reach the simulated GPU's memory through what it exports, and a driver table
// in which single answers can be changed.
#include <sys/mman.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>

#include "common/log.h"
#include "common/unique_fd.h"
#include "tests/server/raw_client.h"
#include "tests/transport/rdma_pair.h"

namespace penstock::server {
namespace {

using transport::Noise;
using transport::Same;
using transport::rdma::fake::Call;
using transport::rdma::fake::DeviceMemory;
using transport::rdma::fake::Fabric;

constexpr int kSilenceMs = 150;

// Before cuInit, which reads it once.
struct EnvironmentFirst {
  EnvironmentFirst() { setenv("SIMGPU_GPUDIRECT", "all", 1); }
} environment_first;

// Some tests have a device that does not order what NICs write; its flush is the fabric's.
std::shared_ptr<Fabric> flushed_fabric;
std::atomic<int> flushes{0};

CUresult UnorderedAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute != CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) {
    return RawClient::Sim().cuDeviceGetAttribute(value, attribute, device);
  }
  *value = CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE;
  return CUDA_SUCCESS;
}

CUresult FlushFabric(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope) {
  ++flushes;
  flushed_fabric->FlushDeviceWrites();
  return CUDA_SUCCESS;
}

CUresult FlushFabricOnce(CUflushGPUDirectRDMAWritesTarget target,
                         CUflushGPUDirectRDMAWritesScope scope) {
  if (flushes > 0) return CUDA_ERROR_UNKNOWN;
  return FlushFabric(target, scope);
}

Driver Unordered() {
  Driver driver = RawClient::Sim();
  driver.cuDeviceGetAttribute = UnorderedAttribute;
  driver.cuFlushGPUDirectRDMAWrites = FlushFabric;
  return driver;
}

// What the log says meanwhile.
class CapturedLog {
 public:
  CapturedLog() : file_(memfd_create("log", MFD_CLOEXEC)) {
    SetLogSpec("info");
    SetLogDescriptor(file_.get());
  }
  ~CapturedLog() {
    SetLogDescriptor(2);
    SetLogSpec("warning");
  }
  int Count(const std::string& words) const {
    std::string text(static_cast<size_t>(lseek(file_.get(), 0, SEEK_END)), '\0');
    REQUIRE(pread(file_.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
    int count = 0;
    for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
      ++count;
    }
    return count;
  }

 private:
  UniqueFd file_;
};

transport::RdmaPair MakePair(DeviceMemory kind, uint32_t rails) {
  transport::RdmaPairOptions options;
  options.rails = rails;
  options.fabric.device_memory = kind;
  return transport::MakeRdmaPair(options);
}

struct Bench {
  explicit Bench(DeviceMemory kind, GpuDirectMode mode = GpuDirectMode::kAuto,
                 const Driver& driver = RawClient::Sim(), uint32_t rails = 1)
      : pair(MakePair(kind, rails)) {
    flushed_fabric = pair.fabric;
    WorkerOptions options;
    options.gpu_direct = mode;
    client =
        std::make_unique<RawClient>(options, driver, std::move(pair.far), std::move(pair.near));
  }
  // Also checks that nothing was misused or left behind.
  ~Bench() {
    client.reset();
    flushed_fabric.reset();
    transport::CheckClean(pair);
  }
  Fabric& fabric() { return *pair.fabric; }
  void Become(DeviceMemory kind) {
    transport::rdma::fake::FabricOptions options;
    options.device_memory = kind;
    pair.fabric->SetOptions(options);
  }
  uint64_t direct() { return client->worker().gpu_direct().moved().direct; }
  uint64_t staged() { return client->worker().gpu_direct().moved().staged; }

  transport::RdmaPair pair;
  std::unique_ptr<RawClient> client;
};

// Client memory.
struct Memory {
  Memory(RawClient& client, std::vector<std::byte> content) : bytes(std::move(content)) {
    auto made = client.connection().Register(bytes.data(), bytes.size(),
                                             transport::Access::kPeerReadsAndWrites);
    REQUIRE(made);
    region = std::move(*made);
  }
  WireMemoryKey key() const {
    WireMemoryKey key;
    memcpy(&key, &region->key(), sizeof key);
    return key;
  }
  std::vector<std::byte> bytes;
  std::unique_ptr<transport::MemoryRegion> region;
};

UploadCommand Up(const Memory& from, uint64_t target, uint64_t bytes, Handle stream) {
  UploadCommand command{};
  command.target = target;
  command.stream = stream.bits;
  command.width = command.target_pitch = command.host_pitch = bytes;
  command.height = 1;
  command.place = HostPlace::kRegion;
  command.reply_when = ReplyWhen::kDone;
  command.key = from.key();
  return command;
}

DownloadCommand Down(const Memory& to, uint64_t source, uint64_t bytes, Handle stream) {
  DownloadCommand command{};
  command.source = source;
  command.stream = stream.bits;
  command.width = command.source_pitch = command.host_pitch = bytes;
  command.height = 1;
  command.place = HostPlace::kRegion;
  command.reply_when = ReplyWhen::kDone;
  command.key = to.key();
  return command;
}

uint64_t Send(RawClient& client, const UploadCommand& command) {
  return client.Send(static_cast<uint32_t>(Operation::kUpload), command, true, 0, 1);
}
uint64_t Send(RawClient& client, const DownloadCommand& command) {
  return client.Send(static_cast<uint32_t>(Operation::kDownload), command, true, 0, 1);
}
template <typename Command>
void Copy(RawClient& client, const Command& command) {
  const Reply reply = client.WaitFor(Send(client, command), 20'000);
  REQUIRE(reply.came);
  REQUIRE(reply.result == CUDA_SUCCESS);
}

void Fill(RawClient& client, uint64_t target, uint8_t value, uint64_t bytes, Handle stream) {
  commands::CuMemsetD8Async fill{};
  fill.dstDevice = target;
  fill.N = bytes;
  fill.uc = value;
  fill.hStream = stream.bits;
  client.Post(fill);
}

// Device memory as the device sees it. Nothing may be under way.
std::vector<std::byte> Look(uint64_t address, uint64_t bytes) {
  const auto* begin = reinterpret_cast<const std::byte*>(address);
  return {begin, begin + bytes};
}

// Noise to the device and other noise back, at odd places of one allocation; everything around it
// must stay as it was.
void CopyBothWays(RawClient& client, uint64_t seed) {
  constexpr uint64_t kBytes = 6 << 20, kAt = 4096 * 3 + 123, kMove = (5 << 20) + 77;
  const uint64_t memory = client.Allocate(kBytes);
  const Handle stream = client.NewStream();
  Fill(client, memory, 0x3c, kBytes, stream);
  const Memory source(client, Noise(kMove, seed));
  Copy(client, Up(source, memory + kAt, kMove, stream));
  CHECK(Same(Look(memory + kAt, kMove), source.bytes));
  CHECK(transport::AllAre(Look(memory, kAt), std::byte{0x3c}));
  CHECK(transport::AllAre(Look(memory + kAt + kMove, kBytes - kAt - kMove), std::byte{0x3c}));
  Memory target(client, std::vector<std::byte>(kMove + 200, std::byte{0x55}));
  DownloadCommand command = Down(target, memory + kAt, kMove, stream);
  command.offset = 100;
  Copy(client, command);
  CHECK(Same({target.bytes.begin() + 100, target.bytes.begin() + 100 + kMove}, source.bytes));
  CHECK(transport::AllAre({target.bytes.begin(), target.bytes.begin() + 100}, std::byte{0x55}));
  CHECK(transport::AllAre({target.bytes.end() - 100, target.bytes.end()}, std::byte{0x55}));
  client.Post(commands::CuMemFree{memory});
}

}  // namespace

TEST_CASE("large copies go straight to and from device memory", "[server][gpudirect]") {
  const uint32_t rails = GENERATE(1u, 2u);
  CapturedLog log;
  Bench bench(DeviceMemory::kWorks, GpuDirectMode::kAuto, RawClient::Sim(), rails);
  RawClient& client = *bench.client;
  CopyBothWays(client, 1);
  constexpr uint64_t kMove = (5 << 20) + 77;
  CHECK(bench.direct() == 2 * kMove);
  CHECK(bench.staged() == 0);
  // The fabric has seen the same bytes, apart from those of the test, pass the device.
  const uint64_t written = bench.fabric().device_bytes_written(),
                 read = bench.fabric().device_bytes_read();
  CopyBothWays(client, 2);
  CHECK(bench.fabric().device_bytes_written() - written == kMove);
  CHECK(bench.fabric().device_bytes_read() - read == kMove);
  CHECK(bench.direct() == 4 * kMove);
  CHECK(bench.staged() == 0);
  CHECK(log.Count("Device 0 exchanges bulk data with the NICs directly (GPUDirect)") == 1);
}

TEST_CASE("switched off, or for small copies, everything is staged", "[server][gpudirect]") {
  {
    Bench bench(DeviceMemory::kWorks, GpuDirectMode::kOff);
    CopyBothWays(*bench.client, 3);
    CHECK(bench.direct() == 0);
    CHECK(bench.fabric().device_bytes_written() + bench.fabric().device_bytes_read() == 0);
  }
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  // Below the least size; above it, but of an allocation that shares its pages with others.
  for (const uint64_t bytes : {kLeastDirectBytes - 1, kLeastDirectBytes}) {
    const uint64_t memory = client.Allocate(bytes);
    const Memory source(client, Noise(bytes, bytes));
    Copy(client, Up(source, memory, bytes, kLegacyStream));
    CHECK(Same(Look(memory, bytes), source.bytes));
  }
  CHECK(bench.direct() == 0);
  CHECK(bench.staged() == 2 * kLeastDirectBytes - 1);
}

TEST_CASE("an upload waits for its stream, and the stream for it", "[server][gpudirect]") {
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  constexpr uint64_t kBytes = 2 << 20;
  const uint64_t flag = client.Allocate(4), first = client.Allocate(kBytes),
                 second = client.Allocate(kBytes);
  Fill(client, flag, 0, 4, kLegacyStream);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  const Handle stream = client.NewStream();
  Memory source(client, Noise(kBytes, 4));
  Copy(client, Up(source, first, kBytes, stream));  // registers and tests
  Copy(client, Up(source, second, kBytes, stream));
  const uint64_t written = bench.fabric().device_bytes_written();

  client.LaunchHold(stream, flag);
  const uint64_t up = Send(client, Up(source, first, kBytes, stream));
  commands::CuMemcpy2DAsync copy{};
  copy.dst = second;
  copy.src = first;
  copy.dst_pitch = copy.src_pitch = copy.width = kBytes;
  copy.height = 1;
  copy.stream = stream.bits;
  client.Post(copy);
  // Behind the kernel nothing may be pulled: what the program writes now is what arrives.
  REQUIRE(client.Call(commands::CuMemGetInfo{}).came);
  client.Receive(kSilenceMs);
  CHECK(bench.fabric().device_bytes_written() == written);
  const auto later = Noise(kBytes, 5);
  memcpy(source.bytes.data(), later.data(), kBytes);
  // The NIC takes its time, and the stream must not go on without it.
  bench.Become(DeviceMemory::kStuck);
  client.Release(flag);
  const uint64_t waiting = client.Synchronize(stream);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  bench.Become(DeviceMemory::kWorks);
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
  CHECK(client.WaitFor(up).result == CUDA_SUCCESS);
  CHECK(Same(Look(first, kBytes), later));
  CHECK(Same(Look(second, kBytes), later));
  CHECK(bench.staged() == 0);
}

TEST_CASE("a download waits for its stream, and the stream for it", "[server][gpudirect]") {
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  constexpr uint64_t kBytes = 2 << 20;
  const uint64_t flag = client.Allocate(4), memory = client.Allocate(kBytes);
  Fill(client, flag, 0, 4, kLegacyStream);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  const Handle stream = client.NewStream();
  Memory target(client, std::vector<std::byte>(kBytes, std::byte{1}));
  Copy(client, Up(target, memory, kBytes, stream));
  client.LaunchHold(stream, flag);
  Fill(client, memory, 7, kBytes, stream);
  const uint64_t down = Send(client, Down(target, memory, kBytes, stream));
  Fill(client, memory, 9, kBytes, stream);
  CHECK_FALSE(client.WaitFor(down, kSilenceMs).came);
  CHECK(transport::AllAre(target.bytes, std::byte{1}));
  bench.Become(DeviceMemory::kStuck);
  client.Release(flag);
  const uint64_t waiting = client.Synchronize(stream);
  CHECK_FALSE(client.WaitFor(waiting, kSilenceMs).came);
  bench.Become(DeviceMemory::kWorks);
  CHECK(client.WaitFor(down).result == CUDA_SUCCESS);
  CHECK(transport::AllAre(target.bytes, std::byte{7}));
  CHECK(client.WaitFor(waiting).result == CUDA_SUCCESS);
  CHECK(transport::AllAre(Look(memory, kBytes), std::byte{9}));
  CHECK(bench.staged() == 0);
}

TEST_CASE("a device that the test finds wanting is demoted with one line", "[server][gpudirect]") {
  struct Trouble {
    DeviceMemory kind;
    const char* words;
  };
  const auto trouble = GENERATE(
      Trouble{DeviceMemory::kWrongWrites, "writes to the device is not what the device reads"},
      Trouble{DeviceMemory::kWrongReads, "reads from the device is not what the device wrote"},
      Trouble{DeviceMemory::kLate, "writes to the device is not what the device reads"},
      Trouble{DeviceMemory::kFaults, "local protection error"},
      Trouble{DeviceMemory::kNone, "Operation not supported"});
  CapturedLog log;
  Bench bench(trouble.kind);
  CopyBothWays(*bench.client, 6);
  CopyBothWays(*bench.client, 7);
  CHECK(bench.direct() == 0);
  CHECK(bench.staged() == 4 * ((5ull << 20) + 77));
  CHECK(log.Count("Device 0 does without GPUDirect") == 1);
  CHECK(log.Count(trouble.words) == 1);
}

TEST_CASE("what NICs write is flushed where the device asks for it", "[server][gpudirect]") {
  Bench bench(DeviceMemory::kLate, GpuDirectMode::kAuto, Unordered());
  flushes = 0;
  CopyBothWays(*bench.client, 8);
  CHECK(bench.staged() == 0);
  CHECK(bench.direct() == 2 * ((5ull << 20) + 77));
  // One of the test and one of the upload, however many pieces it had.
  CHECK(flushes == 2);
}

TEST_CASE("an upload whose flush fails is done again through staging", "[server][gpudirect]") {
  CapturedLog log;
  Driver driver = Unordered();
  driver.cuFlushGPUDirectRDMAWrites = FlushFabricOnce;  // for the test
  flushes = 0;
  Bench bench(DeviceMemory::kLate, GpuDirectMode::kAuto, driver);
  CopyBothWays(*bench.client, 22);
  constexpr uint64_t kMove = (5 << 20) + 77;
  CHECK(flushes == 1);
  CHECK(bench.direct() == kMove);
  CHECK(bench.staged() == 2 * kMove);
  CHECK(log.Count("cuFlushGPUDirectRDMAWrites fails with CUDA_ERROR_UNKNOWN") == 1);
}

TEST_CASE("a device that stops working in the middle loses nothing", "[server][gpudirect]") {
  CapturedLog log;
  Bench bench(DeviceMemory::kWorks, GpuDirectMode::kAuto, RawClient::Sim(), 2);
  RawClient& client = *bench.client;
  constexpr uint64_t kBytes = 9 << 20;
  const uint64_t memory = client.Allocate(kBytes), other = client.Allocate(kBytes);
  const Memory source(client, Noise(kBytes, 9));
  Memory target(client, std::vector<std::byte>(kBytes));
  const Handle stream = client.NewStream(), second = client.NewStream();
  Copy(client, Up(source, memory, kBytes, stream));
  Copy(client, Up(source, other, 100'000, second));
  CHECK(bench.staged() == 0);
  const bool upload = GENERATE(true, false);
  bench.Become(DeviceMemory::kFaults);
  // Two at a time: the second finds the device demoted under its hands.
  const uint64_t one = upload ? Send(client, Up(source, memory, kBytes, stream))
                              : Send(client, Down(target, memory, kBytes, stream));
  const uint64_t two = Send(client, Up(source, other, kBytes, second));
  CHECK(client.WaitFor(one, 20'000).result == CUDA_SUCCESS);
  CHECK(client.WaitFor(two, 20'000).result == CUDA_SUCCESS);
  if (!upload) CHECK(Same(target.bytes, source.bytes));
  CHECK(Same(Look(memory, kBytes), source.bytes));
  CHECK(Same(Look(other, kBytes), source.bytes));
  CHECK(bench.staged() == 2 * kBytes);
  CHECK(log.Count("does without GPUDirect") == 1);
  const uint64_t direct = bench.direct();
  CopyBothWays(client, 10);
  CHECK(bench.direct() == direct);
}

TEST_CASE("pageable memory goes between bounce slots and the device", "[server][gpudirect]") {
  const bool breaks = GENERATE(false, true);
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  // More than all slots hold, so that pieces are still to come when the device breaks down.
  constexpr uint64_t kBytes = (kBounceSlots + 5) * uint64_t{kBounceSlotBytes} + 33;
  const uint64_t memory = client.Allocate(kBytes + 100);
  const Handle stream = client.NewStream();
  Memory slots(client, std::vector<std::byte>(size_t{kBounceSlots} * kBounceSlotBytes));
  const auto source = Noise(kBytes, 21);
  std::vector<std::byte> target(kBytes);
  // The client's part: fills or empties slots until the call is over. The device may break down
  // after the third piece.
  const auto serve = [&](uint64_t call, bool fills) {
    int pieces = 0;
    for (const Deadline limit = Deadline::After(20'000); !limit.expired();) {
      client.Receive(5);
      for (const auto& [named, piece] : client.TakePieces()) {
        REQUIRE(named == call);
        REQUIRE(piece.offset + piece.bytes <= kBytes);
        if (breaks && ++pieces == 3) bench.Become(DeviceMemory::kFaults);
        std::byte* slot = slots.bytes.data() + size_t{piece.slot} * kBounceSlotBytes;
        if (fills) {
          memcpy(slot, source.data() + piece.offset, piece.bytes);
        } else {
          memcpy(target.data() + piece.offset, slot, piece.bytes);
        }
        client.Send(static_cast<uint32_t>(Operation::kBounceDone),
                    BounceDoneCommand{call, piece.slot, 0}, false);
      }
      if (const Reply reply = client.WaitFor(call, 0); reply.came) {
        return reply.result == CUDA_SUCCESS;
      }
    }
    return false;
  };
  const bool upload = GENERATE(true, false);
  if (!upload) memcpy(reinterpret_cast<void*>(memory + 50), source.data(), kBytes);
  if (upload) {
    UploadCommand command = Up(slots, memory + 50, kBytes, stream);
    command.place = HostPlace::kBounced;
    REQUIRE(serve(Send(client, command), true));
    CHECK(Same(Look(memory + 50, kBytes), source));
    CHECK(transport::AllAre(Look(memory, 50), std::byte{0}));
    CHECK(transport::AllAre(Look(memory + 50 + kBytes, 50), std::byte{0}));
  } else {
    DownloadCommand command = Down(slots, memory + 50, kBytes, stream);
    command.place = HostPlace::kBounced;
    REQUIRE(serve(Send(client, command), false));
    CHECK(Same(target, source));
  }
  CHECK(bench.direct() > 0);
  CHECK(bench.staged() == (breaks ? kBytes : 0));
}

TEST_CASE("an allocation that cannot be registered is staged, others are not",
          "[server][gpudirect]") {
  CapturedLog log;
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  CopyBothWays(client, 11);
  const uint64_t direct = bench.direct();
  for (int i = 0; i < 2; ++i) {
    bench.fabric().FailCall(*bench.pair.server, Call::kRegDmabufMr, 1, ENOMEM);
    CopyBothWays(client, 12);
  }
  CHECK(bench.direct() == direct);
  CHECK(bench.staged() == 2 * direct);
  CHECK(log.Count("cannot be registered, so its bulk data goes through host memory") == 1);
  CopyBothWays(client, 13);
  CHECK(bench.direct() == 2 * direct);
}

TEST_CASE("a registration ends before its memory is freed", "[server][gpudirect]") {
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  constexpr uint64_t kBytes = 3 << 20;
  CopyBothWays(client, 14);
  REQUIRE(client.Call(commands::CuMemGetInfo{}).came);  // waits for the free
  const auto before = bench.fabric().objects();
  const uint64_t flag = client.Allocate(4);
  Fill(client, flag, 0, 4, kLegacyStream);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  const Handle stream = client.NewStream();
  const Memory source(client, Noise(kBytes, 15));
  Memory target(client, std::vector<std::byte>(kBytes));
  const auto with_client_memory = bench.fabric().objects();
  const uint64_t memory = client.Allocate(kBytes);
  // Freed while copies are still behind a kernel: they come first.
  client.LaunchHold(stream, flag);
  const uint64_t up = Send(client, Up(source, memory, kBytes, stream));
  const uint64_t down = Send(client, Down(target, memory, kBytes, stream));
  client.Post(commands::CuMemFree{memory});
  client.Receive(kSilenceMs);
  client.Release(flag);
  CHECK(client.WaitFor(up).result == CUDA_SUCCESS);
  CHECK(client.WaitFor(down).result == CUDA_SUCCESS);
  CHECK(Same(target.bytes, source.bytes));
  REQUIRE(client.Call(commands::CuMemGetInfo{}).came);
  CHECK(bench.fabric().objects() == with_client_memory);
  CHECK(with_client_memory != before);
  CHECK(bench.staged() == 0);
}

TEST_CASE("a context takes its registrations along", "[server][gpudirect]") {
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  const uint64_t memory = client.Allocate(1 << 20);
  const Memory source(client, Noise(1 << 20, 16));
  Copy(client, Up(source, memory, 1 << 20, kLegacyStream));
  CHECK(client.Call(commands::CuDevicePrimaryCtxReset{}).result == CUDA_SUCCESS);
  CopyBothWays(client, 17);
  CHECK(bench.staged() == 0);
}

TEST_CASE("wide rows go directly, one by one, and nothing between them", "[server][gpudirect]") {
  Bench bench(DeviceMemory::kWorks);
  RawClient& client = *bench.client;
  constexpr uint64_t kWidth = 70'001, kHostPitch = 70'400, kDevicePitch = 71'168, kHeight = 40;
  const uint64_t memory = client.Allocate(kDevicePitch * kHeight);
  Fill(client, memory, 0x21, kDevicePitch * kHeight, kLegacyStream);
  const Memory source(client, Noise(kHostPitch * kHeight, 18));
  UploadCommand up = Up(source, memory, kWidth, kLegacyStream);
  up.height = kHeight;
  up.host_pitch = kHostPitch;
  up.target_pitch = kDevicePitch;
  Copy(client, up);
  Memory target(client, std::vector<std::byte>(kHostPitch * kHeight, std::byte{0x43}));
  DownloadCommand down = Down(target, memory, kWidth, kLegacyStream);
  down.height = kHeight;
  down.host_pitch = kHostPitch;
  down.source_pitch = kDevicePitch;
  Copy(client, down);
  std::vector<std::byte> device(kDevicePitch * kHeight, std::byte{0x21}),
      host(kHostPitch * kHeight, std::byte{0x43});
  for (uint64_t row = 0; row < kHeight; ++row) {
    memcpy(device.data() + row * kDevicePitch, source.bytes.data() + row * kHostPitch, kWidth);
    memcpy(host.data() + row * kHostPitch, source.bytes.data() + row * kHostPitch, kWidth);
  }
  CHECK(Same(Look(memory, device.size()), device));
  CHECK(Same(target.bytes, host));
  CHECK(bench.staged() == 0);
  CHECK(bench.direct() == 2 * kWidth * kHeight);
}

TEST_CASE("a session that must have GPUDirect and cannot is refused", "[server][gpudirect]") {
  WorkerOptions options;
  options.gpu_direct = GpuDirectMode::kOn;
  {
    RawClient client(options);
    REQUIRE(client.WaitForGoodbye());
    CHECK_THAT(client.goodbye(), Catch::Contains("a transport (inproc) without it"));
  }
  {
    Bench bench(DeviceMemory::kWrongWrites, GpuDirectMode::kOn);
    const uint64_t memory = bench.client->Allocate(1 << 20);
    const Memory source(*bench.client, Noise(1 << 20, 19));
    Send(*bench.client, Up(source, memory, 1 << 20, kLegacyStream));
    REQUIRE(bench.client->WaitForGoodbye());
    CHECK_THAT(bench.client->goodbye(), Catch::Contains("does not work on device 0"));
  }
  Bench bench(DeviceMemory::kWorks, GpuDirectMode::kOn);
  CopyBothWays(*bench.client, 20);
  CHECK(bench.staged() == 0);
}

}  // namespace penstock::server
