// The slow paths of memory access: finding the live range an access lies in, and saying what is
// wrong with one that lies in none.
#include <cstdio>

#include "simgpu/exec/engine.h"

namespace simgpu::exec {
namespace {

bool FindRange(Context& c, uint64_t address, uint32_t bytes, bool write, MemoryMap::Range* range) {
  return c.engine->memory().Find(address, range) && address >= range->begin &&
         bytes <= range->end - address && !(write && range->read_only);
}

bool InParameters(const Context& c, uint64_t address, uint32_t bytes, bool write) {
  uint64_t begin = reinterpret_cast<uint64_t>(c.parameters);
  return !write && address >= begin && address < begin + c.parameter_bytes &&
         bytes <= begin + c.parameter_bytes - address;
}

}  // namespace

void FaultAt(Context& c, const Inst& i, Fault fault, uint32_t lane, uint64_t address,
             const char* space, uint32_t bytes, bool write) {
  char text[160];
  snprintf(text, sizeof(text), "%s of %u bytes at %s address (0x%llx) %s",
           write ? "a write" : "a read", bytes, space, static_cast<unsigned long long>(address),
           fault == Fault::kMisalignedAddress ? "is misaligned" : "is out of bounds");
  c.engine->SetFault(fault, &i, lane, text);
}

bool CheckGlobal(Context& c, const Inst& i, uint64_t low, uint64_t high, bool write) {
  MemoryMap::Range range;
  if (high < low || !c.engine->memory().Find(low, &range)) return false;
  if (low < range.begin || high > range.end || (write && range.read_only)) return false;
  CachedRange& slot = c.ranges[i.hint()];
  slot.begin = range.begin;
  slot.end = range.end;
  slot.read_only = range.read_only;
  return true;
}

bool CheckLanes(Context& c, const Inst& i, uint32_t mask, const uint64_t* addresses, uint32_t bytes,
                bool write) {
  MemoryMap::Range range;
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
    uint64_t address = addresses[l];
    if (address >= range.begin && address < range.end && bytes <= range.end - address &&
        !(write && range.read_only))
      continue;
    if (!FindRange(c, address, bytes, write, &range)) {
      FaultAt(c, i, Fault::kIllegalAddress, l, address, "global", bytes, write);
      return false;
    }
  }
  return true;
}

bool CheckGeneric(Context& c, const Inst& i, uint32_t mask, const uint64_t* addresses,
                  uint32_t bytes, bool write) {
  uint64_t shared = reinterpret_cast<uint64_t>(c.shared);
  uint64_t local = reinterpret_cast<uint64_t>(c.local);
  uint64_t local_bytes = c.local_stride * kLanes;
  MemoryMap::Range range;
  bool all_global = true;
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
    uint64_t address = addresses[l];
    if (address >= range.begin && address < range.end && bytes <= range.end - address &&
        !(write && range.read_only))
      continue;
    if (address - shared < c.shared_bytes && bytes <= c.shared_bytes - (address - shared)) {
      all_global = false;
      continue;
    }
    // Local memory belongs to one lane.
    uint64_t own = address - local - l * c.local_stride;
    if (local_bytes && own < c.local_stride && bytes <= c.local_stride - own) {
      all_global = false;
      continue;
    }
    if (InParameters(c, address, bytes, write)) {
      all_global = false;
      continue;
    }
    if (!FindRange(c, address, bytes, write, &range)) {
      FaultAt(c, i, Fault::kIllegalAddress, l, address, "generic", bytes, write);
      return false;
    }
  }
  if (all_global) {
    CachedRange& slot = c.ranges[i.hint()];
    slot.begin = range.begin;
    slot.end = range.end;
    slot.read_only = range.read_only;
  }
  return true;
}

}  // namespace simgpu::exec
