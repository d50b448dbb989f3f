// Does each kind of call that must not wait for the server a hundred times; the test then reads
// from PENSTOCK_STATS how many round trips each kind took. The final copy proves that all of it
// happened.
#include "tests/e2e/programs/driver_program.h"

int main() {
  constexpr unsigned kTimes = 100, kCount = 1024;
  AddProgram program;
  CUdeviceptr data, small;
  CUstream streams[2];
  CUevent event;
  CHECK(cuMemAlloc(&data, kCount * sizeof(unsigned)));
  CHECK(cuMemAlloc(&small, 64));
  for (CUstream& stream : streams) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));

  for (unsigned i = 0; i < kTimes; ++i) {
    unsigned bytes[16];
    for (unsigned& value : bytes) value = i;
    CHECK(cuMemsetD32Async(data, i, kCount, streams[0]));
    CHECK(program.Add(data, kCount, 5, streams[0]));
    CHECK(cuEventRecord(event, streams[0]));
    CHECK(cuStreamWaitEvent(streams[1], event, 0));
    CHECK(cuMemcpyHtoD(small, bytes, sizeof(bytes)));
    CHECK(cuMemsetD8(small, static_cast<unsigned char>(i), 4));
  }
  CHECK(cuStreamSynchronize(streams[0]));
  unsigned first = 0, last = 0, set = 0, copied = 0;
  CHECK(cuMemcpyDtoH(&first, data, sizeof(first)));
  CHECK(cuMemcpyDtoH(&last, data + (kCount - 1) * sizeof(unsigned), sizeof(last)));
  CHECK(cuMemcpyDtoH(&set, small, sizeof(set)));
  CHECK(cuMemcpyDtoH(&copied, small + 60, sizeof(copied)));
  printf("%u %u %08x %u\n", first, last, set, copied);
  return 0;
}
