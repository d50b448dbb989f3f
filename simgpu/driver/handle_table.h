// Handles given to the program, and what they stand for.
//
// A handle is a tag and a running number in the clothes of a pointer, never an address: it is found
// in a table or it is not, so that garbage and freed handles give an error instead of a crash.
// Numbers are never reused. Objects are shared, since work in flight may outlive the handle.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace simgpu {

// Upper bits of a handle. They keep the kinds apart where CUDA casts one into another
// (CUkernel to CUfunction), and make a handle readable in a debugger.
enum class HandleKind : uint64_t {
  kContext = 0xc1,
  kStream = 0xc2,
  kEvent = 0xc3,
  kModule = 0xc4,
  kFunction = 0xc5,
  kLibrary = 0xc6,
  kKernel = 0xc7,
  kPool = 0xc8,
  kLink = 0xc9,
  kReservation = 0xca,
};

template <typename T, typename Handle, HandleKind kind>
class HandleTable {
 public:
  Handle Insert(std::shared_ptr<T> object) {
    std::unique_lock lock(mutex_);
    const uint64_t value = Next();
    objects_.emplace(value, std::move(object));
    return ToHandle(value);
  }
  // A handle that stands for nothing yet; Set gives it an object.
  Handle Reserve() {
    std::unique_lock lock(mutex_);
    return ToHandle(Next());
  }
  void Set(Handle handle, std::shared_ptr<T> object) {
    std::unique_lock lock(mutex_);
    objects_[ToValue(handle)] = std::move(object);
  }
  std::shared_ptr<T> Find(Handle handle) const {
    std::shared_lock lock(mutex_);
    const auto found = objects_.find(ToValue(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> Remove(Handle handle) {
    std::unique_lock lock(mutex_);
    const auto found = objects_.find(ToValue(handle));
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  static bool IsKind(const void* handle) {
    return ToValue(handle) >> 40 == static_cast<uint64_t>(kind);
  }

 private:
  static uint64_t ToValue(const void* handle) { return reinterpret_cast<uint64_t>(handle); }
  static Handle ToHandle(uint64_t value) { return reinterpret_cast<Handle>(value); }
  uint64_t Next() { return (static_cast<uint64_t>(kind) << 40) | (next_++ << 4); }

  mutable std::shared_mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<T>> objects_;
  uint64_t next_ = 1;
};

}  // namespace simgpu
