// Operations written by hand on both sides, because one of them serves many CUDA functions: every
// copy between host and device is an upload or a download, whatever its name. All other commands
// are generated from codegen/spec (commands.gen.h).
#pragma once

#include <cstdint>

#include "protocol/limits.h"

namespace penstock {

// Share the number space of FrameHeader::function with the spec's ids, which stay below 0x8000.
enum class Operation : uint32_t {
  kLaunch = 0x8001,
  kUpload = 0x8002,
  kDownload = 0x8003,
  kLoadModule = 0x8004,
  kGetFunction = 0x8005,
  kWaitStreamProgress = 0x8006,
  kHostFunction = 0x8007,
  kHostFunctionDone = 0x8008,
  kBounceDone = 0x8009,
  kUploadVolume = 0x800a,
  kDownloadVolume = 0x800b,
  kListFunctions = 0x800c,
  kLinkCreate = 0x800d,
  kLinkAdd = 0x800e,
  kLinkComplete = 0x800f,
  kLinkRead = 0x8010,
  kLinkDestroy = 0x8011,
};
inline constexpr uint32_t kFirstOperation = 0x8001;

// A transport::MemoryKey as bytes: protocol knows no transport.
struct WireMemoryKey {
  uint8_t bytes[64];
};

// --- Launch: posted. LaunchCommand | parameter block | LaunchAttributeEntry[attribute_count]
enum LaunchFlags : uint32_t { kLaunchCooperative = 1 };
struct LaunchCommand {
  uint64_t function;  // kFunction or kKernel
  uint64_t stream;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  uint32_t flags;
  uint32_t parameter_bytes;  // packed as the kernel's layout says
  uint32_t attribute_count;
};
static_assert(sizeof(LaunchCommand) == 56);
struct LaunchAttributeEntry {  // CUlaunchAttribute without pointers
  uint32_t id;
  uint32_t reserved;
  uint8_t value[64];
};
static_assert(sizeof(LaunchAttributeEntry) == 72);

// --- Copies. A copy is `height` rows of `width` bytes; a plain copy has height 1.
enum class HostPlace : uint32_t {
  kInline = 1,   // upload: width*height bytes follow; download: they come in the reply
  kStaged = 2,   // upload: a staging slot of the client, released by a progress entry when pulled
  kRegion = 3,   // registered memory that the server pulls from or pushes to
  kBounced = 4,  // through the bounce slots, at `key`; a call, never posted. The server gives slots
                 // to whichever copy's stream has reached it (BouncePiece), so copies that still
                 // wait hold none
};
enum class ReplyWhen : uint32_t {
  kNever = 0,   // posted
  kPulled = 1,  // the source may be changed again
  kDone = 2,    // the stream has passed the copy and, for a download, the data is in place
};

struct UploadCommand {
  uint64_t target;  // device address of the first row
  uint64_t stream;
  uint64_t width, height, target_pitch;
  HostPlace place;
  ReplyWhen reply_when;
  uint32_t slot;  // kStaged: which one
  uint32_t reserved;
  WireMemoryKey key;    // kStaged, kRegion
  uint64_t offset;      // of the first row in the registered memory
  uint64_t host_pitch;  // between rows there; inline data is packed
};
static_assert(sizeof(UploadCommand) == 136);

struct DownloadCommand {
  uint64_t source;  // device address of the first row
  uint64_t stream;
  uint64_t width, height, source_pitch;
  HostPlace place;  // kInline, kRegion or kBounced
  ReplyWhen reply_when;
  WireMemoryKey key;
  uint64_t offset;
  uint64_t host_pitch;  // bytes between the rows belong to the program and are never written
};
static_assert(sizeof(DownloadCommand) == 128);

// A copy of several slices, each of `height` rows. On either side a slice begins so many rows after
// the one before, at least `height`.
struct VolumeShape {
  uint64_t depth;  // slices
  uint64_t device_rows, host_rows;
};
struct UploadVolumeCommand {
  UploadCommand rows;
  VolumeShape volume;
};
static_assert(sizeof(UploadVolumeCommand) == 160);
struct DownloadVolumeCommand {
  DownloadCommand rows;
  VolumeShape volume;
};
static_assert(sizeof(DownloadVolumeCommand) == 152);

// --- Loading code: a call. LoadModuleCommand | ModulePart[part_count] | inline parts in order |
//     JitOption[option_count]
enum class ModuleKind : uint32_t {
  kModule = 1,
  kLibrary = 2,
  kLinkInput = 3,  // in a LinkAddCommand alone
};
enum class ImageFormat : uint32_t {
  kPtx = 1,  // text with its NUL
  kElf = 2,
  kContainer = 3,  // fatbin container as it is
  kWrapper = 4,    // one container; the server makes a v1 wrapper around it
  kWrapperV2 = 5,  // the linked container, then those of the translation units (-rdc=true)
};
struct LoadModuleCommand {
  uint64_t handle;  // minted by the client, kind by `kind`
  ModuleKind kind;
  ImageFormat format;
  uint32_t part_count;
  uint32_t option_count;
  uint32_t info_log_bytes;  // capacity of the program's log buffers; 0 for none
  uint32_t error_log_bytes;
};
static_assert(sizeof(LoadModuleCommand) == 32);
struct ModulePart {
  uint64_t bytes;
  uint32_t inlined;   // 1: the bytes follow in this frame
  uint32_t bounced;   // 1: they come through the bounce slots, whose key follows
  WireMemoryKey key;  // else pulled from here
  uint64_t offset;    // bounced: what BouncePiece counts at its first byte
};
static_assert(sizeof(ModulePart) == 88);
struct JitOption {  // scalar options only; log buffers travel as capacities above
  uint32_t option;  // CUjit_option or CUlibraryOption
  uint32_t is_library_option;
  uint64_t value;
};
// Reply: LoadModuleReply | info log | error log
struct LoadModuleReply {
  uint32_t info_log_bytes;  // used, without NUL
  uint32_t error_log_bytes;
};

// --- Linking at run time (cuLink*). The link lives at the server.
// A call: LinkCreateCommand | JitOption[option_count]. No reply beyond the result.
struct LinkCreateCommand {
  uint64_t handle;  // minted by the client: kLink
  uint32_t option_count;
  uint32_t info_log_bytes;  // capacities, as in LoadModuleCommand
  uint32_t error_log_bytes;
  uint32_t reserved;
};
// An input, as code is loaded: LinkAddCommand | ModulePart | inline part | JitOption[] | name. The
// part is one, in whatever format. Reply: as that of loading, with all that the logs hold.
struct LinkAddCommand {
  LoadModuleCommand load;  // handle: the link
  uint32_t type;           // CUjitInputType
  uint32_t name_bytes;
};
static_assert(sizeof(LinkAddCommand) == 40);
// A call: LinkCommand. Reply: LinkCompleteReply | info log | error log
struct LinkCommand {
  uint64_t handle;
};
struct LinkCompleteReply {
  LoadModuleReply logs;
  uint64_t bytes;  // of the image that came out, which LinkRead gets
};
// A call. Reply: that part of the image, which is at most kMaxLinkReadBytes.
inline constexpr uint32_t kMaxLinkReadBytes = 48 * 1024;
struct LinkReadCommand {
  uint64_t handle;
  uint64_t offset;
  uint32_t bytes;
  uint32_t reserved;
};
// Posted: kLinkDestroy, LinkCommand.

// --- A function or kernel by name: a call. GetFunctionCommand | name
struct GetFunctionCommand {
  uint64_t handle;  // minted by the client: kFunction (owner is a module) or kKernel (a library)
  uint64_t owner;
  uint32_t name_bytes;
  uint32_t reserved;
};
// Reply: FunctionInfo | KernelParameter[parameter_count]. Everything that a launch and the
// attribute queries need, so that they are answered in the client.
inline constexpr uint32_t kFunctionAttributeSlots = 24;
struct FunctionInfo {
  int32_t attributes[kFunctionAttributeSlots];  // by CUfunction_attribute
  uint32_t attribute_known;                     // bit n: attributes[n] is valid
  uint32_t parameter_bytes;
  uint32_t parameter_count;
  uint32_t reserved;
};
struct KernelParameter {
  uint32_t offset;
  uint32_t size;
};

// --- The names of what a module or library holds, from the one with the number `first` on, as many
// as a reply takes: a call.
struct ListFunctionsCommand {
  uint64_t owner;  // kModule or kLibrary
  uint32_t first;
  uint32_t reserved;
};
// Reply: ListFunctionsReply | the names, each with a NUL behind it.
struct ListFunctionsReply {
  uint32_t total;  // functions of the owner
  uint32_t listed;
  uint32_t bytes;  // of the names
  uint32_t reserved;
};

// --- A bounce slot is filled or emptied as a BouncePiece asked for: posted, in no context.
struct BounceDoneCommand {
  uint64_t call;  // sequence
  uint32_t slot;
  uint32_t reserved;
};
static_assert(sizeof(BounceDoneCommand) == 16);

// --- The client's window of a stream is used up: a call, answered when enough has finished.
struct WaitStreamProgressCommand {
  uint64_t stream;
  uint64_t value;  // of ProgressEntry, as the client counts cost
};

// --- A function of the program in a stream: posted. When the stream gets there, the server sends a
//     FrameType::kHostFunction with this id and waits; HostFunctionDone, posted, lets the stream go
//     on. A function that cannot get its turn is sent with the error, and nothing waits for it.
struct HostFunctionCommand {
  uint64_t stream;
  uint64_t id;  // minted by the client, never again
};
static_assert(sizeof(HostFunctionCommand) == 16);
struct HostFunctionDoneCommand {
  uint64_t id;
};

}  // namespace penstock
