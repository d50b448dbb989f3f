// Every message of the hello and of the agreement on a path, both sides'. The first byte says which
// one the rest shall be. What a parser lets pass must keep its promises.
#include <cstring>

#include "protocol/hello.h"
#include "tests/fuzz/input.h"

using namespace penstock;
using fuzz::Require;

namespace {

template <size_t N>
void RequireText(const char (&text)[N]) {
  Require(memchr(text, '\0', N) != nullptr);
}

void Parse(uint8_t which, std::span<const std::byte> bytes) {
  switch (which % 10) {
    case 0:
      if (auto hello = ParseClientHello(bytes)) {
        RequireText(hello->host);
        RequireText(hello->program);
        const uint16_t version = ChooseVersion(hello->oldest_version, hello->newest_version);
        Require(version == 0 || (version >= hello->oldest_version &&
                                 version <= hello->newest_version && version <= kProtocolVersion));
        // What is signed is the same for the same hello, and another for another key.
        const Challenge challenge;
        Require(
            SameMac(ClientMac({1, 2}, *hello, challenge), ClientMac({1, 2}, *hello, challenge)));
        Require(
            !SameMac(ClientMac({1, 2}, *hello, challenge), ClientMac({1, 3}, *hello, challenge)));
      }
      break;
    case 1:
      if (auto challenge = ParseChallenge(bytes)) RequireText(challenge->text);
      break;
    case 2:
      (void)ParseProof(bytes);
      break;
    case 3:
      if (auto parsed = ParseWelcome(bytes)) {
        RequireText(parsed->welcome.text);
        RequireText(parsed->welcome.server.server_name);
        if (parsed->welcome.refusal == Refusal::kNone) {
          Require(parsed->devices.size() == parsed->welcome.server.device_count);
          Require(parsed->devices.size() <= kMaxDevices);
          for (const DeviceInfo& device : parsed->devices) RequireText(device.name);
          const auto again = SerializeWelcome(parsed->welcome, parsed->devices);
          Require(again.size() == bytes.size());
        }
        (void)RefusalName(parsed->welcome.refusal);
      }
      break;
    case 4:
      if (auto hello = ParseBulkHello(bytes)) {
        (void)BulkMac({1}, {}, {}, {}, hello->session, hello->epoch);
        (void)DerivePathToken({}, hello->session, hello->epoch);
      }
      break;
    case 5:
      if (auto welcome = ParseBulkWelcome(bytes)) RequireText(welcome->text);
      break;
    case 6:
      if (auto request = ParsePathRequest(bytes)) {
        Require(request->most_rails >= 1 && request->most_rails <= kMaxPathRails);
      }
      break;
    case 7:
      if (auto offer = ParsePathOffer(bytes)) {
        RequireText(offer->text);
        Require(offer->rail_count <= kMaxPathRails);
        for (const auto& address : offer->addresses) RequireText(address);
        (void)PathName(offer->path);
      }
      break;
    case 8:
      if (auto decision = ParsePathDecision(bytes)) RequireText(decision->text);
      break;
    case 9:
      if (auto role = PeekRole(bytes)) {
        Require(*role == Role::kControl || *role == Role::kBulk || *role == Role::kManagement);
      }
      break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto which = input.Take<uint8_t>();
  Parse(which, input.TakeBytes(kMaxWelcomeBytes));
  return 0;
}
