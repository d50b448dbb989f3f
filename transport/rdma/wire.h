// What the rdma backend itself puts on the wire: the header of each packet, the private data of
// each connection request, and the blob of a memory key. Little-endian, fixed layout.
//
// Control packets. Frames are packed into packets of at most `slot_bytes` (header and payload),
// one SEND each. A packet ends at a frame boundary unless one frame is larger than a packet; such a
// frame fills packets of its own, in order, and the receiver joins it again. Packets are numbered
// from 1 without gaps for the life of the session, over all control queue pairs that it has had;
// a receiver drops a number that it has seen (a replay after a failover).
//
// rail_live is the generation of the queue pair that the sender uses on each rail. kRailRefused is
// a rail that is down because the receiver's memory refused an access: nothing is wrong with the
// rail, and it is made anew at once.
//
// rail_ended is the newest generation on each rail whose queue pair, at the sender's end, is
// broken: nothing that the peer wrote through it, or through an older one, reaches memory any more.
// The server waits for this before it reports a Put that it had to repeat over another rail.
//
// Credits are absolute: `acknowledged` is the number of the newest packet whose receive slot has
// been posted again. A sender may have `slots` packets beyond it under way; the last
// kReservedCredits of them are for packets without payload. The sender keeps a packet's bytes until
// it is acknowledged, so that a new queue pair can carry it again.
//
// Fences. A packet says how many notifying writes (Puts' ends) each rail had seen completed when it
// was posted. The receiver delivers its frames only once it has received as many on each rail. So
// "the data, then the news" holds although data and news travel on different queue pairs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace penstock::transport::rdma {

inline constexpr uint32_t kMaxRails = 4;
inline constexpr uint32_t kReservedCredits = 4;    // packets without payload
inline constexpr uint32_t kReservedSendSlots = 4;  // work requests of keepalive and such packets

inline constexpr uint32_t kPacketMagic = 0x504b5250;  // "PRKP"
enum PacketFlags : uint16_t {
  kPacketGoodbye = 1,  // the sender closes; nothing follows
};
inline constexpr uint16_t kRailRefused = 0xffff;
struct PacketHeader {
  uint32_t magic = kPacketMagic;
  uint16_t payload = 0;  // bytes after the header
  uint16_t flags = 0;
  uint64_t number = 0;
  uint64_t acknowledged = 0;
  std::array<uint32_t, kMaxRails> fence{};      // counts modulo 2^32
  std::array<uint16_t, kMaxRails> rail_live{};  // generation that the sender uses, 0: rail is down
  std::array<uint16_t, kMaxRails> rail_ended{};
};
static_assert(sizeof(PacketHeader) == 56);

using Token = std::array<uint8_t, 16>;  // secret of the session, from its ticket

enum class QueuePairRole : uint8_t { kControl = 1, kBulk = 2 };

// Private data of a connection request (the CM has room for 56 bytes).
inline constexpr uint32_t kRequestMagic = 0x51524b50;  // "PKRQ"
struct ConnectRequest {
  uint32_t magic = kRequestMagic;
  uint8_t version = 1;
  QueuePairRole role = QueuePairRole::kControl;
  uint8_t rail = 0;         // bulk: which; control: the rail whose device carries it
  uint8_t rail_count = 0;   // control: how many rails the client will connect
  uint16_t generation = 1;  // grows with every new queue pair of the same role and rail
  uint16_t slots = 0;       // receive slots of this end's control queue pair
  uint32_t slot_bytes = 0;  // both ends must agree, or the request is rejected
  uint64_t received = 0;    // control: newest packet number received (0 at first)
  Token token{};
  uint32_t max_frame = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(ConnectRequest) <= 56);

// Private data of the acceptance (196 bytes) and of a rejection (148 bytes).
inline constexpr uint32_t kReplyMagic = 0x50524b50;  // "PKRP"
enum class Rejection : uint16_t {
  kNone = 0,
  kMalformed = 1,
  kVersion = 2,
  kToken = 3,
  kStale = 4,      // an older generation than the one that is there
  kShape = 5,      // slot_bytes or max_frame differ, too many rails
  kResources = 6,  // the server cannot make a queue pair; its log says why
  kClosing = 7,
};
struct ConnectReply {
  uint32_t magic = kReplyMagic;
  uint8_t version = 1;
  uint8_t reserved8 = 0;
  Rejection rejection = Rejection::kNone;
  uint16_t slots = 0;
  uint16_t reserved16 = 0;
  uint32_t reserved32 = 0;
  uint64_t received = 0;
};
static_assert(sizeof(ConnectReply) == 24);

// The blob of a MemoryKey. Bit r of `rails` says that rkey[r] is valid on rail r.
inline constexpr uint32_t kRdmaKeyKind = 0x324b4d50;  // "PMK2"
struct RdmaKeyBlob {
  uint32_t kind = kRdmaKeyKind;
  uint8_t rails = 0;
  uint8_t access = 0;  // transport::Access
  uint16_t reserved = 0;
  uint64_t address = 0;
  uint64_t bytes = 0;
  std::array<uint32_t, kMaxRails> rkey{};
};
static_assert(sizeof(RdmaKeyBlob) == 40);

}  // namespace penstock::transport::rdma
