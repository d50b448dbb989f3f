// Waiting for streams, events, contexts and windows: all become pending waits (worker/waits.h).
#include "custom_server.gen.h"
#include "protocol/operations.h"
#include "server/worker/operations.h"
#include "server/worker/worker.h"

namespace penstock::server {

CUresult ServeCuStreamSynchronize(CallContext& call, const commands::CuStreamSynchronize& command,
                                  Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuStreamSynchronize is followed by something.");
  CUstream stream;
  if (!call.Stream(command.hStream, &stream)) return call.error();
  const auto context = call.stream_state()->context.lock();
  if (context == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return call.worker().waits().ForStreams(call, context, {call.stream_state()});
}

CUresult ServeCuEventSynchronize(CallContext& call, const commands::CuEventSynchronize& command,
                                 Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuEventSynchronize is followed by something.");
  CUevent event;
  if (!call.Event(command.hEvent, &event)) return call.error();
  return call.worker().waits().ForEvent(call, call.worker().current(), event);
}

CUresult ServeCuCtxSynchronize_v2(CallContext& call, const commands::CuCtxSynchronize_v2& command,
                                  Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuCtxSynchronize is followed by something.");
  Worker& worker = call.worker();
  std::shared_ptr<ContextState> context = worker.current();
  if (command.ctx != 0 && !call.ContextState(command.ctx, &context)) return call.error();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (CUresult result = worker.MakeCurrent(context); result != CUDA_SUCCESS) return result;
  std::vector<std::shared_ptr<StreamState>> streams = context->streams;
  streams.push_back(context->legacy);
  // A destroyed stream may still run what it was given; its marks are the last thing in it.
  return worker.waits().ForStreams(call, context, streams, context->retiring);
}

CUresult ServeWaitStreamProgress(CallContext& call, Reader& reader) {
  WaitStreamProgressCommand command;
  if (!reader.Take(&command) || !reader.AtEnd()) {
    return call.Malformed("A wait for progress has an impossible size.");
  }
  CUstream stream;
  if (!call.Stream(command.stream, &stream)) return call.error();
  return call.worker().waits().ForProgress(call, call.stream_state(), command.value);
}

}  // namespace penstock::server
