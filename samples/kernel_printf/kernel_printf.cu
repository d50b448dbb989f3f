// printf in a kernel: formatted on the device's side of the world, shown on this program's stdout
// at the next synchronisation.
#include "../check.h"

// One thread prints, so that the order of the lines is defined. The device's printf returns the
// number of arguments it took.
__global__ void Speak(int* arguments_taken, int lines) {
  int taken = 0;
  for (int line = 0; line < lines; ++line) {
    taken +=
        printf("line %d of %d: %6.3f %c %#x\n", line, lines, line / 8.0, 'a' + line, line * 17);
  }
  taken += printf("long %lld, unsigned %u, string %s, percent %%\n", -9'000'000'000LL,
                  4'000'000'000u, "text in the kernel");
  taken += printf("no arguments\n");
  *arguments_taken = taken;
}

int main() {
  int* device_taken;
  int taken = -1;
  const int lines = 5;
  CHECK(cudaMalloc(&device_taken, sizeof(int)));
  Speak<<<1, 1>>>(device_taken, lines);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(&taken, device_taken, sizeof(int), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(device_taken));
  const int expected = 5 * lines + 3;
  if (taken != expected) {
    fprintf(stderr, "printf took (%d) arguments instead of (%d).\n", taken, expected);
    return 1;
  }
  printf("kernel_printf: %d lines with %d arguments, ok\n", lines + 2, taken);
  return 0;
}
