// A handle names an object of a session on the wire, and is what the program holds as CUstream,
// CUevent and so on: NVIDIA's runtime and libraries never look behind these pointers.
//
//   bits 63..56  kind        from kHandleKindBase, so that the value is no canonical x86-64
//   address:
//                            a program that dereferences one faults instead of reading rubbish
//   bits 55..32  generation  1.. ; a slot that is reused gets the next one, so a stale handle
//   differs bits 31..0   id          below kFirstServerHandleId minted by the client, else by the
//   server
//
// The client mints, so that creating an object needs no reply. A handle is never reused within
// 2^24 - 1 lives of its slot.
#pragma once

#include <cstdint>

#include "protocol/limits.h"

namespace penstock {

enum class HandleKind : uint8_t {
  kNone = 0,
  kContext = 0x51,
  kModule = 0x52,
  kFunction = 0x53,
  kLibrary = 0x54,
  kKernel = 0x55,
  kStream = 0x56,
  kEvent = 0x57,
  kMemoryPool = 0x58,
  kLink = 0x59,
};
inline constexpr uint8_t kHandleKindBase = 0x51;
inline constexpr uint8_t kHandleKindCount = 9;

struct Handle {
  uint64_t bits = 0;

  static constexpr Handle Make(HandleKind kind, uint32_t generation, uint32_t id) {
    return Handle{static_cast<uint64_t>(kind) << 56 |
                  static_cast<uint64_t>(generation & 0xFFFFFF) << 32 | id};
  }
  constexpr HandleKind kind() const { return static_cast<HandleKind>(bits >> 56); }
  constexpr uint32_t generation() const { return static_cast<uint32_t>(bits >> 32) & 0xFFFFFF; }
  constexpr uint32_t id() const { return static_cast<uint32_t>(bits); }
  constexpr bool null() const { return bits == 0; }
  friend constexpr bool operator==(Handle, Handle) = default;
};

inline constexpr uint32_t kMaxGeneration = 0xFFFFFF;

// Streams that exist without being created. They are valid wire values of kind kStream.
inline constexpr Handle kLegacyStream = Handle::Make(HandleKind::kStream, 0, 0);
// The primary context of a device: fixed, so that it can be named before it is retained.
constexpr Handle PrimaryContext(uint32_t device) {
  return Handle::Make(HandleKind::kContext, 0, device);
}
constexpr bool IsPrimaryContext(Handle handle) {
  return handle.kind() == HandleKind::kContext && handle.generation() == 0 &&
         handle.id() < kMaxDevices;
}
// The default memory pool of a device, likewise.
constexpr Handle DefaultMemoryPool(uint32_t device) {
  return Handle::Make(HandleKind::kMemoryPool, 0, device);
}

}  // namespace penstock
