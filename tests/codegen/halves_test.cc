// The generated halves of plain rows, joined: the client's entry encodes a command, the server's
// handler decodes it and calls a recording driver. The tests compare what the program passed with
// what the driver got, and what the driver answered with what the program received. The
// hand-written classes around the halves (Call, CallContext) are stand-ins defined here: handles
// travel as they are, and one range of device memory is alive.
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "commands.gen.h"
#include "custom_client.gen.h"
#include "handlers.gen.h"
#include "interposer/core/call.h"
#include "mock_driver.gen.h"

namespace penstock {
namespace {

constexpr uint64_t kMemory = 0x7000000000;
constexpr uint64_t kMemoryBytes = 1 << 20;
constexpr uint64_t kPerThreadStream = 0x5600000100000009;

bool InMemory(uint64_t address, uint64_t bytes) {
  return bytes == 0 ||
         (address >= kMemory && bytes <= kMemoryBytes && address - kMemory <= kMemoryBytes - bytes);
}
bool InMemory2D(uint64_t address, uint64_t pitch, uint64_t width, uint64_t height) {
  if (width == 0 || height == 0) return true;
  const __uint128_t bytes = static_cast<__uint128_t>(pitch) * (height - 1) + width;
  return width <= pitch && bytes <= kMemoryBytes && InMemory(address, static_cast<uint64_t>(bytes));
}

// The last frame that a client half sent.
struct Sent {
  uint32_t function = 0;
  uint32_t cost = 0;
  bool posted = false;
  std::vector<std::byte> bytes;
} sent;

class TestContext : public server::CallContext {
 public:
  explicit TestContext(const server::Driver& driver) {
    driver_ = &driver;
    reply_ = Writer(memory_);
  }
  std::span<const std::byte> reply_bytes() { return std::span(memory_).first(reply_.used()); }

