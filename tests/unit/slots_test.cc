#include "pool/slots.h"

#include <catch2/catch.hpp>

namespace penstock::pool {
namespace {

using Gpus = std::vector<uint32_t>;
constexpr uint64_t kMiB = 1 << 20;

TEST_CASE("Programs share a GPU only when no other one is free", "[pool]") {
  Slots slots({.gpus = {0, 2, 5}, .slots_per_gpu = 2});
  CHECK(slots.Take(1) == Gpus{0});
  CHECK(slots.Take(1) == Gpus{2});
  CHECK(slots.Take(2) == Gpus{0, 5});  // 5 is free, and of the others 0 comes first
  CHECK(slots.taken(0) == 2);
  CHECK(slots.Take(2) == Gpus{2, 5});
  CHECK_FALSE(slots.Take(1));
  slots.Release({2});
  CHECK(slots.Take(1) == Gpus{2});
}

TEST_CASE("A program takes all of its GPUs or none", "[pool]") {
  Slots slots({.gpus = {0, 1}, .slots_per_gpu = 1});
  CHECK(slots.Take(1) == Gpus{0});
  CHECK_FALSE(slots.Take(2));
  CHECK(slots.taken(1) == 0);
  CHECK_FALSE(slots.Take(0));
  CHECK_FALSE(slots.Take(3));
  slots.Release({0});
  CHECK(slots.Take(2) == Gpus{0, 1});
}

TEST_CASE("What is released is what was taken", "[pool]") {
  Slots slots({.gpus = {3, 1}, .slots_per_gpu = 4});
  std::vector<Gpus> leases;
  for (int round = 0; round < 100; ++round) {
    while (auto lease = slots.Take(1 + round % 2)) leases.push_back(*lease);
    CHECK(slots.taken(3) + slots.taken(1) >= 7);
    while (leases.size() > static_cast<size_t>(round % 3)) {
      slots.Release(leases.back());
      leases.pop_back();
    }
  }
  for (const Gpus& lease : leases) slots.Release(lease);
  CHECK(slots.taken(3) == 0);
  CHECK(slots.taken(1) == 0);
}

TEST_CASE("A plan must fit the GPUs, contexts included", "[pool]") {
  const std::vector<GpuMemory> gpus = {{1000 * kMiB, 100 * kMiB}, {400 * kMiB, 0}};
  CHECK(CheckPlan({{0}, 2, 400 * kMiB}, gpus));
  CHECK_FALSE(CheckPlan({{0}, 2, 400 * kMiB + 1}, gpus));
  CHECK(CheckPlan({{0, 1}, 4, 100 * kMiB}, gpus));
  CHECK_FALSE(CheckPlan({{0, 1}, 5, 100 * kMiB}, gpus));
  CHECK(CheckPlan({{0}, 10, 0}, gpus));
  CHECK_FALSE(CheckPlan({{0}, 11, 0}, gpus));  // not even the contexts
  CHECK_FALSE(CheckPlan({{2}, 1, 0}, gpus));
  CHECK_FALSE(CheckPlan({{1, 1}, 1, 0}, gpus));
  const Status refused = CheckPlan({{0}, 3, 300 * kMiB}, gpus);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message.find("GPU (0) cannot hold (3) slots") == 0);
}

}  // namespace
}  // namespace penstock::pool
