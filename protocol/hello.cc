#include "protocol/hello.h"

#include <arpa/inet.h>
#include <sodium/crypto_auth_hmacsha256.h>
#include <sodium/utils.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace penstock {
namespace {

// HMAC-SHA256 over a sequence of pieces; flat structs and a label that ends with its NUL.
class MacBuilder {
 public:
  MacBuilder(const Key& key, const char* label) {
    const unsigned char nothing = 0;  // an empty key has no address, and libsodium wants one
    crypto_auth_hmacsha256_init(&state_, key.empty() ? &nothing : key.data(), key.size());
    Add(label, strlen(label) + 1);
  }
  template <typename T>
  MacBuilder& operator<<(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    Add(&value, sizeof value);
    return *this;
  }
  Mac Finish() {
    Mac mac;
    crypto_auth_hmacsha256_final(&state_, mac.data());
    return mac;
  }

 private:
  void Add(const void* data, size_t bytes) {
    crypto_auth_hmacsha256_update(&state_, static_cast<const unsigned char*>(data), bytes);
  }
  crypto_auth_hmacsha256_state state_;
};

template <typename T>
Result<T> ParseFlat(std::span<const std::byte> bytes, const char* name) {
  if (bytes.size() != sizeof(T)) {
    return Fail(Code::kProtocol, std::string(name) + " size (" + std::to_string(bytes.size()) +
                                     ") differs from " + std::to_string(sizeof(T)) + ".");
  }
  T value;
  memcpy(static_cast<void*>(&value), bytes.data(), sizeof value);
  if (value.magic != kHelloMagic) {
    return Fail(Code::kProtocol, std::string(name) + " does not start with Penstock's magic.");
  }
  return value;
}

template <size_t N>
void Terminate(char (&text)[N]) {
  text[N - 1] = '\0';
}

// A peer's reason goes into a log line: one line of plain characters.
template <size_t N>
void MakePlain(char (&text)[N]) {
  Terminate(text);
  for (char* c = text; *c != '\0'; ++c) {
    if (*c < 0x20 || *c > 0x7e) *c = '?';
  }
}

bool IsPath(Path path) {
  return path == Path::kTcp || path == Path::kRdma || path == Path::kShm;
}

bool IsNumericAddress(const char* text) {
  in6_addr address;
  return inet_pton(AF_INET, text, &address) == 1 || inet_pton(AF_INET6, text, &address) == 1;
}

}  // namespace

const char* RefusalName(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNone:
      return "none";
    case Refusal::kMalformed:
      return "malformed hello";
    case Refusal::kVersion:
      return "no common protocol version";
    case Refusal::kKey:
      return "key refused";
    case Refusal::kFull:
      return "server full";
    case Refusal::kDriver:
      return "driver not available";
    case Refusal::kUnknownSession:
      return "unknown session";
    case Refusal::kInternal:
      return "server trouble";
    case Refusal::kPath:
      return "another path only";
    case Refusal::kTooMany:
      return "too many GPUs asked for";
    case Refusal::kDraining:
      return "server draining";
  }
  return "unknown reason";
}

const char* PathName(Path path) {
  switch (path) {
    case Path::kTcp:
      return "tcp";
    case Path::kRdma:
      return "rdma";
    case Path::kShm:
      return "shm";
  }
  return "unknown path";
}

Result<Key> ReadKeyFile(const std::string& path) {
  FILE* file = fopen(path.c_str(), "rbe");
  if (file == nullptr) return FailErrno("Cannot open key file (" + path + ")");
  uint8_t buffer[4096];
  const size_t bytes = fread(buffer, 1, sizeof buffer, file);
  const bool more = !feof(file) && fgetc(file) != EOF;
  fclose(file);
  if (more) {
    return Fail(Code::kInvalidArgument, "Key file (" + path + ") is larger than 4096 bytes.");
  }
  auto is_space = [](uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
  const uint8_t* begin = buffer;
  const uint8_t* end = buffer + bytes;
  while (begin < end && is_space(*begin)) ++begin;
  while (begin < end && is_space(end[-1])) --end;
  if (end - begin < 16) {
    return Fail(Code::kInvalidArgument, "Key file (" + path + ") holds fewer than 16 bytes.");
  }
  return Key(begin, end);
}

Status FillRandom(std::span<uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return FailErrno("The kernel gives no random bytes");
    bytes = bytes.subspan(got);
  }
  return {};
}

