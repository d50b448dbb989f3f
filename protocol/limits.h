// Every bound of the protocol in one place, each with its reason. A peer that exceeds one of them
// ends its session; our own side checks before it sends.
#pragma once

#include <cstdint>

namespace penstock {

// The largest frame. Twice the biggest kernel parameter block (32,764 bytes) with room for a
// header.
inline constexpr uint32_t kMaxFrameBytes = 64 * 1024;
// Copies up to this size travel inside the call frame: one frame, no bulk round trip.
inline constexpr uint32_t kMaxInlineCopyBytes = 16 * 1024;
// Handles of one kind alive at once in a session. A PyTorch process holds some 10^4 kernels.
inline constexpr uint32_t kMaxHandlesPerKind = 1u << 20;
// Ids at and above this one are minted by the server, for what only it can name.
inline constexpr uint32_t kFirstServerHandleId = 1u << 31;
// Application threads of one program; a thread index travels with each call.
inline constexpr uint32_t kMaxThreads = 1u << 16;
inline constexpr uint32_t kMaxDevices = 64;
// cuFuncGetParamInfo has no documented bound; the parameter block of 32,764 bytes gives this one.
inline constexpr uint32_t kMaxKernelParameters = 8192;
inline constexpr uint32_t kMaxKernelParameterBytes = 32764;
inline constexpr uint32_t kMaxNameBytes = 16 * 1024;     // mangled kernel names
inline constexpr uint64_t kMaxModuleBytes = 1ull << 31;  // a fatbin of 2 GiB is refused
inline constexpr uint32_t kMaxModuleParts = 4096;        // containers behind a v2 wrapper
inline constexpr uint32_t kMaxJitOptions = 64;
inline constexpr uint32_t kMaxJitLogBytes = 32 * 1024;
inline constexpr uint32_t kMaxLaunchAttributes = 32;
// Bytes of frames kept until the peer acknowledges them. A sender that reaches it waits.
inline constexpr uint64_t kRetainedBytes = 4ull * 1024 * 1024;
// The receiver acknowledges at the latest after so many numbered frames or bytes of them.
inline constexpr uint32_t kAcknowledgeFrames = 256;
inline constexpr uint64_t kAcknowledgeBytes = 512 * 1024;
// Unfinished operations of one stream. The driver blocks at about 1,024; a gated copy counts more
// than one (see kGatedCopyCost).
inline constexpr uint32_t kStreamWindow = 512;
inline constexpr uint32_t kGatedCopyCost = 4;
// Event, two gate operations and a mark.
inline constexpr uint32_t kHostFunctionCost = 4;
// Host functions of one session that have not returned. More than all streams of a real program can
// hold in their windows.
inline constexpr uint32_t kMaxHostFunctions = 1u << 16;
// Staging slots a client owns for pageable uploads: posted copies that the server has not pulled
// yet.
inline constexpr uint32_t kSmallStagingBytes = 64 * 1024;
inline constexpr uint32_t kSmallStagingSlots = 256;
inline constexpr uint32_t kLargeStagingBytes = 1024 * 1024;
inline constexpr uint32_t kLargeStagingSlots = 48;
// Bounce slots: registered memory of the client that larger copies of pageable memory pass through,
// piece by piece, where registering that memory is dear. A piece of 512 KiB takes some 20
// microseconds on a fast wire, against two of a round trip; one copy has a few of them under way,
// so these are enough for two or three copies at once, and others take turns.
inline constexpr uint32_t kBounceSlotBytes = 512 * 1024;
inline constexpr uint32_t kBounceSlots = 16;
// Hello messages: bounded before anything about the peer is known.
inline constexpr uint32_t kMaxHelloBytes = 4096;
inline constexpr uint32_t kMaxWelcomeBytes = 256 * 1024;

}  // namespace penstock
