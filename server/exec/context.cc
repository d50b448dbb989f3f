// Making and destroying contexts: slow and without a query form, so the executor does it. A primary
// context is retained when it is first used and given back when the client's count reaches zero.
#include "custom_server.gen.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// Runs a job that destroys a context, on the executor, once the reaper has no business there.
void RunAfterReaper(Worker& worker, const std::shared_ptr<ContextState>& context,
                    std::function<void()> job, std::function<void()> finish) {
  Wait wait;
  for (auto& reaping : worker.reaper().Outstanding(Reaper::kAnyThread)) {
    if (reaping->context == context) wait.reaping.push_back(std::move(reaping));
  }
  wait.finish = [&worker, job, finish](std::vector<std::byte>*) {
    worker.executor().Run(job, finish);
    return kDeferred;
  };
  worker.waits().Add(std::move(wait));
}

// Gives the primary context back (reset: whoever else holds it in this process, which is nobody).
CUresult EndPrimary(CallContext& call, int32_t ordinal, bool reset) {
  Worker& worker = call.worker();
  CUdevice device;
  if (!call.Device(ordinal, &device)) return call.error();
  const auto context = worker.objects().primaries[ordinal];
  if (context == nullptr) {
    return worker.primary_busy(ordinal) || reset ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  }
  const ReplyToken token = call.token();
  worker.ForgetContext(context);
  worker.SetPrimaryBusy(ordinal, true);
  auto result = std::make_shared<CUresult>(CUDA_SUCCESS);
  RunAfterReaper(
      worker, context,
      [&worker, device, reset, result] {
        const Driver& driver = worker.driver();
        if (reset) *result = driver.cuDevicePrimaryCtxReset_v2(device);
        const CUresult released = driver.cuDevicePrimaryCtxRelease_v2(device);
        if (!reset) *result = released;
      },
      [&worker, ordinal, token, result, context] {
        worker.ContextIsGone(*context);
        worker.SetPrimaryBusy(ordinal, false);
        worker.ForwardOutput();
        worker.Answer(token, *result);
      });
  return kDeferred;
}

}  // namespace

CUresult ServeCuDevicePrimaryCtxRetain(CallContext& call,
                                       const commands::CuDevicePrimaryCtxRetain& command,
                                       Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuDevicePrimaryCtxRetain is followed by something.");
  CUdevice device;
  if (!call.Device(command.dev, &device)) return call.error();
  // While it is being reset it is retained by the first call that uses it.
  if (call.worker().primary_busy(command.dev)) return CUDA_SUCCESS;
  return call.worker().RetainPrimary(command.dev);
}

CUresult ServeCuDevicePrimaryCtxRelease(CallContext& call,
                                        const commands::CuDevicePrimaryCtxRelease& command,
                                        Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuDevicePrimaryCtxRelease is followed by something.");
  return EndPrimary(call, command.dev, false);
}

CUresult ServeCuDevicePrimaryCtxReset(CallContext& call,
                                      const commands::CuDevicePrimaryCtxReset& command,
                                      Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuDevicePrimaryCtxReset is followed by something.");
  return EndPrimary(call, command.dev, true);
}

CUresult ServeCuCtxCreate(CallContext& call, const commands::CuCtxCreate& command, Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuCtxCreate is followed by something.");
  CUdevice device;
  if (!call.Device(command.dev, &device)) return call.error();
  Worker& worker = call.worker();
  if (!worker.context_charges().Take(device)) return CUDA_ERROR_OUT_OF_MEMORY;
  const ReplyToken token = call.token();
  struct Made {
    CUcontext context = nullptr;
    CUresult result = CUDA_SUCCESS;
  };
  auto made = std::make_shared<Made>();
  worker.executor().Run(
      [&worker, made, device, flags = command.flags] {
        const Driver& driver = worker.driver();
        made->result = driver.cuCtxCreate_v2(&made->context, flags, device);
        CUcontext popped;
        if (made->result == CUDA_SUCCESS) driver.cuCtxPopCurrent_v2(&popped);
      },
      [&worker, made, device, token, wire = command.pctx] {
        if (made->result == CUDA_SUCCESS) {
          ContextRecord record;
          record.state = worker.NewContext(Handle{wire}, made->context, device);
          if (!worker.objects().contexts.Adopt(Handle{wire}, std::move(record))) {
            return worker.End("A context is made under an impossible handle.", true);
          }
        } else {
          worker.context_charges().GiveBack(device);
        }
        worker.Answer(token, made->result);
      });
  return kDeferred;
}

CUresult ServeCuCtxDestroy(CallContext& call, const commands::CuCtxDestroy& command, Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuCtxDestroy is followed by something.");
  Worker& worker = call.worker();
  std::shared_ptr<ContextState> context;
  if (!call.ContextState(command.ctx, &context)) return call.error();
  if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  const ReplyToken token = call.token();
  worker.ForgetContext(context);
  auto result = std::make_shared<CUresult>(CUDA_SUCCESS);
  RunAfterReaper(
      worker, context,
      [&worker, context, result] { *result = worker.driver().cuCtxDestroy_v2(context->context); },
      [&worker, context, result, token] {
        worker.ContextIsGone(*context);
        worker.ForwardOutput();
        worker.Answer(token, *result);
      });
  return kDeferred;
}

}  // namespace penstock::server
