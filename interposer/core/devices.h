// The devices that the program sees: those of its servers that CUDA_VISIBLE_DEVICES lets through,
// in the order that CUDA_DEVICE_ORDER asks for, each with the attributes that the client answers.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "protocol/device_name.h"
#include "protocol/hello.h"

namespace penstock::interposer {

class Session;

struct Device {
  Session* session = nullptr;
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
std::vector<Device> VisibleDevices(std::vector<Device> devices,
                                   const std::optional<std::string>& visible,
                                   const std::string& order);

// Servers know nothing of each other, so two of their devices may have one PCI address; programs
// take it for the device's name. The later one gets another domain. The same with UUIDs, which real
// devices do not share.
void MakeDistinct(std::vector<Device>* devices);

}  // namespace penstock::interposer
