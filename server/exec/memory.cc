// Device memory. Every allocation enters the table that all device pointers are checked against;
// frees go to the reaper.
#include <algorithm>
#include <optional>

#include "custom_server.gen.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// Frees may synchronise, so they wait for what the context's streams have to do at this moment.
CUresult Reap(CallContext& call, const std::shared_ptr<ContextState>& context, const char* what,
              std::function<CUresult(const Driver&)> free, std::shared_ptr<void> held = nullptr) {
  Worker& worker = call.worker();
  auto job = std::make_shared<ReapJob>();
  if (held != nullptr) job->holds.push_back(std::move(held));
  job->context = context;
  job->what = what;
  job->thread = call.header().thread;
  job->free = std::move(free);
  if (CUresult result = worker.MakeCurrent(context); result != CUDA_SUCCESS) return result;
  std::vector<std::shared_ptr<StreamState>> streams = context->streams;
  streams.push_back(context->legacy);
  for (const auto& stream : streams) {
    if (stream->operations == 0) continue;
    CUevent event = nullptr;
    // The free itself then waits.
    if (worker.TakeEvent(*context, &event) != CUDA_SUCCESS) continue;
    if (worker.driver().cuEventRecord(event, stream->stream) == CUDA_SUCCESS) {
      job->events.push_back(event);
    } else {
      worker.ReturnEvent(*context, event);
    }
  }
  worker.reaper().Submit(std::move(job));
  return CUDA_SUCCESS;
}

// The driver's pool keeps what was freed to it, beyond what the quota has given back: before other
// memory is taken within a slot, it returns what it does not use.
void GiveBackPool(Worker& worker, CUdevice device) {
  if (!worker.quota()->limited()) return;
  CUmemoryPool pool = nullptr;
  if (worker.driver().cuDeviceGetMemPool(&pool, device) == CUDA_SUCCESS) {
    worker.driver().cuMemPoolTrimTo(pool, 0);
  }
}

// What is freed in a stream is there at once for what is allocated behind it in the same stream:
// the driver's pool hands the same memory on. Only out of one piece, as the pool does.
std::shared_ptr<Quota::Charge> TakeOver(StreamState& stream, uint32_t device, uint64_t bytes) {
  for (auto& [first, freed] : stream.frees) {
    if (freed->device() != device) continue;
    if (auto charge = freed->Split(bytes); charge != nullptr) return charge;
  }
  return nullptr;
}

// Allocates `wanted` bytes within the slot; when memory is short and frees are under way, waits for
// them and tries once more.
//
// Pool memory is of the device of `pool`, which need not be that of the current context, nor that
// of the stream, in whose order it comes.
struct PoolPlace {
  std::shared_ptr<StreamState> stream;
  uint32_t device;
};
template <typename Reply>
CUresult Allocate(CallContext& call, uint64_t wanted,
                  std::function<CUresult(const Driver&, Reply*, uint64_t* bytes)> allocate,
                  const std::optional<PoolPlace>& pool = std::nullopt) {
  Worker& worker = call.worker();
  const auto context = worker.current();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const AllocationKind kind = pool ? AllocationKind::kPool : AllocationKind::kLinear;
  const uint32_t device = pool ? pool->device : context->device;
  const auto attempt = [&worker, context, allocate, kind, wanted, pool, device](Reply* reply) {
    const uint64_t count = Quota::CountOf(wanted, pool.has_value());
    auto charge = Quota::Take(worker.quota(), device, count);
    if (charge == nullptr && pool) charge = TakeOver(*pool->stream, device, count);
    if (charge == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    if (kind == AllocationKind::kLinear) GiveBackPool(worker, device);
    uint64_t bytes = 0;
    const CUresult result = allocate(worker.driver(), reply, &bytes);
    if (result != CUDA_SUCCESS) return result;
    Allocation range = {reply->dptr, reply->dptr + bytes, kind, {}, {}, std::move(charge)};
    if (kind == AllocationKind::kLinear) range.context = context->handle;
    worker.allocations().Add(range);
    return result;
  };
  Reply reply{};
  const CUresult result = attempt(&reply);
  if (result == CUDA_SUCCESS) call.reply().Put(reply);
  if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
  Wait wait;
  wait.token = call.token();
  wait.context = context;
  wait.reaping = worker.reaper().Outstanding(Reaper::kAnyThread);
  wait.freeing = worker.Freeing(device);
  if (wait.reaping.empty() && wait.freeing.empty()) return result;
  wait.finish = [attempt](std::vector<std::byte>* body) {
    Reply second{};
    const CUresult again = attempt(&second);
    const auto bytes = std::as_bytes(std::span(&second, 1));
    if (again == CUDA_SUCCESS) body->assign(bytes.begin(), bytes.end());
    return again;
  };
  worker.waits().Add(std::move(wait));
  return kDeferred;
}

}  // namespace

