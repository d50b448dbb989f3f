// What the driver calls a device in CUDA_VISIBLE_DEVICES.
#pragma once

#include <string>

#include "protocol/hello.h"

namespace penstock {

inline constexpr size_t kDeviceNameBytes = 41;  // with the NUL

// "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", or "MIG-..." for a slice of a GPU. The driver tells
// which it is only in the product name, where a slice has its profile: "NVIDIA A100 MIG 1g.5gb".
std::string UuidText(const DeviceInfo& device);

}  // namespace penstock
