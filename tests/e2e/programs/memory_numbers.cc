// The numbers of cuMemGetInfo are never nonsense: over 10,000 random allocations and frees the free
// memory never exceeds the total, what is in use is at least what this program holds, and in the
// end all of it is back. A request for more than there is fails, and harms nothing.
#include "tests/e2e/programs/program.h"

int main() {
  StartWatchdog();
  constexpr int kSteps = 10'000;
  constexpr size_t kMost = 3 << 20, kSlack = 64 << 20;  // a driver may keep some for later
  Gpu gpu;
  struct Piece {
    CUdeviceptr address;
    size_t bytes;
  };
  std::vector<Piece> held;
  uint64_t state = 12345;
  auto random = [&state](size_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>(state >> 33) % below;
  };
  size_t first_free = 0, total = 0, in_hand = 0;
  CHECK(cuMemGetInfo(&first_free, &total));
  EXPECT(first_free <= total, "(%zu) of (%zu) bytes are free.", first_free, total);
  for (int step = 0; step < kSteps; ++step) {
    if (held.size() < 4 || (held.size() < 60 && random(2) == 0)) {
      const size_t bytes = 1 + random(random(8) == 0 ? kMost : 10'000);
      CUdeviceptr address = 0;
      CHECK(cuMemAlloc(&address, bytes));
      EXPECT(address % 256 == 0, "The address (0x%llx) is not aligned.", address);
      for (const Piece& other : held) {
        EXPECT(address + bytes <= other.address || other.address + other.bytes <= address,
               "Two allocations overlap.");
      }
      held.push_back({address, bytes});
      in_hand += bytes;
    } else {
      const size_t which = random(held.size());
      CHECK(cuMemFree(held[which].address));
      in_hand -= held[which].bytes;
      held[which] = held.back();
      held.pop_back();
    }
    if (step % 50 == 0) {
      size_t free_now = 0, total_now = 0;
      CHECK(cuMemGetInfo(&free_now, &total_now));
      EXPECT(total_now == total, "The total changes from (%zu) to (%zu).", total, total_now);
      EXPECT(free_now <= first_free && first_free - free_now + kSlack >= in_hand,
             "(%zu) of (%zu) bytes are free while (%zu) are held.", free_now, first_free, in_hand);
    }
    if (step % 1000 == 0) {
      CUdeviceptr address = 0;
      EXPECT_CODE(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&address, total + (1 << 20)));
    }
  }
  for (const Piece& piece : held) CHECK(cuMemFree(piece.address));
  CHECK(cuCtxSynchronize());
  size_t last_free = 0;
  CHECK(cuMemGetInfo(&last_free, &total));
  EXPECT(last_free + kSlack >= first_free && last_free <= total,
         "(%zu) bytes are free in the end, (%zu) were at the start.", last_free, first_free);
  printf("memory_numbers: %d steps, ok\n", kSteps);
}
