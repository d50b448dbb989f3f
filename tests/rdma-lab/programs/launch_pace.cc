// Launches a small kernel COUNT times, with a pause of PAUSE_MS after each. How the launches were
// packed is in the statistics.
//
// launch_pace COUNT PAUSE_MS
#include <unistd.h>

#include "tests/e2e/programs/driver_program.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const unsigned count = static_cast<unsigned>(atoi(argv[1]));
  const int pause_ms = atoi(argv[2]);
  AddProgram program;
  CUdeviceptr data;
  CHECK(cuMemAlloc(&data, sizeof(unsigned)));
  CHECK(cuMemsetD32(data, 0, 1));
  CHECK(cuCtxSynchronize());
  for (unsigned i = 0; i < count; ++i) {
    CHECK(program.Add(data, 1, 3));
    if (pause_ms > 0) usleep(static_cast<useconds_t>(pause_ms) * 1000);
  }
  unsigned sum = 0;
  CHECK(cuMemcpyDtoH(&sum, data, sizeof sum));
  if (sum != 3 * count) {
    printf("(%u) launches of (%u) are seen\n", sum / 3, count);
    return 1;
  }
  printf("launch_pace: %u launches\n", count);
  return 0;
}
