// The frame: what the call stream gives to a transport. Little-endian, fixed layout.
//
//   FrameHeader | fixed struct of the function | sections, each padded to 8 bytes
//
// Numbered frames (calls, replies, output, host functions, bounce) carry a sequence that grows by
// one per direction and are kept by the sender until acknowledged; the receiver drops a number it
// has seen. Progress, acknowledge and heartbeat frames are unnumbered and idempotent: they hold
// absolute values only.
#pragma once

#include <cstdint>

#include "protocol/limits.h"

namespace penstock {

enum class FrameType : uint16_t {
  kCall = 1,          // client to server: a function to run; with kNeedsReply somebody waits
  kReply = 2,         // server to client: `subject` is the sequence of the call
  kProgress = 3,      // server to client: ProgressEntry[]; unnumbered
  kAcknowledge = 4,   // either way: only `acknowledged` matters; unnumbered
  kHeartbeat = 5,     // either way; unnumbered
  kOutput = 6,        // server to client: OutputHeader and text for the program's stdout or stderr
  kGoodbye = 7,       // either way: the sender ends the session on purpose; text says why
  kHostFunction = 8,  // server to client: `subject` is the id of a HostFunctionCommand whose turn
                      // it is, `result` what has become of its context
  kBounce = 9,        // server to client: BouncePiece[]; `subject` is the sequence of the call
};

enum FrameFlags : uint16_t {
  kNeedsReply = 1,
};

struct FrameHeader {
  uint32_t bytes;  // of the whole frame; the transports rely on this being the first word
  FrameType type;
  uint16_t flags;
  uint32_t epoch;         // of the connection; frames of an older one are dropped
  uint32_t function;      // FunctionId of a call; echoed in its reply
  uint64_t sequence;      // 0 in unnumbered frames
  uint64_t acknowledged;  // highest sequence that the sender has received in order
  uint64_t subject;       // call: handle of the current context or 0; reply: sequence of the call
  uint32_t thread;        // call: index of the issuing thread, minted by the client
  int32_t result;         // reply: CUresult; call: what it costs in the window of its stream, or 0
};
static_assert(sizeof(FrameHeader) == 48);

enum class ProgressKind : uint32_t {
  kStream = 1,       // id: low half of the stream handle; value: cost of operations finished.
                     // A legacy stream: generation 0, id: low 56 bits of its context's handle
  kStagingSlot = 2,  // id: slot; value: times the slot has been released
};
struct ProgressEntry {
  ProgressKind kind;
  uint32_t generation;  // of the stream handle; 0 for slots
  uint64_t id;
  uint64_t value;  // absolute, never decreases
};
static_assert(sizeof(ProgressEntry) == 24);

struct OutputHeader {
  uint32_t descriptor;  // 1 or 2
  uint32_t bytes;
};
static_assert(sizeof(OutputHeader) == 8);

// One piece of a copy or an image that passes through a bounce slot of the client. The call says
// which way: of a download, the server has put the piece there and the client takes it out; of an
// upload or a module load, the client shall put it there. The client answers each with kBounceDone.
struct BouncePiece {
  uint64_t offset;  // of its first byte in the copy, whose rows follow each other without gaps
  uint32_t bytes;
  uint32_t slot;
};
static_assert(sizeof(BouncePiece) == 16);

constexpr uint32_t PaddedTo8(uint32_t bytes) {
  return (bytes + 7) & ~7u;
}

}  // namespace penstock
