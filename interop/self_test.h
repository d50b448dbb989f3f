// The CUDA runtime's validity self-test of the driver below it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "interop/export_tables.h"

namespace penstock::interop {

// What the test hashes besides the devices. All of it belongs to the calling process and thread,
// which is why the answer cannot come from a driver elsewhere.
struct SelfTestInput {
  uint32_t driver_version = 0;
  uint32_t version = 0;  // the argument of the test: 13000, 13001 or 13002 from a 13.0 runtime
  uint32_t process_id = 0;
  uint32_t thread_low = 0;              // low half of pthread_self()
  uint64_t cudart_interface_table = 0;  // addresses in this process
  uint64_t integrity_table = 0;
  uint64_t integrity_function = 0;
  uint64_t unix_seconds = 0;
};

void SelfTestAnswer(const SelfTestInput& input, const std::vector<DeviceIdentity>& devices,
                    unsigned char answer[16]);

}  // namespace penstock::interop