 private:
  std::byte memory_[4096];
};

bool malformed = false;

struct Answer {
  CUresult result;
  std::vector<std::byte> reply;
};

// Has the server half answer this frame.
Answer Serve(uint32_t function, std::span<const std::byte> bytes) {
  static const struct {
    uint32_t function;
    server::HandlerFunction handler;
  } table[] = {
      {commands::CuMemsetD8Async::kFunction, server::HandleCuMemsetD8Async},
      {commands::CuMemsetD2D16Async::kFunction, server::HandleCuMemsetD2D16Async},
      {commands::CuMemcpyDtoDAsync::kFunction, server::HandleCuMemcpyDtoDAsync},
      {commands::CuEventRecordWithFlags::kFunction, server::HandleCuEventRecordWithFlags},
      {commands::CuEventElapsedTime::kFunction, server::HandleCuEventElapsedTime},
      {commands::CuCtxGetLimit::kFunction, server::HandleCuCtxGetLimit},
      {commands::CuStreamCreateWithPriority::kFunction, server::HandleCuStreamCreateWithPriority},
      {commands::CuStreamWriteValue32::kFunction, server::HandleCuStreamWriteValue32},
      {commands::CuStreamDestroy::kFunction, server::HandleCuStreamDestroy},
  };
  for (const auto& entry : table) {
    if (entry.function != function) continue;
    TestContext context(server::MockDriver::current->table());
    Reader reader(bytes);
    malformed = false;
    const CUresult result = entry.handler(context, reader);
    auto reply = context.reply_bytes();
    return {result, {reply.begin(), reply.end()}};
  }
  FAIL("no handler for this function");
  return {};
}

CUstream Stream(uint64_t bits) {
  return reinterpret_cast<CUstream>(bits);
}
CUevent Event(uint64_t bits) {
  return reinterpret_cast<CUevent>(bits);
}

}  // namespace

// ---- stand-ins for the client's Call ------------------------------------------------------------

namespace interposer {

Call::Call(Function function, Need) : function_(function) {}
bool Call::Out(const void* pointer) {
  return pointer != nullptr || Refuse(CUDA_ERROR_INVALID_VALUE);
}
bool Call::Stream(CUstream stream, bool per_thread, uint64_t* wire) {
  *wire = stream == nullptr && per_thread ? kPerThreadStream : reinterpret_cast<uint64_t>(stream);
  return true;
}
bool Call::Event(CUevent event, uint64_t* wire) {
  *wire = reinterpret_cast<uint64_t>(event);
  return event != nullptr || Refuse(CUDA_ERROR_INVALID_HANDLE);
}
bool Call::DeviceRange(CUdeviceptr address, uint64_t bytes) {
  return InMemory(address, bytes) || Refuse(CUDA_ERROR_INVALID_VALUE);
}
bool Call::DeviceRange2D(CUdeviceptr address, uint64_t pitch, uint64_t width, uint64_t height) {
  return InMemory2D(address, pitch, width, height) || Refuse(CUDA_ERROR_INVALID_VALUE);
}
CUresult Call::PostBytes(uint32_t function, const void* command, size_t bytes,
                         std::span<const std::span<const std::byte>>, uint32_t cost) {
  auto* data = static_cast<const std::byte*>(command);
  sent = {function, cost, true, {data, data + bytes}};
  return CUDA_SUCCESS;
}
CUresult Call::InvokeBytes(uint32_t function, const void* command, size_t bytes,
                           std::span<const std::span<const std::byte>>, void* reply,
                           size_t reply_bytes, std::vector<std::byte>*, PieceServer*) {
  auto* data = static_cast<const std::byte*>(command);
  sent = {function, 0, false, {data, data + bytes}};
  Answer answer = Serve(function, sent.bytes);
  if (answer.reply.size() >= reply_bytes && reply != nullptr) {
    memcpy(reply, answer.reply.data(), reply_bytes);
  }
  return answer.result;
}

}  // namespace interposer

// ---- stand-ins for the server's CallContext -----------------------------------------------------

namespace server {

CUresult CallContext::Malformed(const char*) {
  malformed = true;
  return CUDA_ERROR_UNKNOWN;
}
bool CallContext::Stream(uint64_t wire, CUstream* stream) {
  *stream = penstock::Stream(wire);
  return true;
}
bool CallContext::Event(uint64_t wire, CUevent* event) {
  *event = penstock::Event(wire);
  return true;
}
bool CallContext::DeviceRange(CUdeviceptr address, uint64_t bytes) {
  return InMemory(address, bytes) || Refuse(CUDA_ERROR_INVALID_VALUE);
}
bool CallContext::DeviceRange2D(CUdeviceptr address, uint64_t pitch, uint64_t width,
                                uint64_t height) {
  return InMemory2D(address, pitch, width, height) || Refuse(CUDA_ERROR_INVALID_VALUE);
}
struct Adopted {
  uint64_t wire;
  CUresult result;
  CUstream stream;
} adopted;
CUresult CallContext::AdoptStream(uint64_t wire, CUresult result, CUstream stream) {
  adopted = {wire, result, stream};
  return result;
}
bool CallContext::TakeStream(uint64_t wire, CUstream* stream) {
  if (wire == 0xBAD) return Refuse(CUDA_ERROR_INVALID_HANDLE);
  *stream = penstock::Stream(wire + 1);
  return true;
}

}  // namespace server

namespace {

using Arguments = std::vector<uint64_t>;

TEST_CASE("a posted row reaches the driver with the program's arguments", "[codegen]") {
  server::MockDriver driver;
  CHECK(interposer::CuMemsetD8Async(kMemory + 16, 0xAB, 100, Stream(0x77), false) == CUDA_SUCCESS);
  CHECK(sent.posted);
  CHECK(sent.cost == 1);
  CHECK(driver.calls.empty());
  CHECK(Serve(sent.function, sent.bytes).result == CUDA_SUCCESS);
  REQUIRE(driver.calls.size() == 1);
  CHECK(driver.calls[0].name == "cuMemsetD8Async");
  CHECK(driver.calls[0].arguments == Arguments{kMemory + 16, 0xAB, 100, 0x77});
}

TEST_CASE("a synchronous row sends the stream-ordered one on the default stream", "[codegen]") {
  server::MockDriver driver;
  CHECK(interposer::CuMemsetD8(kMemory, 1, 2, false) == CUDA_SUCCESS);
  CHECK(sent.function == commands::CuMemsetD8Async::kFunction);
  Serve(sent.function, sent.bytes);
  CHECK(driver.calls.at(0).arguments == Arguments{kMemory, 1, 2, 0});
  CHECK(interposer::CuMemsetD8(kMemory, 1, 2, true) == CUDA_SUCCESS);
  Serve(sent.function, sent.bytes);
  CHECK(driver.calls.at(1).arguments == Arguments{kMemory, 1, 2, kPerThreadStream});
}

TEST_CASE("rows apart by a pitch arrive as they were given", "[codegen]") {
  server::MockDriver driver;
  CHECK(interposer::CuMemsetD2D16Async(kMemory, 512, 7, 100, 9, nullptr, false) == CUDA_SUCCESS);
  Serve(sent.function, sent.bytes);
  CHECK(driver.calls.at(0).name == "cuMemsetD2D16Async");
  CHECK(driver.calls.at(0).arguments == Arguments{kMemory, 512, 7, 100, 9, 0});
}

TEST_CASE("an address outside the allocation is refused by the client", "[codegen]") {
  server::MockDriver driver;
  sent = {};
  CHECK(interposer::CuMemsetD8Async(kMemory - 1, 0, 8, nullptr, false) == CUDA_ERROR_INVALID_VALUE);
  CHECK(interposer::CuMemsetD8Async(kMemory, 0, kMemoryBytes + 1, nullptr, false) ==
        CUDA_ERROR_INVALID_VALUE);
  // Lengths that overflow when multiplied by the size of an element.
  CHECK(interposer::CuMemsetD32Async(kMemory, 0, UINT64_MAX / 4 + 2, nullptr, false) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(interposer::CuMemsetD2D16Async(kMemory, 512, 7, UINT64_MAX / 2 + 2, 1, nullptr, false) ==
        CUDA_ERROR_INVALID_VALUE);
  // An element that does not lie on a multiple of its size.
  CHECK(interposer::CuMemsetD16Async(kMemory + 1, 0, 8, nullptr, false) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(interposer::CuMemsetD2D32Async(kMemory + 2, 512, 7, 4, 1, nullptr, false) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(sent.function == 0);
}

TEST_CASE("the server checks addresses again", "[codegen]") {
  server::MockDriver driver;
  commands::CuMemcpyDtoDAsync copy{};
  copy.dstDevice = kMemory;
  copy.srcDevice = reinterpret_cast<uint64_t>(&copy);
  copy.ByteCount = 8;
  Answer answer = Serve(copy.kFunction, std::as_bytes(std::span(&copy, 1)));
  CHECK(answer.result == CUDA_ERROR_INVALID_VALUE);
  commands::CuMemsetD2D16Async fill{};
  fill.dstDevice = kMemory;
  fill.dstPitch = 1;
  fill.Width = UINT64_MAX / 2 + 2;
  fill.Height = 1;
  CHECK(Serve(fill.kFunction, std::as_bytes(std::span(&fill, 1))).result ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(driver.calls.empty());
}

TEST_CASE("a frame too short or too long ends the session and calls nothing", "[codegen]") {
  server::MockDriver driver;
  commands::CuMemsetD8Async command{};
  auto bytes = std::as_bytes(std::span(&command, 1));
  Serve(command.kFunction, bytes.first(bytes.size() - 8));
  CHECK(malformed);
  std::vector<std::byte> longer(bytes.begin(), bytes.end());
  longer.resize(longer.size() + 8);
  Serve(command.kFunction, longer);
  CHECK(malformed);
  CHECK(driver.calls.empty());
}

TEST_CASE("outputs come back, numbers and floats alike", "[codegen]") {
  server::MockDriver driver;
  driver.hooks["cuCtxGetLimit"] = [](const Arguments& a) {
    *reinterpret_cast<size_t*>(a[0]) = 0x123456789AULL;
    return CUDA_SUCCESS;
  };
  size_t limit = 0;
  CHECK(interposer::CuCtxGetLimit(&limit, CU_LIMIT_PRINTF_FIFO_SIZE) == CUDA_SUCCESS);
  CHECK(limit == 0x123456789AULL);
  CHECK(driver.calls.at(0).arguments.at(1) == CU_LIMIT_PRINTF_FIFO_SIZE);

  driver.hooks["cuEventElapsedTime_v2"] = [](const Arguments& a) {
    CHECK(a[1] == 0x11);
    CHECK(a[2] == 0x22);
    *reinterpret_cast<float*>(a[0]) = 1.625f;
    return CUDA_SUCCESS;
  };
  float ms = 0;
  CHECK(interposer::CuEventElapsedTime(&ms, Event(0x11), Event(0x22)) == CUDA_SUCCESS);
  CHECK(ms == 1.625f);
}

TEST_CASE("a failed call leaves outputs alone and returns the driver's error", "[codegen]") {
  server::MockDriver driver;
  driver.hooks["cuEventElapsedTime_v2"] = [](const Arguments&) { return CUDA_ERROR_NOT_READY; };
  float ms = -4;
  CHECK(interposer::CuEventElapsedTime(&ms, Event(1), Event(2)) == CUDA_ERROR_NOT_READY);
  CHECK(ms == -4);
  CHECK(interposer::CuEventElapsedTime(nullptr, Event(1), Event(2)) == CUDA_ERROR_INVALID_VALUE);
  CHECK(interposer::CuEventElapsedTime(&ms, nullptr, Event(2)) == CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("flags that the row does not name are refused", "[codegen]") {
  server::MockDriver driver;
  CHECK(interposer::CuEventRecordWithFlags(Event(5), nullptr, 2, false) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(interposer::CuEventRecordWithFlags(Event(5), nullptr, 1, true) == CUDA_SUCCESS);
  Serve(sent.function, sent.bytes);
  CHECK(driver.calls.at(0).arguments == Arguments{5, kPerThreadStream, 1});
}

TEST_CASE("a value written by a stream lies in an allocation", "[codegen]") {
  server::MockDriver driver;
  CHECK(interposer::CuStreamWriteValue32(Stream(3), kMemory + 4, 99, 0, false) == CUDA_SUCCESS);
  Serve(sent.function, sent.bytes);
  CHECK(driver.calls.at(0).name == "cuStreamWriteValue32_v2");
  CHECK(driver.calls.at(0).arguments == Arguments{3, kMemory + 4, 99, 0});
  CHECK(interposer::CuStreamWriteValue32(Stream(3), kMemory + kMemoryBytes - 2, 99, 0, false) ==
        CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a created object is adopted under the client's handle, a failure too", "[codegen]") {
  server::MockDriver driver;
  driver.hooks["cuStreamCreateWithPriority"] = [](const Arguments& a) {
    *reinterpret_cast<CUstream*>(a[0]) = Stream(0xABC);
    return CUDA_SUCCESS;
  };
  commands::CuStreamCreateWithPriority command{};
  command.phStream = 0x5600000100000004;
  command.flags = 1;
  command.priority = -3;
  auto bytes = std::as_bytes(std::span(&command, 1));
  CHECK(Serve(command.kFunction, bytes).result == CUDA_SUCCESS);
  CHECK(server::adopted.wire == command.phStream);
  CHECK(server::adopted.stream == Stream(0xABC));
  CHECK(static_cast<int>(driver.calls.at(0).arguments.at(2)) == -3);

  driver.hooks["cuStreamCreateWithPriority"] = [](const Arguments&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  };
  CHECK(Serve(command.kFunction, bytes).result == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(server::adopted.result == CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_CASE("a destroyed object is taken out before the driver destroys it", "[codegen]") {
  server::MockDriver driver;
  commands::CuStreamDestroy command{};
  command.hStream = 0x40;
  auto bytes = std::as_bytes(std::span(&command, 1));
  CHECK(Serve(command.kFunction, bytes).result == CUDA_SUCCESS);
  CHECK(driver.calls.at(0).name == "cuStreamDestroy_v2");
  CHECK(driver.calls.at(0).arguments == Arguments{0x41});
  command.hStream = 0xBAD;
  CHECK(Serve(command.kFunction, bytes).result == CUDA_ERROR_INVALID_HANDLE);
  CHECK(driver.calls.size() == 1);
}

}  // namespace
}  // namespace penstock
