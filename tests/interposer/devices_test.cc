#include "interposer/core/devices.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "interposer/core/connect.h"

using namespace penstock;
using namespace penstock::interposer;

namespace {

// Four devices; the UUIDs of the last two begin alike, the PCI numbers fall.
std::vector<DeviceInfo> Offered() {
  std::vector<DeviceInfo> devices(4);
  for (int i = 0; i < 4; ++i) {
    memset(&devices[i], 0, sizeof devices[i]);
    memset(devices[i].uuid, i < 2 ? 0x10 * (i + 1) : 0xAB, 16);
    devices[i].uuid[15] = static_cast<uint8_t>(i);
    devices[i].attributes[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID] = 9 - i;
    devices[i].attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 32;
    devices[i].attribute_known[CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 1;
    devices[i].attributes[CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] = 1;
    devices[i].attribute_known[CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] = 1;
  }
  return devices;
}

std::vector<Device> Devices(const std::vector<DeviceInfo>& infos) {
  std::vector<Device> devices;
  for (size_t i = 0; i < infos.size(); ++i) {
    devices.push_back({nullptr, static_cast<uint32_t>(i), infos[i]});
  }
  return devices;
}

std::vector<uint32_t> Visible(std::optional<std::string> list, const std::string& order = "") {
  std::vector<uint32_t> numbers;
  for (const Device& device : VisibleDevices(Devices(Offered()), list, order)) {
    numbers.push_back(device.wire);
  }
  return numbers;
}

using Numbers = std::vector<uint32_t>;

}  // namespace

TEST_CASE("CUDA_VISIBLE_DEVICES chooses and orders", "[interposer][devices]") {
  CHECK(Visible(std::nullopt) == Numbers{0, 1, 2, 3});
  CHECK(Visible("2,0") == Numbers{2, 0});
  CHECK(Visible(" 1 , 3 ") == Numbers{1, 3});
  CHECK(Visible("3") == Numbers{3});
}

TEST_CASE("a slice of a GPU has a name of its own kind", "[interposer][devices]") {
  std::vector<DeviceInfo> offered = Offered();
  strcpy(offered[1].name, "NVIDIA A100-SXM4-40GB MIG 1g.5gb");
  strcpy(offered[2].name, "NVIDIA MIGHTY");
  CHECK(UuidText(offered[1]) == "MIG-20202020-2020-2020-2020-202020202001");
  CHECK(UuidText(offered[2]) == "GPU-abababab-abab-abab-abab-ababababab02");
  const auto first = [&](const std::string& list) {
    const auto devices = VisibleDevices(Devices(offered), list, "");
    return devices.empty() ? -1 : static_cast<int>(devices[0].wire);
  };
  CHECK(first("MIG-2020") == 1);
  CHECK(first("GPU-2020") == -1);
  CHECK(first("MIG-10101010") == -1);
}

TEST_CASE("the list ends at the first entry that names no device", "[interposer][devices]") {
  CHECK(Visible("") == Numbers{});
  CHECK(Visible("-1") == Numbers{});
  CHECK(Visible("0,-1,1") == Numbers{0});
  CHECK(Visible("0,1,7,2") == Numbers{0, 1});
  CHECK(Visible("1,,2") == Numbers{1});
  CHECK(Visible("1x,2") == Numbers{});
  CHECK(Visible("none") == Numbers{});
}

TEST_CASE("a device named twice hides all", "[interposer][devices]") {
  CHECK(Visible("1,1") == Numbers{});
  CHECK(Visible("0,GPU-10101010") == Numbers{});
}

TEST_CASE("the beginning of a UUID names a device if it is the only one", "[interposer][devices]") {
  CHECK(Visible("GPU-20202020,0") == Numbers{1, 0});
  CHECK(Visible("gpu-20202020") == Numbers{});  // the prefix is as written
  CHECK(Visible("GPU-ababab") == Numbers{});    // two of them
  CHECK(Visible("GPU-ABABABAB-abab-abab-abab-ababababab03") == Numbers{3});
  CHECK(Visible("GPU-") == Numbers{});
}

TEST_CASE("numbers count in the order of the bus if asked for", "[interposer][devices]") {
  CHECK(Visible(std::nullopt, "PCI_BUS_ID") == Numbers{3, 2, 1, 0});
  CHECK(Visible("0,2", "PCI_BUS_ID") == Numbers{3, 1});
}

TEST_CASE("attributes are forwarded, zero, or our own", "[interposer][devices]") {
  const Device device = VisibleDevices(Devices(Offered()), std::nullopt, "")[0];
  int value = -5;
  CHECK(device.Attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE, &value) == CUDA_SUCCESS);
  CHECK(value == 32);
  CHECK(device.Attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, &value) == CUDA_SUCCESS);
  CHECK(value == 0);  // though the server's device has it
  CHECK(device.Attribute(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, &value) == CUDA_SUCCESS);
  CHECK(value == -1);
  value = -5;
  CHECK(device.Attribute(0, &value) == CUDA_ERROR_INVALID_VALUE);
  CHECK(device.Attribute(-3, &value) == CUDA_ERROR_INVALID_VALUE);
  CHECK(device.Attribute(100'000, &value) == CUDA_ERROR_INVALID_VALUE);
  CHECK(device.Attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE, &value) == CUDA_ERROR_INVALID_VALUE);
  CHECK(value == -5);
}

TEST_CASE("a server is HOST:PORT", "[interposer][connect]") {
  CHECK(config::ParseEndpoint("gpu7:4711")->host == "gpu7");
  CHECK(config::ParseEndpoint("gpu7:4711")->port == 4711);
  CHECK(config::ParseEndpoint("[2001:db8::1]:80")->host == "2001:db8::1");
  for (const char* text : {"gpu7", "gpu7:", ":80", "gpu7:0", "gpu7:65536", "gpu7:80x", "gpu7:-1",
                           "2001:db8::1:80", "[]:80", "[::1:80", ""}) {
    CAPTURE(text);
    CHECK_FALSE(config::ParseEndpoint(text).has_value());
  }
}
