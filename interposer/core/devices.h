// The devices that the program sees: those of the server that CUDA_VISIBLE_DEVICES lets through, in
// the order that CUDA_DEVICE_ORDER asks for, each with the attributes that the client answers.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "protocol/device_name.h"
#include "protocol/hello.h"

namespace penstock::interposer {

struct Device {
  uint32_t wire = 0;  // number at the server
  DeviceInfo info{};
  // CUDA_ERROR_INVALID_VALUE for an attribute that the driver does not know.
  CUresult Attribute(int attribute, int* value) const;
  int AttributeOr(int attribute, int fallback) const;
};

// `visible` is CUDA_VISIBLE_DEVICES, nothing if unset; `order` is CUDA_DEVICE_ORDER.
//
// As the driver reads the list: numbers count the devices in the order above, words are UUIDs or
// beginnings of one ("GPU-1a2b", "MIG-3c4d"); the list ends at the first entry that names no device
// (so "0,-1,1" is "0") and an empty list shows none. A device named twice makes all invisible.
std::vector<Device> VisibleDevices(const std::vector<DeviceInfo>& offered,
                                   const std::optional<std::string>& visible,
                                   const std::string& order);

}  // namespace penstock::interposer
