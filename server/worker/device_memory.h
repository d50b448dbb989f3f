// Registering device memory with the NICs, and trying whether they reach it. On the registrar's
// thread of GpuDirect; the context must be current there.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "common/result.h"
#include "server/driver.h"
#include "transport/transport.h"

namespace penstock::server {

// Exports a whole allocation and registers it. kInvalidArgument if it shares a page with another
// one, which is no failure of anybody.
Result<std::unique_ptr<transport::MemoryRegion>> RegisterAllocation(
    const Driver& driver, transport::Connection& connection, CUdeviceptr begin, uint64_t bytes);

// Every NIC writes bytes into `scratch`, kScratchBytes of device memory, and reads others out of
// it; the driver looks whether they are right, and that those around them are untouched. `flush`:
// what NICs have written needs a flush of this scope.
inline constexpr uint64_t kScratchBytes = 2 << 20;  // what a driver gives pages of their own
Status TestDevice(const Driver& driver, transport::Connection& connection, CUdeviceptr scratch,
                  std::optional<CUflushGPUDirectRDMAWritesScope> flush);

}  // namespace penstock::server
