#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "protocol/retained.h"

namespace penstock {
namespace {
std::vector<std::byte> Frame(uint64_t sequence, size_t bytes) {
  return std::vector<std::byte>(bytes, static_cast<std::byte>(sequence));
}
}  // namespace

TEST_CASE("what is not acknowledged can be sent again, in order and unchanged", "[protocol]") {
  RetainedFrames frames(1000);
  for (uint64_t n = 1; n <= 5; ++n) REQUIRE(frames.Append(n, Frame(n, 50)));
  frames.Acknowledge(2);
  std::vector<uint64_t> seen;
  frames.ForEachAfter(3, [&](uint64_t sequence, std::span<const std::byte> frame) {
    REQUIRE(frame.size() == 50);
    REQUIRE(frame[49] == static_cast<std::byte>(sequence));
    seen.push_back(sequence);
  });
  REQUIRE(seen == std::vector<uint64_t>{4, 5});
  REQUIRE(frames.oldest() == 3);
}

TEST_CASE("a full ring refuses until something is acknowledged", "[protocol]") {
  RetainedFrames frames(256);
  REQUIRE(frames.Append(1, Frame(1, 128)));
  REQUIRE(frames.Append(2, Frame(2, 128)));
  REQUIRE_FALSE(frames.HasRoom(8));
  REQUIRE_FALSE(frames.Append(3, Frame(3, 8)));
  frames.Acknowledge(1);
  REQUIRE(frames.Append(3, Frame(3, 64)));
}

TEST_CASE("random sizes and acknowledgements keep every frame whole", "[protocol]") {
  RetainedFrames frames(4096);
  std::mt19937 random(7);
  uint64_t next = 1, acknowledged = 0;
  std::vector<size_t> sizes{0};
  for (int step = 0; step < 20000; ++step) {
    const size_t bytes = 8 + random() % 600;
    if (frames.Append(next, Frame(next, bytes))) {
      sizes.push_back(bytes);
      ++next;
    } else {
      acknowledged += 1 + random() % (next - 1 - acknowledged);
      frames.Acknowledge(acknowledged);
    }
    if (step % 50 != 0) continue;
    uint64_t expected = acknowledged + 1;
    frames.ForEachAfter(acknowledged, [&](uint64_t sequence, std::span<const std::byte> frame) {
      REQUIRE(sequence == expected++);
      REQUIRE(frame.size() == sizes[sequence]);
      REQUIRE(frame.front() == static_cast<std::byte>(sequence));
      REQUIRE(frame.back() == static_cast<std::byte>(sequence));
    });
    REQUIRE(expected == next);
  }
}

}  // namespace penstock
