// Events: creating and destroying are posted, the rest is generated.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {

CUresult CuEventCreate(CUevent* event, unsigned int flags) {
  Call call(Function::kCuEventCreate, Call::kContext);
  if (!call.ready() || !call.Out(event)) return call.result();
  constexpr unsigned kKnown =
      CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if ((flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
  // Sharing events between processes is not forwarded yet.
  if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  EventRecord* const record = call.session().events.Mint([&](EventRecord& made, Handle) {
    made.context = &call.context();
    made.flags = flags;
  });
  if (record == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  commands::CuEventCreate command{};
  command.phEvent = record->handle.bits;
  command.Flags = flags;
  const CUresult posted = call.Post(command);
  if (posted != CUDA_SUCCESS) {
    call.session().events.Remove(record->handle);
    return posted;
  }
  *event = reinterpret_cast<CUevent>(record->handle.bits);
  return CUDA_SUCCESS;
}

CUresult CuEventDestroy(CUevent event) {
  Call call(Function::kCuEventDestroy, Call::kContext);
  if (!call.ready()) return call.result();
  const Handle handle{reinterpret_cast<uint64_t>(event)};
  if (!call.session().events.Remove(handle)) return CUDA_ERROR_INVALID_HANDLE;
  commands::CuEventDestroy command{};
  command.hEvent = handle.bits;
  return call.Post(command);
}

}  // namespace penstock::interposer
