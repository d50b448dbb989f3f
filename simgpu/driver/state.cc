#include "simgpu/driver/state.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "interop/export_tables.h"
#include "simgpu/driver/context.h"
#include "simgpu/driver/entry.h"
#include "simgpu/driver/log.h"

namespace simgpu {
namespace {

std::atomic<State*> g_state{nullptr};
std::atomic<bool> g_forked{false};
std::mutex g_init_mutex;

bool EnvIs(const char* name, const char* value) {
  const char* found = getenv(name);
  return found != nullptr && std::strcmp(found, value) == 0;
}

}  // namespace

State* state() {
  return g_state.load(std::memory_order_acquire);
}

CUresult InitialiseState() {
  if (g_forked) return CUDA_ERROR_NOT_INITIALIZED;
  std::lock_guard lock(g_init_mutex);
  if (State* existing = state(); existing != nullptr) {
    return existing->devices.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
  }
  auto* fresh = new State;
  if (!fresh->memory.Reserve()) {
    LogWarning("No address range for device memory can be reserved: cuInit fails.");
    delete fresh;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  fresh->devices = MakeDevices();
  if (!fresh->devices.empty() && fresh->devices.front()->gpu_direct) fresh->memory.BackByFiles();
  if (const char* shared = getenv("SIMGPU_SHARED"); shared != nullptr && *shared != '\0') {
    std::string error;
    fresh->ledger = MemoryLedger::Open(shared, &error);
    if (fresh->ledger == nullptr) {
      LogWarning("%s cuInit fails.", error.c_str());
      delete fresh;
      return CUDA_ERROR_OPERATING_SYSTEM;
    }
    for (auto& device : fresh->devices) device->ledger = fresh->ledger.get();
  }
  for (auto& device : fresh->devices) device->primary_handle = fresh->contexts.Reserve();
  const char* blocking = getenv("CUDA_LAUNCH_BLOCKING");
  fresh->launch_blocking = blocking != nullptr && std::strcmp(blocking, "0") != 0 && *blocking;
  fresh->eager_loading = EnvIs("CUDA_MODULE_LOADING", "EAGER");
  pthread_atfork(nullptr, nullptr, [] {
    g_forked = true;
    g_state = nullptr;
  });
  g_state.store(fresh, std::memory_order_release);
  return fresh->devices.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

}  // namespace simgpu
