// How a connection begins: four messages on the control socket, two on the bulk socket, each sent
// as one length-prefixed blob before the transport takes the sockets over.
//
//   client                                   server
//   ClientHello {versions, nonce, who}  -->
//                                       <--  Challenge {version chosen, nonce, key needed?}
//   Proof {HMAC over both}              -->
//                                       <--  Welcome {HMAC, session, ticket, devices, limits}
//
//   BulkHello {session, HMAC}           -->
//                                       <--  BulkWelcome
//
// If both have said that they can do RDMA (kFeatureRdma) or share memory (kFeatureShm), the client
// and the session's worker agree on a path, again on the control socket:
//
//   PathRequest {rails}                 -->
//                                       <--  PathOffer {port, addresses}, or why there is none
//   (dials over RDMA, or the unix socket that the address names)
//   PathChoice {rdma/shm, or tcp and why}  -->
//                                       <--  PathReady {rdma/shm, or tcp and why}
//
// Whatever goes wrong, tcp is at hand: at once if there is no offer, or with shared memory; later
// with RDMA by beginning again without it.
//
// Both sides prove that they hold the pre-shared key without sending it: HMAC-SHA256 over a label
// and everything said so far, so that neither side's proof can be replayed or reflected. A refusal
// is a message too, with a reason for people. Everything that the client will answer without asking
// again (driver version, devices, attributes) comes with Welcome.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "protocol/limits.h"

