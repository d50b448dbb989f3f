// Prints how many devices there are.
#include "tests/e2e/programs/driver_program.h"

int main() {
  int count = -1;
  CHECK(cuInit(0));
  CHECK(cuDeviceGetCount(&count));
  printf("%d\n", count);
  return 0;
}
