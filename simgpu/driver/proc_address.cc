// cuGetProcAddress. Rule (equal to a real driver's table at every version): among the functions of
// that base name, the one of the greatest version that the caller knows; with the per-thread flag
// the twins only, if the name has any.
#include "simgpu/driver/proc_address.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "simgpu/driver/entry.h"

#undef cuGetProcAddress

using namespace simgpu;

SIMGPU_EXPORT cuGetProcAddress_v2(const char* symbol, void** address, int version, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult* status) {
  constexpr cuuint64_t kKnownFlags =
      CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (symbol == nullptr || address == nullptr || (flags & ~kKnownFlags) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *address = nullptr;
  const std::string_view name(symbol);
  const Procedure* const end = kProcedures + kProcedureCount;
  const Procedure* first = std::lower_bound(
      kProcedures, end, name,
      [](const Procedure& procedure, std::string_view base) { return procedure.base < base; });
  bool has_twins = false;
  for (auto* p = first; p != end && p->base == name; ++p) has_twins |= p->per_thread;
  const bool twin = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0 && has_twins;
  const Procedure* best = nullptr;
  bool known = false;
  for (auto* p = first; p != end && p->base == name; ++p) {
    if (p->per_thread != twin) continue;
    known = true;
    if (p->version <= version) best = p;
  }
  if (best == nullptr) {
    if (status != nullptr) {
      *status =
          known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return CUDA_ERROR_NOT_FOUND;
  }
  *address = const_cast<void*>(best->address);
  if (status != nullptr) *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuGetProcAddress(const char* symbol, void** address, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(symbol, address, version, flags, nullptr);
}
