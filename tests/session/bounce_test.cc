// Copies of pageable memory, where registering it is dear and where it is not: the same bytes, the
// same calls; and where it is dear, each byte copied once.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/session/joined.h"

using namespace penstock;

namespace {

constexpr size_t kInline = kMaxInlineCopyBytes, kSlot = kBounceSlotBytes;
constexpr std::byte kGuard{0xee};

std::vector<std::byte> Pattern(size_t bytes, uint32_t seed) {
  std::vector<std::byte> pattern(bytes);
  uint32_t state = seed * 7919 + 1;
  for (std::byte& byte : pattern) {
    byte = static_cast<std::byte>((state = state * 1664525 + 1013904223) >> 24);
  }
  return pattern;
}

// Catch's checks belong to the test's own thread; what others find goes here.
std::atomic<int> g_failures{0};
void Expect(bool good, const char* what, size_t detail) {
  if (good) return;
  if (g_failures++ == 0) fprintf(stderr, "%s (%zu)\n", what, detail);
}
void Good(CUresult result, const char* what) {
  Expect(result == CUDA_SUCCESS, what, static_cast<size_t>(result));
}
#define GOOD(call) Good((call), #call)

CUdeviceptr Allocate(size_t bytes) {
  CUdeviceptr address = 0;
  GOOD(cuMemAlloc_v2(&address, bytes));
  return address;
}

// There and back, from and to addresses without any alignment.
void RoundTrip(size_t bytes, uint32_t seed) {
  const CUdeviceptr device = Allocate(bytes + 1);
  std::vector<std::byte> sent = Pattern(bytes + 1, seed);
  std::vector<std::byte> got(bytes + 2, kGuard);
  GOOD(cuMemcpyHtoD_v2(device, sent.data() + 1, bytes));
  GOOD(cuMemcpyDtoH_v2(got.data() + 1, device, bytes));
  Expect(memcmp(sent.data() + 1, got.data() + 1, bytes) == 0, "A copy brings other bytes", bytes);
  Expect(got.front() == kGuard && got.back() == kGuard, "A copy writes beside its place", bytes);
  GOOD(cuMemFree_v2(device));
}

}  // namespace

TEST_CASE("pageable copies of every size arrive, with the same calls on every path",
          "[session][bounce]") {
  const std::vector<size_t> sizes = {
      0,         1,         kInline - 1,   kInline,       kInline + 1, kSlot - 1,     kSlot,
      kSlot + 1, (1 << 20), (1 << 20) + 1, (4 << 20) - 1, 4 << 20,     (4 << 20) + 1, 40 << 20};
  std::vector<CallCounts> expected;
  for (const Carrier path : {Carrier::kPlain, Carrier::kDear, Carrier::kRdma, Carrier::kDirect}) {
    INFO(NameOf(path));
    g_failures = 0;
    Joined joined(path);
    std::vector<CallCounts> counts;
    uint64_t bulk = 0, direct = 0;
    joined.Run([&] {
      for (size_t i = 0; i < sizes.size(); ++i) {
        RoundTrip(sizes[i], static_cast<uint32_t>(i));
        counts.push_back(Joined::CountsOf(Function::kCuMemcpyHtoD));
        counts.push_back(Joined::CountsOf(Function::kCuMemcpyDtoH));
        if (sizes[i] > kInline) bulk += sizes[i];
        if (sizes[i] >= server::kLeastDirectBytes) direct += 2 * sizes[i];
      }
    });
    CHECK(g_failures == 0);
    CHECK(joined.counters().bulk_sent == bulk);
    CHECK(joined.counters().bulk_received == bulk);
    CHECK(joined.moved_directly() == (path == Carrier::kDirect ? direct : 0));
    if (path == Carrier::kPlain) {
      expected = counts;
      continue;
    }
    CHECK(counts == expected);
    CHECK(joined.counters().bulk_copies == 2 * bulk);
  }
}

