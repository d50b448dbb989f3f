#include "server/worker/device_memory.h"

#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/unique_fd.h"

namespace penstock::server {
namespace {

constexpr uint64_t kTestOffset = 4096 + 24;  // neither at the beginning nor at a page
constexpr uint64_t kAround = 512;            // looked at on either side
constexpr size_t kTestBytes = transport::Loopback::kMostBytes - 100;
constexpr int kTestMs = 5000;
constexpr std::byte kUntouched{0xa7};

Status Check(const Driver& driver, CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return {};
  return Fail(Code::kSystem, std::string(what) + " fails with " + ErrorName(driver, result) + ".");
}

// Bytes that no earlier test, no other NIC and no forgotten memory has in their place.
std::vector<std::byte> Noise(uint64_t seed) {
  std::vector<std::byte> bytes(kTestBytes);
  uint64_t word = seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(NowNanoseconds());
  for (std::byte& byte : bytes) {
    word = word * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::byte>(word >> 56);
  }
  return bytes;
}

class Stream {
 public:
  explicit Stream(const Driver& driver) : driver_(driver) {}
  ~Stream() {
    if (stream_ != nullptr) driver_.cuStreamDestroy_v2(stream_);
  }
  Status Make() {
    return Check(driver_, driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING),
                 "cuStreamCreate");
  }
  Status Finish() {
    return Check(driver_, driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }
  CUstream get() const { return stream_; }

 private:
  const Driver& driver_;
  CUstream stream_ = nullptr;
};

Status TestWrites(const Driver& driver, transport::MemoryRegion& region,
                  transport::Loopback& loopback, Stream& stream, CUdeviceptr scratch, uint64_t seed,
                  std::optional<CUflushGPUDirectRDMAWritesScope> flush) {
  const uint64_t looked_at = kTestBytes + 2 * kAround;
  const CUdeviceptr begin = scratch + kTestOffset - kAround;
  RETURN_IF_ERROR(Check(driver,
                        driver.cuMemsetD8Async(begin, static_cast<unsigned char>(kUntouched),
                                               looked_at, stream.get()),
                        "cuMemsetD8Async"));
  RETURN_IF_ERROR(stream.Finish());
  const std::vector<std::byte> wanted = Noise(seed);
  RETURN_IF_ERROR(loopback.Write(region, kTestOffset, wanted, Deadline::After(kTestMs)));
  if (flush) {
    RETURN_IF_ERROR(Check(driver,
                          driver.cuFlushGPUDirectRDMAWrites(
                              CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, *flush),
                          "cuFlushGPUDirectRDMAWrites"));
  }
  std::vector<std::byte> got(looked_at);
  RETURN_IF_ERROR(Check(driver,
                        driver.cuMemcpyDtoHAsync_v2(got.data(), begin, looked_at, stream.get()),
                        "cuMemcpyDtoHAsync"));
  RETURN_IF_ERROR(stream.Finish());
  std::vector<std::byte> expected(looked_at, kUntouched);
  std::memcpy(expected.data() + kAround, wanted.data(), wanted.size());
  if (got == expected) return {};
  return Fail(Code::kUnavailable, "What a NIC (" + loopback.name() +
                                      ") writes to the device is not what the device reads.");
}

Status TestReads(const Driver& driver, transport::MemoryRegion& region,
                 transport::Loopback& loopback, Stream& stream, CUdeviceptr scratch,
                 uint64_t seed) {
  const std::vector<std::byte> wanted = Noise(seed);
  RETURN_IF_ERROR(Check(driver,
                        driver.cuMemcpyHtoDAsync_v2(scratch + kTestOffset, wanted.data(),
                                                    wanted.size(), stream.get()),
                        "cuMemcpyHtoDAsync"));
  RETURN_IF_ERROR(stream.Finish());
  std::vector<std::byte> got(wanted.size());
  RETURN_IF_ERROR(loopback.Read(region, kTestOffset, got, Deadline::After(kTestMs)));
  if (got == wanted) return {};
  return Fail(Code::kUnavailable, "What a NIC (" + loopback.name() +
                                      ") reads from the device is not what the device wrote.");
}

}  // namespace

Result<std::unique_ptr<transport::MemoryRegion>> RegisterAllocation(
    const Driver& driver, transport::Connection& connection, CUdeviceptr begin, uint64_t bytes) {
  // The driver must know the same allocation, or its dma-buf would be of something else.
  CUdeviceptr base = 0;
  size_t size = 0;
  RETURN_IF_ERROR(
      Check(driver, driver.cuMemGetAddressRange_v2(&base, &size, begin), "cuMemGetAddressRange"));
  if (base != begin || size < bytes) {
    return Fail(Code::kInternal, "The driver knows another allocation (" + std::to_string(size) +
                                     " bytes) than the session (" + std::to_string(bytes) +
                                     " bytes).");
  }
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (begin % page != 0) {
    return Fail(Code::kInvalidArgument, "The allocation shares its first page with another one.");
  }
  const uint64_t whole = (bytes + page - 1) / page * page;
  int exported = -1;
  const CUresult result = driver.cuMemGetHandleForAddressRange(
      &exported, begin, whole, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (result == CUDA_ERROR_INVALID_VALUE && whole != bytes) {
    return Fail(Code::kInvalidArgument, "The allocation shares its last page with another one.");
  }
  RETURN_IF_ERROR(Check(driver, result, "cuMemGetHandleForAddressRange"));
  const UniqueFd dmabuf(exported);
  return connection.RegisterDevice(begin, bytes, dmabuf.get(), 0);
}

Status TestDevice(const Driver& driver, transport::Connection& connection, CUdeviceptr scratch,
                  std::optional<CUflushGPUDirectRDMAWritesScope> flush) {
  Stream stream(driver);
  RETURN_IF_ERROR(stream.Make());
  ASSIGN_OR_RETURN(auto region, RegisterAllocation(driver, connection, scratch, kScratchBytes));
  ASSIGN_OR_RETURN(auto loopbacks, connection.OpenLoopbacks(Deadline::After(kTestMs)));
  if (loopbacks.empty()) return Fail(Code::kUnsupported, "The session has no NIC.");
  uint64_t seed = 1;
  for (const auto& loopback : loopbacks) {
    RETURN_IF_ERROR(TestWrites(driver, *region, *loopback, stream, scratch, seed++, flush));
    RETURN_IF_ERROR(TestReads(driver, *region, *loopback, stream, scratch, seed++));
  }
  return {};
}

}  // namespace penstock::server