CUresult ServeCuMemGetInfo(CallContext& call, const commands::CuMemGetInfo&, Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemGetInfo is followed by something.");
  Worker& worker = call.worker();
  const auto ask = [&worker](std::vector<std::byte>* body) {
    worker.progress().Step();  // a free that its stream has passed counts, however lately
    size_t free = 0, total = 0;
    const CUresult result = worker.driver().cuMemGetInfo_v2(&free, &total);
    const Quota& quota = *worker.quota();
    if (quota.limited() && worker.current() != nullptr) {
      total = quota.limit();
      free = std::min<uint64_t>(free, quota.left(worker.current()->device));
    }
    const commands::CuMemGetInfoReply reply = {free, total};
    const auto bytes = std::as_bytes(std::span(&reply, 1));
    body->assign(bytes.begin(), bytes.end());
    return result;
  };
  Wait wait;
  wait.token = call.token();
  wait.context = worker.current();
  // What this thread has freed counts as free.
  wait.reaping = worker.reaper().Outstanding(call.header().thread);
  if (wait.reaping.empty()) {
    std::vector<std::byte> body;
    const CUresult result = ask(&body);
    call.reply().PutSection(body.data(), body.size());
    return result;
  }
  wait.finish = ask;
  worker.waits().Add(std::move(wait));
  return kDeferred;
}

CUresult ServeCuMemAlloc(CallContext& call, const commands::CuMemAlloc& command, Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemAlloc is followed by something.");
  return Allocate<commands::CuMemAllocReply>(
      call, command.bytesize,
      [wanted = command.bytesize](const Driver& driver, auto* reply, uint64_t* bytes) {
        CUdeviceptr address = 0;
        const CUresult result = driver.cuMemAlloc_v2(&address, wanted);
        reply->dptr = address;
        *bytes = wanted;
        return result;
      });
}

