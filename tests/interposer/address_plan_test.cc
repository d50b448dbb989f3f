#include "interposer/core/address_plan.h"

#include <sys/mman.h>

#include <catch2/catch.hpp>

using namespace penstock;
using namespace penstock::interposer;

namespace {

constexpr uint64_t kBlock = 2ull << 20;

// An address range that is free now: mapped and unmapped again.
uint64_t FreeRange(uint64_t bytes) {
  void* const place =
      mmap(nullptr, bytes + kBlock, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(place != MAP_FAILED);
  munmap(place, bytes + kBlock);
  return (reinterpret_cast<uint64_t>(place) + kBlock - 1) / kBlock * kBlock;
}

// Can the program map one page exactly there?
bool CanMap(uint64_t address) {
  void* const wanted = reinterpret_cast<void*>(address);
  void* const got =
      mmap(wanted, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (got != MAP_FAILED) munmap(got, 4096);
  return got == wanted;
}

}  // namespace

TEST_CASE("a range lies in one allocation or in none", "[interposer][plan]") {
  AddressPlan plan(false);
  ContextRecord context;
  REQUIRE(plan.AddDevice(0x10000, 0x100, &context, false));
  REQUIRE(plan.AddDevice(0x10100, 0x100, &context, false));
  CHECK(plan.DeviceRange(0x10000, 0x100));
  CHECK(plan.DeviceRange(0x100FF, 1));
  CHECK_FALSE(plan.DeviceRange(0x100FF, 2));  // neighbours are not one allocation
  CHECK_FALSE(plan.DeviceRange(0xFFFF, 1));
  CHECK_FALSE(plan.DeviceRange(0x10200, 1));
  CHECK_FALSE(plan.DeviceRange(0x10001, UINT64_MAX));
  CHECK(plan.FindDevice(0x101FF)->base == 0x10100);
  CHECK_FALSE(plan.RemoveDevice(0x10001).has_value());
  CHECK(plan.RemoveDevice(0x10000)->bytes == 0x100);
  CHECK_FALSE(plan.IsDevice(0x10000));
  CHECK_FALSE(plan.RemoveDevice(0x10000).has_value());
}

TEST_CASE("two allocations never have the same buffer id", "[interposer][plan]") {
  AddressPlan plan(false);
  ContextRecord context;
  REQUIRE(plan.AddDevice(0x10000, 16, &context, false));
  const uint64_t first = plan.FindDevice(0x10000)->buffer_id;
  plan.RemoveDevice(0x10000);
  REQUIRE(plan.AddDevice(0x10000, 16, &context, false));
  CHECK(plan.FindDevice(0x10000)->buffer_id != first);
}

TEST_CASE("no mapping of the program can come to lie on a device pointer", "[interposer][plan]") {
  AddressPlan plan(true);
  ContextRecord context;
  const uint64_t base = FreeRange(8 * kBlock);
  REQUIRE(CanMap(base));
  REQUIRE(plan.AddDevice(base + 256, 3 * kBlock, &context, false));
  CHECK_FALSE(CanMap(base));
  CHECK_FALSE(CanMap(base + 3 * kBlock));
  CHECK(CanMap(base + 4 * kBlock));
  SECTION("and afterwards it can") {
    plan.RemoveDevice(base + 256);
    CHECK(CanMap(base));
    CHECK(CanMap(base + 3 * kBlock));
  }
  SECTION("a block is held by everything in it") {
    REQUIRE(plan.AddDevice(base + 16, 128, &context, false));
    plan.RemoveDevice(base + 256);
    CHECK_FALSE(CanMap(base));
    CHECK(CanMap(base + kBlock));
    plan.RemoveDevice(base + 16);
    CHECK(CanMap(base));
  }
  SECTION("the end of a context gives everything back") {
    plan.DropContext(&context);
    CHECK(CanMap(base));
    CHECK_FALSE(plan.IsDevice(base + 256));
  }
}

TEST_CASE("an allocation on memory of the program is refused and leaves nothing",
          "[interposer][plan]") {
  AddressPlan plan(true);
  ContextRecord context;
  const uint64_t base = FreeRange(4 * kBlock);
  void* const mine = mmap(reinterpret_cast<void*>(base + 2 * kBlock), 4096, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  REQUIRE(mine == reinterpret_cast<void*>(base + 2 * kBlock));
  *static_cast<int*>(mine) = 17;
  CHECK_FALSE(plan.AddDevice(base, 4 * kBlock, &context, false));
  CHECK(*static_cast<int*>(mine) == 17);
  CHECK_FALSE(plan.IsDevice(base));
  CHECK(CanMap(base));
  CHECK(CanMap(base + 3 * kBlock));
  munmap(mine, 4096);
}

TEST_CASE("pinned ranges do not overlap", "[interposer][plan]") {
  AddressPlan plan(false);
  std::vector<std::byte> memory(4096);
  const auto add = [&](size_t offset, size_t bytes) {
    auto allocation = std::make_shared<HostAllocation>();
    allocation->base = memory.data() + offset;
    allocation->bytes = bytes;
    return plan.AddHost(allocation);
  };
  REQUIRE(add(1000, 1000));
  CHECK_FALSE(add(1999, 1));
  CHECK_FALSE(add(500, 501));
  CHECK_FALSE(add(500, 3000));
  CHECK(add(2000, 10));
  CHECK(add(990, 10));
  CHECK(plan.FindHost(memory.data() + 1000, 1000) != nullptr);
  CHECK(plan.FindHost(memory.data() + 1001, 1000) == nullptr);
  CHECK(plan.FindHost(memory.data() + 989) == nullptr);
}