Mac ClientMac(const Key& key, const ClientHello& hello, const Challenge& challenge) {
  return (MacBuilder(key, "penstock 1 client") << hello << challenge).Finish();
}

Mac ServerMac(const Key& key, const ClientHello& hello, const Challenge& challenge,
              uint64_t session, const Nonce& ticket) {
  return (MacBuilder(key, "penstock 1 server") << hello << challenge << session << ticket).Finish();
}

Mac BulkMac(const Key& key, const ClientHello& hello, const Challenge& challenge,
            const Nonce& ticket, uint64_t session, uint32_t epoch) {
  return (MacBuilder(key, "penstock 1 bulk")
          << hello.nonce << challenge.nonce << ticket << session << epoch)
      .Finish();
}

PathToken DerivePathToken(const Nonce& ticket, uint64_t session, uint32_t epoch) {
  const Mac mac =
      (MacBuilder(Key(ticket.begin(), ticket.end()), "penstock 1 path") << session << epoch)
          .Finish();
  PathToken token;
  std::copy_n(mac.begin(), token.size(), token.begin());
  return token;
}

bool SameMac(const Mac& a, const Mac& b) {
  return sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

Result<ClientHello> ParseClientHello(std::span<const std::byte> bytes) {
  auto hello = ParseFlat<ClientHello>(bytes, "Client hello");
  if (!hello) return hello;
  if (hello->role != Role::kControl && hello->role != Role::kManagement) {
    return Fail(Code::kProtocol, "Client hello has an unknown role (" +
                                     std::to_string(static_cast<uint32_t>(hello->role)) + ").");
  }
  if (hello->gpus > kMaxDevices) {
    return Fail(Code::kProtocol,
                "Client hello asks for too many GPUs (" + std::to_string(hello->gpus) + ").");
  }
  Terminate(hello->host);
  Terminate(hello->program);
  return hello;
}

Result<Challenge> ParseChallenge(std::span<const std::byte> bytes) {
  auto challenge = ParseFlat<Challenge>(bytes, "Challenge");
  if (challenge) Terminate(challenge->text);
  return challenge;
}

Result<Proof> ParseProof(std::span<const std::byte> bytes) {
  return ParseFlat<Proof>(bytes, "Proof");
}

Result<ParsedWelcome> ParseWelcome(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(Welcome)) {
    return Fail(Code::kProtocol, "Welcome size (" + std::to_string(bytes.size()) + ") is short.");
  }
  ASSIGN_OR_RETURN(Welcome welcome, ParseFlat<Welcome>(bytes.first(sizeof(Welcome)), "Welcome"));
  Terminate(welcome.text);
  Terminate(welcome.server.server_name);
  const uint32_t count = welcome.server.device_count;
  if (count > kMaxDevices || bytes.size() != sizeof(Welcome) + count * sizeof(DeviceInfo)) {
    return Fail(Code::kProtocol, "Welcome device count (" + std::to_string(count) +
                                     ") does not fit its size (" + std::to_string(bytes.size()) +
                                     ").");
  }
  ParsedWelcome parsed{welcome, std::vector<DeviceInfo>(count)};
  if (count != 0) {
    memcpy(parsed.devices.data(), bytes.data() + sizeof(Welcome), count * sizeof(DeviceInfo));
  }
  for (DeviceInfo& device : parsed.devices) Terminate(device.name);
  return parsed;
}

Result<BulkHello> ParseBulkHello(std::span<const std::byte> bytes) {
  return ParseFlat<BulkHello>(bytes, "Bulk hello");
}