namespace penstock {

inline constexpr uint32_t kHelloMagic = 0x4B534E50;  // "PNSK"
inline constexpr uint16_t kProtocolVersion = 1;      // raised when an old peer would misunderstand
inline constexpr uint16_t kOldestProtocolVersion = 1;

// Feature bits: unknown ones are ignored, so an old peer never sees what it does not know.
enum Features : uint64_t {
  kFeatureNone = 0,
  kFeatureRdma = 1 << 0,           // can carry a session over RDMA, and is not told not to
  kFeatureHostFunctions = 1 << 1,  // Operation::kHostFunction and its frame
  kFeatureBounce = 1 << 2,         // HostPlace::kBounced, bounced module parts and their frame
  kFeatureShm = 1 << 3,      // thinks that the peer is on the same machine; wins over kFeatureRdma
  kFeatureVolumes = 1 << 4,  // Operation::kUploadVolume, its like and volumes on the device
  // The client takes fewer GPUs than it asks for rather than none: it has other servers to ask.
  kFeatureFewer = 1 << 5,
};

using Nonce = std::array<uint8_t, 32>;
using Mac = std::array<uint8_t, 32>;

// kManagement: the caller wants no session, but to ask the daemon something (control/). It goes
// through the same hello; after the welcome, which has no devices, the socket speaks Cap'n Proto
// rpc.
enum class Role : uint32_t { kControl = 1, kBulk = 2, kManagement = 3 };

enum class Refusal : uint32_t {
  kNone = 0,
  kMalformed = 1,
  kVersion = 2,         // no common protocol version
  kKey = 3,             // wrong key, or none where one is needed
  kFull = 4,            // no GPU or session free
  kDriver = 5,          // the server's driver does not start; the text says why
  kUnknownSession = 6,  // BulkHello for a session that is not there or has its bulk socket
  kInternal = 7,
  kPath = 8,  // the server serves over another path only, which the client cannot or must not use
  kTooMany = 9,    // more GPUs than the server will ever offer
  kDraining = 10,  // the server takes no new sessions
};
const char* RefusalName(Refusal refusal);

struct ClientHello {
  uint32_t magic = kHelloMagic;
  Role role = Role::kControl;
  uint16_t oldest_version = kOldestProtocolVersion;
  uint16_t newest_version = kProtocolVersion;
  uint32_t gpus = 1;  // how many devices the program wants; 0 for all that are offered
  uint64_t features = 0;
  Nonce nonce{};
  uint32_t pid = 0;
  uint32_t reserved = 0;
  char host[64] = {};  // NUL-terminated, for logs and status only
  char program[128] = {};
};
static_assert(sizeof(ClientHello) == 256);

struct Challenge {
  uint32_t magic = kHelloMagic;
  Refusal refusal = Refusal::kNone;
  uint16_t version = 0;
  uint16_t key_needed = 0;
  uint32_t reserved = 0;
  uint64_t features = 0;
  Nonce nonce{};
  char text[200] = {};  // why refused
};
static_assert(sizeof(Challenge) == 256);

struct Proof {
  uint32_t magic = kHelloMagic;
  uint32_t reserved = 0;
  Mac mac{};
};
static_assert(sizeof(Proof) == 40);

// What cuDeviceGetAttribute answers, by attribute id.
inline constexpr uint32_t kDeviceAttributeSlots = 192;

struct DeviceInfo {
  char name[256];
  uint8_t uuid[16];
  uint64_t total_memory;
  int32_t attributes[kDeviceAttributeSlots];
  uint8_t attribute_known[kDeviceAttributeSlots];  // 0: the driver answers INVALID_VALUE
  int32_t least_priority;
  int32_t greatest_priority;
  uint32_t primary_flags;
  uint32_t reserved;
};

struct ServerInfo {
  int32_t driver_version;  // of the server's driver
  uint32_t device_count;
  uint32_t stream_window;  // kStreamWindow unless configured
  uint32_t max_frame_bytes;
  uint64_t functions[16];  // bit n: function id n of a row is served (room for 1,024)
  char server_name[64];
};

struct Welcome {
  uint32_t magic = kHelloMagic;
  Refusal refusal = Refusal::kNone;
  uint64_t session = 0;
  uint32_t epoch = 1;
  uint32_t offered = 0;  // GPUs that the server offers at all; 0: it does not say
  Mac mac{};             // the server's proof
  Nonce ticket{};        // secret of this session: proves the bulk socket, later a reconnect
  char text[200] = {};
  ServerInfo server{};
  // followed by server.device_count DeviceInfo
};

struct BulkHello {
  uint32_t magic = kHelloMagic;
  Role role = Role::kBulk;
  uint64_t session = 0;
  uint32_t epoch = 1;
  uint32_t reserved = 0;
  Mac mac{};
};
static_assert(sizeof(BulkHello) == 56);

struct BulkWelcome {
  uint32_t magic = kHelloMagic;
  Refusal refusal = Refusal::kNone;
  char text[200] = {};
};

// What a session's frames and data travel on.
enum class Path : uint32_t { kTcp = 1, kRdma = 2, kShm = 3 };
const char* PathName(Path path);

// At most so many rails (pairs of devices) carry one session.
inline constexpr uint32_t kMaxPathRails = 4;
inline constexpr size_t kPathAddressBytes = 64;  // textual, NUL-terminated

struct PathRequest {
  uint32_t magic = kHelloMagic;
  uint32_t most_rails = 1;
  uint64_t reserved = 0;
};
static_assert(sizeof(PathRequest) == 16);

struct PathOffer {
  uint32_t magic = kHelloMagic;
  Path path = Path::kTcp;   // kTcp: the server cannot or will not, and the text says why
  uint32_t no_tcp = 0;      // the server does not serve over tcp
  uint32_t port = 0;        // of rdma_cm; 1 to 65535
  uint32_t rail_count = 0;  // 1 to kMaxPathRails; of kShm 1
  uint32_t reserved = 0;
  // Rail r is dialled at addresses[r]; of kShm the first is the abstract name of a unix socket.
  char addresses[kMaxPathRails][kPathAddressBytes] = {};
  char text[200] = {};
};
static_assert(sizeof(PathOffer) == 480);

// PathChoice from the client, PathReady from the server: one layout. The server may answer kTcp to
// anything else (the text says why), never the other way round.
struct PathDecision {
  uint32_t magic = kHelloMagic;
  Path path = Path::kTcp;
  char text[200] = {};
};
static_assert(sizeof(PathDecision) == 208);

// What the client shows in each RDMA connection request, which travels unencrypted, and on the unix
// socket: derived from the ticket, so that it tells nothing about it.
using PathToken = std::array<uint8_t, 16>;
PathToken DerivePathToken(const Nonce& ticket, uint64_t session, uint32_t epoch);

// The key: the bytes of the key file, surrounding white space removed; empty for "no key".
using Key = std::vector<uint8_t>;
Result<Key> ReadKeyFile(const std::string& path);

// Fills with random bytes from the kernel.
Status FillRandom(std::span<uint8_t> bytes);

Mac ClientMac(const Key& key, const ClientHello& hello, const Challenge& challenge);
Mac ServerMac(const Key& key, const ClientHello& hello, const Challenge& challenge,
              uint64_t session, const Nonce& ticket);
Mac BulkMac(const Key& key, const ClientHello& hello, const Challenge& challenge,
            const Nonce& ticket, uint64_t session, uint32_t epoch);
// In constant time.
bool SameMac(const Mac& a, const Mac& b);

// Reading what a peer sent. Each checks size, magic and every field that is used as a bound, and
// terminates the texts.
Result<ClientHello> ParseClientHello(std::span<const std::byte> bytes);
Result<Challenge> ParseChallenge(std::span<const std::byte> bytes);
Result<Proof> ParseProof(std::span<const std::byte> bytes);
struct ParsedWelcome {
  Welcome welcome;
  std::vector<DeviceInfo> devices;
};
Result<ParsedWelcome> ParseWelcome(std::span<const std::byte> bytes);
Result<BulkHello> ParseBulkHello(std::span<const std::byte> bytes);
Result<BulkWelcome> ParseBulkWelcome(std::span<const std::byte> bytes);
Result<PathRequest> ParsePathRequest(std::span<const std::byte> bytes);
// The addresses of an offer of RDMA are numeric IPv4 or IPv6 ones.
Result<PathOffer> ParsePathOffer(std::span<const std::byte> bytes);
Result<PathDecision> ParsePathDecision(std::span<const std::byte> bytes);
// The role of a first message, so that a listener knows which parser to use.
Result<Role> PeekRole(std::span<const std::byte> bytes);

std::vector<std::byte> SerializeWelcome(const Welcome& welcome,
                                        std::span<const DeviceInfo> devices);

// The server's side of choosing: the newest common version, or 0.
uint16_t ChooseVersion(uint16_t oldest, uint16_t newest);

template <size_t N>
void CopyText(char (&target)[N], const std::string& text) {
  const size_t bytes = text.size() < N - 1 ? text.size() : N - 1;
  text.copy(target, bytes);
  target[bytes] = '\0';
}

}  // namespace penstock
