// The device memory of a session: which addresses its calls may name.
//
// The driver runs in the worker's address space, where a generic copy takes any address, the
// worker's own memory included. So every device pointer of a call is checked against this table
// first, and what is not wholly inside one live range of the session gets CUDA_ERROR_INVALID_VALUE.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>

#include "protocol/handle.h"
#include "server/worker/quota.h"

namespace penstock::server {

enum class AllocationKind : uint8_t { kLinear, kPool, kVariable };

struct Allocation {
  uint64_t begin = 0, end = 0;
  AllocationKind kind = AllocationKind::kLinear;
  Handle context;  // whose end is its end; none for pool memory
  Handle owner;    // module or library of a variable
  std::shared_ptr<Quota::Charge> charge;
};

class Allocations {
 public:
  void Add(const Allocation& allocation) {
    ranges_[allocation.begin] = allocation;
    newest_ = nullptr;
  }

  // The range that holds all bytes; null if there is none. Zero bytes need a range as well.
  const Allocation* Find(uint64_t address, uint64_t bytes) {
    const Allocation* range = newest_;
    if (range == nullptr || address < range->begin || address >= range->end) {
      auto after = ranges_.upper_bound(address);
      if (after == ranges_.begin()) return nullptr;
      range = &std::prev(after)->second;
    }
    if (address >= range->end || bytes > range->end - address) return nullptr;
    newest_ = range;
    return range;
  }

  // The allocation that begins here, taken out; false if there is none.
  bool Remove(uint64_t begin, Allocation* removed) {
    auto found = ranges_.find(begin);
    if (found == ranges_.end()) return false;
    *removed = std::move(found->second);
    ranges_.erase(found);
    newest_ = nullptr;
    return true;
  }

  template <typename Predicate>
  void RemoveIf(Predicate predicate) {
    newest_ = nullptr;
    std::erase_if(ranges_, [&](const auto& entry) { return predicate(entry.second); });
  }

  size_t size() const { return ranges_.size(); }

 private:
  std::map<uint64_t, Allocation> ranges_;  // by begin
  const Allocation* newest_ = nullptr;     // the last one found
};

}  // namespace penstock::server
