// INTEGRITY_CHECK: every runtime since about 11.6 calls it three times while it starts, and fails
// all its entry points with cudaErrorSoftwareValidityNotEstablished (103) if the third answer is
// wrong. The scheme is public in ZLUDA (Apache-2.0/MIT) and LUPINE; the hash was recognised from
// its constants as HMAC (RFC 2104) over MD2 (RFC 1319) and is implemented from those two documents.
// It guards interoperability, not a secret: the key is a public constant of the same sources.
#include "interop/self_test.h"

#include <cstring>

#include "interop/md2.h"

namespace penstock::interop {
namespace {

// Source: ZLUDA.
constexpr unsigned char kKey[16] = {0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52,
                                    0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f};

template <typename T>
void Append(std::vector<unsigned char>& message, const T& value) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
  message.insert(message.end(), bytes, bytes + sizeof(T));
}

}  // namespace

void SelfTestAnswer(const SelfTestInput& input, const std::vector<DeviceIdentity>& devices,
                    unsigned char answer[16]) {
  // Observed: the answers to versions ending in 0 and 1 are not compared; zeros are accepted.
  if (input.version % 10 < 2) {
    std::memset(answer, 0, 16);
    return;
  }
  // Field order from ZLUDA; that each field is really compared was observed by changing one at a
  // time. Little-endian, packed.
  std::vector<unsigned char> message;
  Append(message, input.driver_version);
  Append(message, input.version);
  Append(message, input.process_id);
  Append(message, input.thread_low);
  Append(message, input.cudart_interface_table);
  Append(message, input.integrity_table);
  Append(message, input.integrity_function);
  Append(message, input.unix_seconds);
  for (const DeviceIdentity& device : devices) {
    Append(message, device.uuid);
    Append(message, device.pci_domain);
    Append(message, device.pci_bus);
    Append(message, device.pci_device);
  }
  const Md2Digest digest = HmacMd2(kKey, message);
  std::memcpy(answer, digest.data(), digest.size());
}

}  // namespace penstock::interop
