// Copies BYTES of one kind of host memory to the device and back once, and compares. What the
// client copies in between is in the statistics.
//
// host_copies pinned|pageable BYTES
#include <cstring>
#include <vector>

#include "tests/e2e/programs/driver_program.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const bool pinned = strcmp(argv[1], "pinned") == 0;
  const size_t bytes = static_cast<size_t>(atol(argv[2]));
  AddProgram program;
  CUdeviceptr device;
  CHECK(cuMemAlloc(&device, bytes));
  std::vector<unsigned char> pageable_sent(bytes), pageable_received(bytes);
  void *sent = pageable_sent.data(), *received = pageable_received.data();
  if (pinned) {
    CHECK(cuMemHostAlloc(&sent, bytes, 0));
    CHECK(cuMemHostAlloc(&received, bytes, 0));
  }
  unsigned state = 1;
  for (size_t i = 0; i < bytes; ++i) {
    state = state * 1664525 + 1013904223;
    static_cast<unsigned char*>(sent)[i] = static_cast<unsigned char>(state >> 24);
  }
  memset(received, 0xEE, bytes);
  CHECK(cuMemcpyHtoD(device, sent, bytes));
  CHECK(cuMemcpyDtoH(received, device, bytes));
  if (memcmp(sent, received, bytes) != 0) {
    puts("wrong");
    return 1;
  }
  printf("host_copies %s: ok\n", argv[1]);
  return 0;
}
