// Events: creating and destroying are posted. Most of the rest is generated.
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
  EventRecord* const record = call.objects().events.Mint([&](EventRecord& made, Handle) {
    made.context = &call.context();
    made.flags = flags;
  });
  if (record == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  commands::CuEventCreate command{};
  command.phEvent = record->handle.bits;
  command.Flags = flags;
  const CUresult posted = call.Post(command);
  if (posted != CUDA_SUCCESS) {
    call.objects().events.Remove(record->handle);
    return posted;
  }
  *event = reinterpret_cast<CUevent>(record->handle.bits);
  return CUDA_SUCCESS;
}

CUresult CuEventDestroy(CUevent event) {
  Call call(Function::kCuEventDestroy, Call::kContext);
  if (!call.ready()) return call.result();
  commands::CuEventDestroy command{};
  if (!call.Event(event, &command.hEvent)) return call.result();
  if (!call.objects().events.Remove(Handle{command.hEvent})) return CUDA_ERROR_INVALID_HANDLE;
  return call.Post(command);
}

// Of an event at another server: this thread waits for it instead of the stream. What it puts into
// the stream afterwards comes after the event, as it should; an event that never comes keeps it.
CUresult CuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags, bool per_thread) {
  Call call(Function::kCuStreamWaitEvent, Call::kContext);
  commands::CuStreamWaitEvent command{};
  if (!call.ready() || !call.Stream(stream, per_thread, &command.hStream)) return call.result();
  if ((flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL}) != 0) return CUDA_ERROR_INVALID_VALUE;
  const EventRecord* const record =
      call.objects().events.Find(Handle{reinterpret_cast<uint64_t>(event)});
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (record->context->session != &call.session()) {
    Call there(call, *record->context->session, record->context);
    if (!there.ready()) return there.result();
    return there.Invoke(commands::CuEventSynchronize{record->handle.bits});
  }
  command.hEvent = record->handle.bits;
  command.Flags = flags;
  return call.Post(command, {}, 1);
}

}  // namespace penstock::interposer
