// The client's records of contexts, streams, events, modules and functions. Records never move and
// are never freed (record_table.h); what a launch reads is immutable or atomic, the rest is guarded
// as noted.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "protocol/handle.h"
#include "protocol/operations.h"

namespace penstock::interposer {

// Servers that one program uses at once.
inline constexpr uint32_t kMaxServers = 64;

struct ContextRecord;
struct FunctionRecord;
struct KeptImage;
class Session;

// Streams count the cost of what was sent and of what the server has seen to finish; the difference
// is bounded by the stream's window.
struct StreamRecord {
  Handle handle;
  ContextRecord* context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;  // for cuStreamGetId
  std::atomic<uint64_t> issued{0};
  std::atomic<uint64_t> finished{0};
  // What it has to finish before the asynchronous downloads on it are done.
  std::atomic<uint64_t> downloads{0};

  void Reset() {
    context = nullptr;
    flags = 0;
    priority = 0;
    id = 0;
    issued = 0;
    finished = 0;
    downloads = 0;
  }
  bool downloading() const { return finished.load() < downloads.load(); }
  void Finished(uint64_t value) {
    uint64_t seen = finished.load(std::memory_order_relaxed);
    while (seen < value && !finished.compare_exchange_weak(seen, value)) {
    }
  }
};

struct ContextRecord {
  Handle handle;               // as the program knows it
  Handle wire;                 // as its server knows it: another one for primary contexts
  Session* session = nullptr;  // where it lives
  uint32_t server = 0;         // the session's index
  uint32_t device = 0;         // ordinal
  bool primary = false;
  uint64_t id = 0;
  uint32_t api_version = 0;
  std::atomic<bool> active{false};  // primary: retained and not reset since
  std::atomic<uint32_t> flags{0};
  std::atomic<int> cache_config{0};
  std::atomic<int> shared_config{0};
  // An error that no later call of this context survives (a fault in a kernel); CUDA_SUCCESS if
  // none.
  std::atomic<CUresult> sticky{CUDA_SUCCESS};
  uint32_t retains = 0;  // primary: guarded by the Client's contexts lock
  // What the legacy stream has to finish before synchronous uploads that were only posted are done,
  // and before everything else on it is.
  std::atomic<uint64_t> uploads_posted{0}, others_posted{0};
  std::atomic<int> non_blocking_streams{0};
  // Asynchronous downloads: how many were posted, and how many of these are known to be done.
  std::atomic<uint64_t> downloads_posted{0}, downloads_done{0};
  // Streams that were destroyed with downloads on them, and how many of these were waited for.
  std::atomic<uint64_t> orphans{0}, orphans_done{0};
  // A kernel was launched that nobody has waited for since: it may have output to show.
  std::atomic<bool> launched{false};
  StreamRecord legacy;  // the stream that a null handle names

  void Reset() {
    wire = Handle{};
    session = nullptr;
    server = 0;
    device = 0;
    primary = false;
    id = 0;
    api_version = 0;
    active = false;
    flags = 0;
    cache_config = 0;
    shared_config = 0;
    sticky = CUDA_SUCCESS;
    retains = 0;
    uploads_posted = 0;
    others_posted = 0;
    non_blocking_streams = 0;
    downloads_posted = 0;
    downloads_done = 0;
    orphans = 0;
    orphans_done = 0;
    launched = false;
    legacy.Reset();
  }
};

struct EventRecord {
  Handle handle;
  ContextRecord* context = nullptr;
  unsigned flags = 0;
  void Reset() {
    context = nullptr;
    flags = 0;
  }
};

// A function of a module or a kernel of a library, with everything a launch needs. Immutable once
// minted, but for the attributes that cuFuncSetAttribute changes.
struct FunctionRecord {
  Handle handle;
  Handle owner;
  ContextRecord* context = nullptr;  // null for kernels, which belong to none
  uint32_t server = 0;               // whose function it is: a session's index
  std::string name;
  FunctionInfo info{};
  std::vector<KernelParameter> parameters;
  std::atomic<int> cache_config{0};
  // A kernel as other servers have it, once it was used there. Null while there is none.
  using Elsewhere = std::array<std::atomic<FunctionRecord*>, kMaxServers>;
  std::atomic<Elsewhere*> elsewhere{nullptr};

  ~FunctionRecord() { delete elsewhere.load(); }
  void Reset() {
    delete elsewhere.exchange(nullptr);
    owner = Handle{};
    context = nullptr;
    server = 0;
    name.clear();
    info = FunctionInfo{};
    parameters.clear();
    cache_config = 0;
  }
};

struct GlobalVariable {
  CUdeviceptr address = 0;
  size_t bytes = 0;
};

// A module or library. The maps remember what was asked for, as asking again is common and local.
struct ModuleRecord {
  Handle handle;
  ContextRecord* context = nullptr;  // null for libraries
  uint32_t server = 0;               // where it is loaded: a session's index
  std::mutex mutex;                  // guards the maps
  std::map<std::string, FunctionRecord*, std::less<>> functions;
  // Libraries have one instance of a variable per context.
  std::map<std::pair<ContextRecord*, std::string>, GlobalVariable> globals;
  // Of a library where there are several servers: what to load elsewhere, and where it is loaded.
  std::mutex loading;  // guards both, and is held while it is loaded
  std::shared_ptr<KeptImage> kept;
  std::map<uint32_t, ModuleRecord*> elsewhere;  // by the session's index

  void Reset() {
    kept.reset();
    elsewhere.clear();
    context = nullptr;
    server = 0;
    functions.clear();
    globals.clear();
  }
};

// A link in progress (cuLink*). Where the program wants its logs is remembered for as long as it
// lives, as the driver does.
struct LinkRecord {
  Handle handle;
  ContextRecord* context = nullptr;
  char* info_log = nullptr;
  char* error_log = nullptr;
  uint32_t info_bytes = 0, error_bytes = 0;
  void** info_used = nullptr;
  void** error_used = nullptr;
  std::vector<std::byte> image;  // what came out; the program holds its address

  void Reset() {
    context = nullptr;
    info_log = error_log = nullptr;
    info_bytes = error_bytes = 0;
    info_used = error_used = nullptr;
    image.clear();
  }
};

}  // namespace penstock::interposer