CUresult ServeCuMemAllocPitch(CallContext& call, const commands::CuMemAllocPitch& command,
                              Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemAllocPitch is followed by something.");
  // The pitch is the driver's to choose; as in CUDA, it is 512 bytes or a multiple.
  constexpr uint64_t kPitch = 512;
  const uint64_t row = command.WidthInBytes / kPitch + (command.WidthInBytes % kPitch != 0 ? 1 : 0);
  uint64_t wanted = 0;
  if (__builtin_mul_overflow(row * kPitch, command.Height, &wanted)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return Allocate<commands::CuMemAllocPitchReply>(
      call, wanted, [command](const Driver& driver, auto* reply, uint64_t* bytes) {
        CUdeviceptr address = 0;
        size_t pitch = 0;
        const CUresult result = driver.cuMemAllocPitch_v2(&address, &pitch, command.WidthInBytes,
                                                          command.Height, command.ElementSizeBytes);
        reply->dptr = address;
        reply->pPitch = pitch;
        *bytes = pitch * command.Height;
        return result;
      });
}

CUresult ServeCuMemFree(CallContext& call, const commands::CuMemFree& command, Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemFree is followed by something.");
  if (command.dptr == 0) return CUDA_SUCCESS;
  Worker& worker = call.worker();
  const Allocation* found = worker.allocations().Find(command.dptr, 0);
  if (found == nullptr || found->begin != command.dptr ||
      found->kind == AllocationKind::kVariable) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Its own context, which need not be the current one.
  std::shared_ptr<ContextState> context = worker.current();
  if (!found->context.null()) {
    CUresult error;
    bool minted;
    context = worker.FindContext(found->context, &error, &minted);
  }
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  Allocation removed;
  worker.allocations().Remove(command.dptr, &removed);
  return Reap(
      call, context, "cuMemFree",
      [address = command.dptr, charge = std::move(removed.charge)](const Driver& driver) {
        const CUresult result = driver.cuMemFree_v2(address);
        if (charge != nullptr) charge->Release();
        return result;
      },
      worker.gpu_direct().Forget(command.dptr));
}

CUresult ServeCuMemFreeAsync(CallContext& call, const commands::CuMemFreeAsync& command,
                             Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemFreeAsync is followed by something.");
  CUstream stream;
  if (!call.Stream(command.hStream, &stream)) return call.error();
  if (command.dptr == 0) return CUDA_SUCCESS;
  Worker& worker = call.worker();
  const Allocation* found = worker.allocations().Find(command.dptr, 0);
  if (found == nullptr || found->begin != command.dptr ||
      found->kind == AllocationKind::kVariable) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // A copy that still uses its registration lets go before its stream passes it.
  worker.gpu_direct().Forget(command.dptr);
  const CUresult result = worker.driver().cuMemFreeAsync(command.dptr, stream);
  Allocation removed;
  if (result != CUDA_SUCCESS) return result;
  worker.allocations().Remove(command.dptr, &removed);
  // The memory is the stream's until it gets here, so the slot has it back only then.
  if (worker.quota()->limited() && removed.charge != nullptr) {
    worker.progress().HoldCharge(call.stream_state(), std::move(removed.charge));
  }
  return result;
}

CUresult ServeCuMemAllocAsync(CallContext& call, const commands::CuMemAllocAsync& command,
                              Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemAllocAsync is followed by something.");
  CUstream stream;
  if (!call.Stream(command.hStream, &stream)) return call.error();
  const auto context = call.stream_state()->context.lock();
  if (context == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t device = context->device;
  return Allocate<commands::CuMemAllocAsyncReply>(
      call, command.bytesize,
      [wanted = command.bytesize, stream](const Driver& driver, auto* reply, uint64_t* bytes) {
        CUdeviceptr address = 0;
        const CUresult result = driver.cuMemAllocAsync(&address, wanted, stream);
        reply->dptr = address;
        *bytes = wanted;
        return result;
      },
      PoolPlace{call.stream_state(), device});
}

CUresult ServeCuMemAllocFromPoolAsync(CallContext& call,
                                      const commands::CuMemAllocFromPoolAsync& command,
                                      Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemAllocFromPoolAsync is followed by something.");
  CUstream stream;
  CUmemoryPool pool;
  if (!call.Stream(command.hStream, &stream) || !call.MemoryPool(command.pool, &pool)) {
    return call.error();
  }
  const uint32_t device = Handle{command.pool}.id();  // the default pools are all there are
  return Allocate<commands::CuMemAllocFromPoolAsyncReply>(
      call, command.bytesize,
      [wanted = command.bytesize, pool, stream](const Driver& driver, auto* reply,
                                                uint64_t* bytes) {
        CUdeviceptr address = 0;
        const CUresult result = driver.cuMemAllocFromPoolAsync(&address, wanted, pool, stream);
        reply->dptr = address;
        *bytes = wanted;
        return result;
      },
      PoolPlace{call.stream_state(), device});
}

CUresult ServeCuModuleUnload(CallContext& call, const commands::CuModuleUnload& command,
                             Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuModuleUnload is followed by something.");
  CUmodule module;
  if (!call.Module(command.hmod, &module)) return call.error();
  Worker& worker = call.worker();
  Objects& objects = worker.objects();
  const Handle handle{command.hmod};
  CUresult error;
  bool minted;
  const auto context = worker.FindContext(objects.modules.Find(handle)->context, &error, &minted);
  if (context == nullptr) return error;
  objects.modules.Remove(handle);
  std::vector<Handle> functions;
  objects.functions.ForEach([&](Handle function, const FunctionRecord& record) {
    if (record.owner == handle) functions.push_back(function);
  });
  for (Handle function : functions) objects.functions.Remove(function);
  worker.allocations().RemoveIf(
      [handle](const Allocation& range) { return range.owner == handle; });
  return Reap(call, context, "cuModuleUnload",
              [module](const Driver& driver) { return driver.cuModuleUnload(module); });
}

}  // namespace penstock::server