Result<BulkWelcome> ParseBulkWelcome(std::span<const std::byte> bytes) {
  auto welcome = ParseFlat<BulkWelcome>(bytes, "Bulk welcome");
  if (welcome) Terminate(welcome->text);
  return welcome;
}

Result<PathRequest> ParsePathRequest(std::span<const std::byte> bytes) {
  auto request = ParseFlat<PathRequest>(bytes, "Path request");
  if (request && (request->most_rails == 0 || request->most_rails > kMaxPathRails)) {
    return Fail(Code::kProtocol, "Path request has an impossible number of rails (" +
                                     std::to_string(request->most_rails) + ").");
  }
  return request;
}

Result<PathOffer> ParsePathOffer(std::span<const std::byte> bytes) {
  auto offer = ParseFlat<PathOffer>(bytes, "Path offer");
  if (!offer) return offer;
  MakePlain(offer->text);
  for (auto& address : offer->addresses) Terminate(address);  // also those that nobody shall use
  if (!IsPath(offer->path)) {
    return Fail(Code::kProtocol, "Path offer names an unknown path (" +
                                     std::to_string(static_cast<uint32_t>(offer->path)) + ").");
  }
  if (offer->path == Path::kTcp) {
    offer->rail_count = 0;
    return offer;
  }
  if (offer->path == Path::kShm) {
    MakePlain(offer->addresses[0]);
    if (offer->rail_count != 1 || offer->addresses[0][0] == '\0') {
      return Fail(Code::kProtocol, "Path offer of shared memory names no socket.");
    }
    return offer;
  }
  if (offer->port == 0 || offer->port > 65535) {
    return Fail(Code::kProtocol,
                "Path offer has an impossible port (" + std::to_string(offer->port) + ").");
  }
  if (offer->rail_count == 0 || offer->rail_count > kMaxPathRails) {
    return Fail(Code::kProtocol, "Path offer has an impossible number of rails (" +
                                     std::to_string(offer->rail_count) + ").");
  }
  for (uint32_t rail = 0; rail < offer->rail_count; ++rail) {
    MakePlain(offer->addresses[rail]);
    if (!IsNumericAddress(offer->addresses[rail])) {
      return Fail(Code::kProtocol, "Path offer has an address that is none (" +
                                       std::string(offer->addresses[rail]) + ").");
    }
  }
  return offer;
}

Result<PathDecision> ParsePathDecision(std::span<const std::byte> bytes) {
  auto decision = ParseFlat<PathDecision>(bytes, "Path decision");
  if (!decision) return decision;
  MakePlain(decision->text);
  if (!IsPath(decision->path)) {
    return Fail(Code::kProtocol, "Path decision names an unknown path (" +
                                     std::to_string(static_cast<uint32_t>(decision->path)) + ").");
  }
  return decision;
}

Result<Role> PeekRole(std::span<const std::byte> bytes) {
  uint32_t words[2];
  if (bytes.size() < sizeof words) return Fail(Code::kProtocol, "First message is too short.");
  memcpy(words, bytes.data(), sizeof words);
  if (words[0] != kHelloMagic) {
    return Fail(Code::kProtocol, "First message does not start with Penstock's magic.");
  }
  const Role role = static_cast<Role>(words[1]);
  if (role != Role::kControl && role != Role::kBulk && role != Role::kManagement) {
    return Fail(Code::kProtocol, "First message has an unknown role.");
  }
  return role;
}

std::vector<std::byte> SerializeWelcome(const Welcome& welcome,
                                        std::span<const DeviceInfo> devices) {
  std::vector<std::byte> bytes(sizeof welcome + devices.size_bytes());
  memcpy(bytes.data(), &welcome, sizeof welcome);
  if (!devices.empty()) {
    memcpy(bytes.data() + sizeof welcome, devices.data(), devices.size_bytes());
  }
  return bytes;
}

uint16_t ChooseVersion(uint16_t oldest, uint16_t newest) {
  const uint16_t version = std::min(newest, kProtocolVersion);
  return version >= std::max(oldest, kOldestProtocolVersion) ? version : 0;
}

}  // namespace penstock
