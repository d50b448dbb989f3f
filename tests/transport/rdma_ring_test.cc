// The ring of frames that are kept until the peer has them, and how it cuts them into packets.
#include "transport/rdma/retained_ring.h"

#include <catch2/catch.hpp>
#include <deque>
#include <random>
#include <vector>

using penstock::transport::rdma::RetainedRing;

namespace {

uint8_t Byte(uint32_t serial, uint32_t at) {
  return static_cast<uint8_t>(serial * 37 + at * 11);
}

}  // namespace

TEST_CASE("random frames come out of their packets as they went in", "[rdma][ring]") {
  constexpr uint32_t kLargest = 3000;
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    const uint32_t room = 8 * (8 + random() % 200);
    const size_t capacity = RetainedRing::CapacityFor(8192, kLargest);
    std::vector<std::byte> memory(capacity);
    RetainedRing ring(memory.data(), capacity);
    std::deque<RetainedRing::Run> kept;  // packets that the peer has not acknowledged
    std::vector<std::byte> stream, expected;
    uint32_t serial = 0;
    bool in_frame = false;
    for (int step = 0; step < 5000; ++step) {
      switch (random() % 3) {
        case 0: {
          const uint32_t size = 8 + random() % (random() % 8 == 0 ? kLargest - 8 : 200);
          std::byte* slot = ring.Reserve(size);
          if (slot == nullptr) break;
          std::memcpy(slot, &size, sizeof size);
          for (uint32_t i = 4; i < size; ++i) slot[i] = std::byte{Byte(serial, i)};
          expected.insert(expected.end(), slot, slot + size);
          expected.resize((expected.size() + 7) / 8 * 8);
          ring.Commit(size);
          ++serial;
          break;
        }
        case 1: {
          if (ring.all_cut()) break;
          const RetainedRing::Run run = ring.Next(room);
          REQUIRE(run.bytes > 0);
          REQUIRE(run.bytes <= room);
          REQUIRE(run.offset + run.bytes <= capacity);
          ring.Cut(run);
          kept.push_back(run);
          break;
        }
        default:
          // The packet's bytes are still what they were when it was cut.
          if (kept.empty()) break;
          const RetainedRing::Run run = kept.front();
          kept.pop_front();
          const std::byte* bytes = memory.data() + run.offset;
          // A frame begins in the middle of a packet only if it ends there as well.
          uint32_t at = 0;
          if (!in_frame) {
            while (at < run.bytes) {
              uint32_t length;
              std::memcpy(&length, bytes + at, sizeof length);
              const uint64_t padded = RetainedRing::PadTo8(length);
              if (padded > run.bytes - at) {
                REQUIRE(at == 0);
                in_frame = true;
                break;
              }
              at += static_cast<uint32_t>(padded);
            }
          } else if (run.frames == 1) {
            in_frame = false;
          }
          stream.insert(stream.end(), bytes, bytes + run.bytes);
          ring.Release(run.end);
      }
    }
    REQUIRE(serial > 100);
    REQUIRE(stream.size() > 10'000);
    REQUIRE(stream.size() <= expected.size());
    CHECK(std::memcmp(stream.data(), expected.data(), stream.size()) == 0);
  }
}