TEST_CASE("rows with gaps on either side arrive, and no gap is written", "[session][bounce]") {
  const Carrier path = GENERATE(Carrier::kPlain, Carrier::kDear, Carrier::kRdma, Carrier::kDirect);
  INFO(NameOf(path));
  struct Rows {
    size_t width, height, host_pitch;
    bool packed_device;
  };
  g_failures = 0;
  Joined joined(path);
  uint64_t bytes = 0;
  joined.Run([&] {
    for (const Rows& rows : {Rows{3000, 1500, 3001, false}, Rows{3072, 1500, 3100, true},
                             Rows{kSlot - 1, 5, kSlot, false}, Rows{kSlot + 1, 5, kSlot + 9, true},
                             Rows{2'500'003, 2, 2'500'010, false}, Rows{1, 40'000, 3, true}}) {
      CUdeviceptr device = 0;
      size_t pitch = rows.width;
      if (rows.packed_device) {
        device = Allocate(rows.width * rows.height);
      } else {
        GOOD(cuMemAllocPitch_v2(&device, &pitch, rows.width, rows.height, 4));
      }
      const std::vector<std::byte> sent = Pattern(rows.host_pitch * rows.height, 5);
      std::vector<std::byte> got(sent.size(), kGuard);
      CUDA_MEMCPY2D copy = {};
      copy.srcMemoryType = CU_MEMORYTYPE_HOST;
      copy.srcHost = sent.data();
      copy.srcPitch = rows.host_pitch;
      copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
      copy.dstDevice = device;
      copy.dstPitch = pitch;
      copy.WidthInBytes = rows.width;
      copy.Height = rows.height;
      GOOD(cuMemcpy2D_v2(&copy));
      std::swap(copy.srcMemoryType, copy.dstMemoryType);
      std::swap(copy.srcPitch, copy.dstPitch);
      copy.srcDevice = device;
      copy.dstHost = got.data();
      GOOD(cuMemcpy2D_v2(&copy));
      bool same = true, clean = true;
      for (size_t row = 0; row < rows.height; ++row) {
        const size_t at = row * rows.host_pitch;
        same = same && memcmp(&sent[at], &got[at], rows.width) == 0;
        for (size_t i = at + rows.width; i < at + rows.host_pitch; ++i) {
          clean = clean && got[i] == kGuard;
        }
      }
      Expect(same, "Rows bring other bytes", rows.width);
      Expect(clean, "A gap between rows is written", rows.width);
      bytes += rows.width * rows.height;
      GOOD(cuMemFree_v2(device));
    }
  });
  CHECK(g_failures == 0);
  CHECK(joined.counters().bulk_sent == bytes);
  CHECK(joined.counters().bulk_received == bytes);
  if (path != Carrier::kPlain) CHECK(joined.counters().bulk_copies == 2 * bytes);
}

TEST_CASE("volumes with gaps between rows and slices arrive", "[session][bounce]") {
  const Carrier path = GENERATE(Carrier::kPlain, Carrier::kDear, Carrier::kRdma);
  INFO(NameOf(path));
  g_failures = 0;
  Joined joined(path);
  constexpr size_t kWidth = 3000, kHeight = 130, kDepth = 11, kPitch = 3007, kRows = 133;
  constexpr uint64_t kBytes = kWidth * kHeight * kDepth;
  joined.Run([&] {
    const CUdeviceptr device = Allocate(kWidth * (kHeight + 1) * kDepth);
    const std::vector<std::byte> sent = Pattern(kPitch * kRows * kDepth, 8);
    std::vector<std::byte> got(sent.size(), kGuard), expected(sent.size(), kGuard);
    for (size_t row = 0; row < kHeight * kDepth; ++row) {
      const size_t at = (row / kHeight * kRows + row % kHeight) * kPitch;
      memcpy(&expected[at], &sent[at], kWidth);
    }
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = sent.data();
    copy.srcPitch = kPitch;
    copy.srcHeight = kRows;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = device;
    copy.dstPitch = kWidth;
    copy.dstHeight = kHeight + 1;
    copy.WidthInBytes = kWidth;
    copy.Height = kHeight;
    copy.Depth = kDepth;
    GOOD(cuMemcpy3D_v2(&copy));
    std::swap(copy.srcMemoryType, copy.dstMemoryType);
    std::swap(copy.srcPitch, copy.dstPitch);
    std::swap(copy.srcHeight, copy.dstHeight);
    copy.srcDevice = device;
    copy.dstHost = got.data();
    GOOD(cuMemcpy3D_v2(&copy));
    Expect(got == expected, "A volume brings other bytes", kBytes);
  });
  CHECK(g_failures == 0);
  CHECK(joined.counters().bulk_sent == kBytes);
  CHECK(joined.counters().bulk_received == kBytes);
  if (path != Carrier::kPlain) CHECK(joined.counters().bulk_copies == 2 * kBytes);
  // One call each, however many slices.
  CHECK(Joined::CountsOf(Function::kCuMemcpy3D).round_trips == 2);
}

TEST_CASE("pinned memory is copied by nobody", "[session][bounce]") {
  const Carrier path = GENERATE(Carrier::kDear, Carrier::kRdma, Carrier::kDirect);
  INFO(NameOf(path));
  g_failures = 0;
  Joined joined(path);
  constexpr size_t kBytes = 5 << 20;
  joined.Run([&] {
    const CUdeviceptr device = Allocate(kBytes);
    const std::vector<std::byte> pattern = Pattern(kBytes, 3);
    void* pinned = nullptr;
    GOOD(cuMemHostAlloc(&pinned, kBytes, 0));
    memcpy(pinned, pattern.data(), kBytes);
    GOOD(cuMemcpyHtoD_v2(device, pinned, kBytes));
    memset(pinned, 0, kBytes);
    GOOD(cuMemcpyDtoH_v2(pinned, device, kBytes));
    Expect(memcmp(pinned, pattern.data(), kBytes) == 0, "Pinned memory gets other bytes", kBytes);
    GOOD(cuMemFreeHost(pinned));
  });
  CHECK(g_failures == 0);
  CHECK(joined.counters().bulk_copies == 0);
  CHECK(joined.counters().bulk_sent == kBytes);
  CHECK(joined.counters().bulk_received == kBytes);
}

TEST_CASE("threads and streams copy at once, each its own bytes", "[session][bounce]") {
  const Carrier path = GENERATE(Carrier::kDear, Carrier::kRdma, Carrier::kDirect);
  INFO(NameOf(path));
  g_failures = 0;
  Joined joined(path);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 6; ++t) {
    threads.emplace_back([&joined, t] {
      joined.Run([t] {
        CUstream stream = nullptr;
        GOOD(cuStreamCreate(&stream, t % 2 == 0 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
        for (const size_t bytes : {size_t{3 << 20}, kSlot + t, size_t{6'000'000} + t}) {
          const CUdeviceptr device = Allocate(bytes);
          std::vector<std::byte> memory = Pattern(bytes, t);
          const std::vector<std::byte> sent = memory;
          std::vector<std::byte> got(bytes);
          GOOD(cuMemcpyHtoDAsync_v2(device, memory.data(), bytes, stream));
          // It was pageable: since the call has returned, it is the program's again.
          memset(memory.data(), 0x55, bytes);
          GOOD(cuMemcpyDtoHAsync_v2(got.data(), device, bytes, stream));
          // And this one is complete.
          Expect(got == sent, "A thread gets other bytes", bytes);
          GOOD(cuMemFree_v2(device));
        }
        GOOD(cuStreamDestroy_v2(stream));
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(g_failures == 0);
}

TEST_CASE("a session that ends in the middle of copies fails them", "[session][bounce]") {
  const Carrier path = GENERATE(Carrier::kDear, Carrier::kRdma, Carrier::kDirect);
  INFO(NameOf(path));
  g_failures = 0;
  Joined joined(path);
  std::atomic<int> copying{0}, lost{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      joined.Run([&, t] {
        constexpr size_t kBytes = 8 << 20;
        const CUdeviceptr device = Allocate(kBytes);
        std::vector<std::byte> memory(kBytes);
        CUresult result = CUDA_SUCCESS;
        for (int i = 0; result == CUDA_SUCCESS; ++i) {
          result = (i + t) % 2 == 0 ? cuMemcpyDtoH_v2(memory.data(), device, kBytes)
                                    : cuMemcpyHtoD_v2(device, memory.data(), kBytes);
          if (i == 1) ++copying;
        }
        lost += result == CUDA_ERROR_DEVICE_UNAVAILABLE;
      });
    });
  }
  while (copying < 3) std::this_thread::yield();
  joined.HangUp();
  for (std::thread& thread : threads) thread.join();
  CHECK(g_failures == 0);
  CHECK(lost == 3);
}

TEST_CASE("a large image goes through the bounce slots", "[session][bounce]") {
  std::string ptx =
      ".version 7.5\n.target sm_75\n.address_size 64\n"
      ".visible .global .align 4 .u32 marker = 77;\n.visible .entry first() { ret; }\n";
  ptx += "// " + std::string(kSlot * 3, 'x') + "\n.visible .entry last() { ret; }\n";
  std::vector<CallCounts> expected;
  for (const Carrier path : {Carrier::kPlain, Carrier::kDear, Carrier::kRdma, Carrier::kDirect}) {
    INFO(NameOf(path));
    g_failures = 0;
    Joined joined(path);
    std::vector<CallCounts> counts;
    joined.Run([&] {
      CUmodule module = nullptr;
      CUfunction function = nullptr;
      CUdeviceptr marker = 0;
      size_t bytes = 0;
      uint32_t value = 0;
      GOOD(cuModuleLoadData(&module, ptx.c_str()));
      GOOD(cuModuleGetFunction(&function, module, "last"));
      GOOD(cuModuleGetGlobal_v2(&marker, &bytes, module, "marker"));
      GOOD(cuMemcpyDtoH_v2(&value, marker, sizeof value));
      Expect(value == 77, "The image has another value", value);
      GOOD(cuModuleUnload(module));
      counts.push_back(Joined::CountsOf(Function::kCuModuleLoadData));
    });
    CHECK(g_failures == 0);
    CHECK(joined.counters().bulk_sent == ptx.size() + 1);
    CHECK(joined.counters().bulk_copies == (path == Carrier::kPlain ? 0 : ptx.size() + 1));
    if (path == Carrier::kPlain) {
      expected = counts;
    } else {
      CHECK(counts == expected);
    }
  }
}
