#include "interposer/core/proc_table.h"

#include <algorithm>

namespace penstock::interposer {

void* FindProc(std::span<const ProcEntry> table, std::string_view name, int version, uint64_t flags,
               CUdriverProcAddressQueryResult* status) {
  auto by_name = [](const ProcEntry& entry, std::string_view text) { return entry.name < text; };
  auto first = std::lower_bound(table.begin(), table.end(), name, by_name);
  auto last = first;
  bool has_twins = false;
  for (; last != table.end() && last->name == name; ++last) has_twins |= last->per_thread;
  const bool per_thread = has_twins && (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  void* found = nullptr;
  for (auto entry = first; entry != last; ++entry) {
    // Versions ascend, so the last one that fits is the newest.
    if (entry->per_thread == per_thread && entry->version <= version) found = entry->address;
  }
  if (status != nullptr) {
    *status = found != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
              : first == last  ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
                               : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
  }
  return found;
}

}  // namespace penstock::interposer
