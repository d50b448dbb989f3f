#include "interop/context_storage.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace penstock::interop {
namespace {

struct Value {
  void* value = nullptr;
  StorageDestructor destructor = nullptr;
};

struct Storage {
  std::shared_mutex values_mutex;
  std::map<std::pair<CUcontext, void*>, Value> values;
  // Changed only under the lock, after `values`; read without it. A thread that reads a value
  // under the lock stores the generation that it read under the same lock.
  std::atomic<uint64_t> generation{1};
};

// Leaked: the runtime's exit handler calls in after our static destructors.
Storage& storage() {
  static Storage* const instance = new Storage;
  return *instance;
}

struct CacheEntry {
  uint64_t generation;  // 0 never matches
  CUcontext context;
  void* key;
  void* value;
};
constexpr size_t kCacheEntries = 8;  // keys in one process: five with cuDNN loaded

CacheEntry& CacheFor(CUcontext context, void* key) {
  thread_local CacheEntry cache[kCacheEntries] = {};  // trivial type: no destructor at thread exit
  const uint64_t mixed =
      (reinterpret_cast<uint64_t>(key) * 31 + reinterpret_cast<uint64_t>(context)) *
      0x9e3779b97f4a7c15ULL;
  return cache[mixed >> 61];
}

}  // namespace

CUresult StoragePut(CUcontext context, void* key, void* value, StorageDestructor destructor) {
  Storage& s = storage();
  std::unique_lock lock(s.values_mutex);
  s.values[{context, key}] = {value, destructor};
  s.generation.fetch_add(1, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult StorageDelete(CUcontext context, void* key) {
  Storage& s = storage();
  std::unique_lock lock(s.values_mutex);
  const bool found = s.values.erase({context, key}) != 0;
  if (found) s.generation.fetch_add(1, std::memory_order_release);
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult StorageGet(CUcontext context, void* key, void** value) {
  Storage& s = storage();
  CacheEntry& cached = CacheFor(context, key);
  if (cached.generation == s.generation.load(std::memory_order_acquire) &&
      cached.context == context && cached.key == key) {
    *value = cached.value;
    return CUDA_SUCCESS;
  }
  std::shared_lock lock(s.values_mutex);
  const auto found = s.values.find({context, key});
  if (found == s.values.end()) return CUDA_ERROR_INVALID_HANDLE;
  *value = found->second.value;
  cached = {s.generation.load(std::memory_order_relaxed), context, key, *value};
  return CUDA_SUCCESS;
}

void StorageDropContext(CUcontext context) {
  Storage& s = storage();
  std::vector<std::pair<void*, Value>> dropped;
  {
    std::unique_lock lock(s.values_mutex);
    auto it = s.values.lower_bound({context, nullptr});
    while (it != s.values.end() && it->first.first == context) {
      dropped.emplace_back(it->first.second, it->second);
      it = s.values.erase(it);
    }
    s.generation.fetch_add(1, std::memory_order_release);
  }
  for (const auto& [key, value] : dropped) {
    if (value.destructor != nullptr) value.destructor(context, key, value.value);
  }
}

}  // namespace penstock::interop
