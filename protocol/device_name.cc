#include "protocol/device_name.h"

#include <cstdio>
#include <string_view>

namespace penstock {

std::string UuidText(const DeviceInfo& device) {
  const std::string_view all(device.name, sizeof device.name);
  const std::string_view name = all.substr(0, all.find('\0'));
  std::string text = name.find(" MIG ") != std::string_view::npos ? "MIG-" : "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char pair[3];
    snprintf(pair, sizeof pair, "%02x", device.uuid[i]);
    text += pair;
  }
  return text;
}

}  // namespace penstock
