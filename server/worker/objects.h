// What a session has made: one record per handle, and the state of contexts and streams behind it.
//
// A record holds the driver's object, or the error of its creation (a tombstone). The state of a
// context or stream is shared with waits and transfers, which may outlive the handle.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "protocol/handle.h"
#include "protocol/handle_table.h"
#include "server/worker/arena.h"
#include "server/worker/quota.h"

namespace penstock::server {

struct ContextState;

// One stream of the program. Costs are counted in the client's units (FrameHeader::result).
struct StreamState {
  Handle handle;  // kLegacyStream for the legacy one
  CUstream stream = nullptr;
  std::weak_ptr<ContextState> context;
  bool destroyed = false;

  uint64_t issued = 0;      // cost handed to the driver
  uint64_t finished = 0;    // cost that the device is known to have passed
  uint64_t told = 0;        // what the client knows
  uint64_t operations = 0;  // handed to the driver, whatever their cost

  // Marks: the n-th one writes word_base + n into the progress word. `unseen` are those that the
  // device has not reached, oldest first.
  struct Mark {
    uint32_t number;
    uint64_t cost, operations;  // issued before it
  };
  StreamWords words;  // zero until the first mark or gate
  uint32_t word_base = 0;
  uint32_t marks = 0;
  uint64_t marked_cost = 0, marked_operations = 0;
  std::deque<Mark> unseen;
  uint32_t gates = 0;  // value of the newest gate; counts on from what the words hold

  // Inline slots that operation number `first` reads or writes, oldest first.
  std::deque<std::pair<uint64_t, InlineSlot>> slots;
  // Memory that operation number `first` frees, oldest first.
  std::deque<std::pair<uint64_t, std::shared_ptr<Quota::Charge>>> frees;
};

struct ContextState {
  Handle handle;
  CUcontext context = nullptr;
  CUdevice device = 0;
  bool primary = false;
  bool alive = true;
  std::shared_ptr<StreamState> legacy;
  std::vector<std::shared_ptr<StreamState>> streams;   // living ones, without the legacy stream
  std::vector<std::shared_ptr<StreamState>> retiring;  // destroyed, maybe still running
  std::unique_ptr<Arena> arena;                        // made on first use
  CUstream upload_stream = nullptr, download_stream = nullptr;  // internal, made with the arena
  WordIndex upload_word = 0, download_word = 0;
  uint32_t uploads_issued = 0, downloads_issued = 0;  // values of those words
  std::vector<CUevent> free_events;
  std::vector<std::shared_ptr<Quota::Charge>>
      charges;  // once it is being destroyed: what ends then
};

struct ContextRecord {
  std::shared_ptr<ContextState> state;
  CUresult tombstone = CUDA_SUCCESS;
};
struct StreamRecord {
  std::shared_ptr<StreamState> state;
  CUresult tombstone = CUDA_SUCCESS;
};
struct EventRecord {
  CUevent event = nullptr;
  CUresult tombstone = CUDA_SUCCESS;
  Handle context;
};
struct ModuleRecord {
  CUmodule module = nullptr;
  CUresult tombstone = CUDA_SUCCESS;
  Handle context;
};
struct LibraryRecord {
  CUlibrary library = nullptr;
  CUresult tombstone = CUDA_SUCCESS;
  std::shared_ptr<std::byte> image;  // the driver may read it as long as it lives
};
// A link in progress. Jobs of the executor hold it as well.
struct LinkRecord {
  std::shared_ptr<struct Link> link;
  CUresult tombstone = CUDA_SUCCESS;
  Handle context;
};
// A function of a module, or a kernel of a library.
struct FunctionRecord {
  CUfunction function = nullptr;
  CUkernel kernel = nullptr;
  CUresult tombstone = CUDA_SUCCESS;
  Handle owner;
  uint32_t parameter_bytes = 0;
  std::vector<std::pair<CUcontext, CUfunction>> by_context;  // of a kernel
};
struct PoolRecord {
  CUmemoryPool pool = nullptr;
};

struct Objects {
  HandleTable<ContextRecord> contexts{HandleKind::kContext};
  HandleTable<ModuleRecord> modules{HandleKind::kModule};
  HandleTable<FunctionRecord> functions{HandleKind::kFunction};
  HandleTable<LibraryRecord> libraries{HandleKind::kLibrary};
  HandleTable<FunctionRecord> kernels{HandleKind::kKernel};
  HandleTable<LinkRecord> links{HandleKind::kLink};
  HandleTable<StreamRecord> streams{HandleKind::kStream};
  HandleTable<EventRecord> events{HandleKind::kEvent};
  std::shared_ptr<ContextState> primaries[kMaxDevices];
};

}  // namespace penstock::server
