// Waiting on, and writing, words of memory as operations of a stream.
//
// The word may be written by another stream, by a kernel or by any host thread, so a waiting stream
// can only poll: a short spin first, then sleeps that double up to 50 us and go on growing with the
// time that has passed, so that a long wait (a stream behind a large copy, say) ends at most some
// 3 % late and does not take processor time from what it waits for. Its thread does nothing else,
// and nobody but this stream is held up. A wait gives up when its context fails or goes away.
#include <time.h>

#include <algorithm>
#include <atomic>

#include "simgpu/driver/entry.h"

namespace simgpu {
namespace {

constexpr int kSpins = 200;
constexpr long kDoubledSleepNs = 50'000;  // sleeps double up to this,
constexpr long kLateness = 32;            // then are this part of the wait so far,
constexpr long kLongestSleepNs = 2'000'000;

enum class Action { kWait, kWrite, kBarrier };

struct MemoryOperation {
  Action action = Action::kBarrier;
  bool wide = false;  // 64 bits
  uint64_t address = 0;
  uint64_t value = 0;
  unsigned condition = 0;  // CU_STREAM_WAIT_VALUE_*
};

template <typename T>
bool Holds(uint64_t address, T value, unsigned condition) {
  const T word = __atomic_load_n(reinterpret_cast<const T*>(address), __ATOMIC_ACQUIRE);
  switch (condition) {
    case CU_STREAM_WAIT_VALUE_GEQ:  // cyclic, as documented
      return static_cast<std::make_signed_t<T>>(word - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return word == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (word & value) != 0;
    default:
      return static_cast<T>(~(word | value)) != 0;  // CU_STREAM_WAIT_VALUE_NOR
  }
}

bool Holds(const MemoryOperation& operation) {
  return operation.wide ? Holds<uint64_t>(operation.address, operation.value, operation.condition)
                        : Holds<uint32_t>(operation.address, static_cast<uint32_t>(operation.value),
                                          operation.condition);
}

void Wait(Context& context, const MemoryOperation& operation) {
  for (int i = 0; i < kSpins; ++i) {
    if (Holds(operation)) return;
    __builtin_ia32_pause();
  }
  long sleep_ns = 1'000, slept_ns = 0;
  while (!Holds(operation)) {
    if (context.error() != CUDA_SUCCESS) return;
    if (context.draining()) {
      context.Stop();  // what waits behind this must not run
      return;
    }
    const timespec pause = {0, sleep_ns};
    nanosleep(&pause, nullptr);
    if (state()->memory.FindRange(operation.address, operation.wide ? 8 : 4) == nullptr) {
      context.Poison(CUDA_ERROR_ILLEGAL_ADDRESS);  // freed while the stream waits on it
      return;
    }
    slept_ns += sleep_ns;
    sleep_ns = std::min(std::max(std::min(sleep_ns * 2, kDoubledSleepNs), slept_ns / kLateness),
                        kLongestSleepNs);
  }
}

void Perform(Context& context, const MemoryOperation& operation) {
  switch (operation.action) {
    case Action::kWait:
      Wait(context, operation);
      break;
    case Action::kWrite:
      if (operation.wide) {
        __atomic_store_n(reinterpret_cast<uint64_t*>(operation.address), operation.value,
                         __ATOMIC_RELEASE);
      } else {
        __atomic_store_n(reinterpret_cast<uint32_t*>(operation.address),
                         static_cast<uint32_t>(operation.value), __ATOMIC_RELEASE);
      }
      break;
    case Action::kBarrier: {  // a full fence, in a form that ThreadSanitizer understands
      static std::atomic<int> fence{0};
      fence.fetch_add(0, std::memory_order_seq_cst);
      break;
    }
  }
}

CUresult Check(const MemoryOperation& operation) {
  if (operation.action == Action::kBarrier) return CUDA_SUCCESS;
  const size_t bytes = operation.wide ? 8 : 4;
  if (operation.address % bytes != 0 ||
      state()->memory.FindRange(operation.address, bytes) == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult Submit(CUstream handle, std::vector<MemoryOperation> operations) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  for (const MemoryOperation& operation : operations) SIMGPU_RETURN_IF_ERROR(Check(operation));
  Context* const owner = context.get();
  context->Enqueue(stream, [owner, operations = std::move(operations)] {
    for (const MemoryOperation& operation : operations) {
      if (owner->error() != CUDA_SUCCESS || owner->stopping()) return;
      Perform(*owner, operation);
    }
  });
  return CUDA_SUCCESS;
}

CUresult MakeWait(CUdeviceptr address, uint64_t value, unsigned flags, bool wide,
                  MemoryOperation* operation) {
  // The flush flag concerns writes of remote devices; attribute CAN_FLUSH_REMOTE_WRITES is 0.
  if ((flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
  *operation = {Action::kWait, wide, address, value, flags};
  return CUDA_SUCCESS;
}

CUresult MakeWrite(CUdeviceptr address, uint64_t value, unsigned flags, bool wide,
                   MemoryOperation* operation) {
  if (flags > CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
  *operation = {Action::kWrite, wide, address, value, 0};
  return CUDA_SUCCESS;
}

CUresult SubmitWait(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags,
                    bool wide) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  MemoryOperation operation;
  SIMGPU_RETURN_IF_ERROR(MakeWait(address, value, flags, wide, &operation));
  return Submit(stream, {operation});
}

CUresult SubmitWrite(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags,
                     bool wide) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  MemoryOperation operation;
  SIMGPU_RETURN_IF_ERROR(MakeWrite(address, value, flags, wide, &operation));
  return Submit(stream, {operation});
}

CUresult SubmitBatch(CUstream stream, unsigned count, const CUstreamBatchMemOpParams* parameters,
                     unsigned flags) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  constexpr unsigned kLargestBatch = 256;  // documented
  if (count > kLargestBatch || (count > 0 && parameters == nullptr) || flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<MemoryOperation> operations(count);
  for (unsigned i = 0; i < count; ++i) {
    const CUstreamBatchMemOpParams& p = parameters[i];
    MemoryOperation* const operation = &operations[i];
    switch (p.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        SIMGPU_RETURN_IF_ERROR(
            MakeWait(p.waitValue.address, p.waitValue.value, p.waitValue.flags, false, operation));
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        SIMGPU_RETURN_IF_ERROR(
            MakeWait(p.waitValue.address, p.waitValue.value64, p.waitValue.flags, true, operation));
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        SIMGPU_RETURN_IF_ERROR(MakeWrite(p.writeValue.address, p.writeValue.value,
                                         p.writeValue.flags, false, operation));
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        SIMGPU_RETURN_IF_ERROR(MakeWrite(p.writeValue.address, p.writeValue.value64,
                                         p.writeValue.flags, true, operation));
        break;
      case CU_STREAM_MEM_OP_BARRIER:
        *operation = {};
        break;
      case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        return CUDA_ERROR_NOT_SUPPORTED;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return Submit(stream, std::move(operations));
}

}  // namespace
}  // namespace simgpu

#undef cuStreamWaitValue32
#undef cuStreamWaitValue64
#undef cuStreamWriteValue32
#undef cuStreamWriteValue64
#undef cuStreamBatchMemOp

using namespace simgpu;

SIMGPU_EXPORT cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                     unsigned int flags) {
  return SubmitWait(stream, address, value, flags, false);
}
SIMGPU_EXPORT cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                     unsigned int flags) {
  return SubmitWait(stream, address, value, flags, true);
}
SIMGPU_EXPORT cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                      unsigned int flags) {
  return SubmitWrite(stream, address, value, flags, false);
}
SIMGPU_EXPORT cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                      unsigned int flags) {
  return SubmitWrite(stream, address, value, flags, true);
}
SIMGPU_EXPORT cuStreamBatchMemOp_v2(CUstream stream, unsigned int count,
                                    CUstreamBatchMemOpParams* parameters, unsigned int flags) {
  return SubmitBatch(stream, count, parameters, flags);
}

SIMGPU_EXPORT cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                  unsigned int flags) {
  return SubmitWait(stream, address, value, flags, false);
}
SIMGPU_EXPORT cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                  unsigned int flags) {
  return SubmitWait(stream, address, value, flags, true);
}
SIMGPU_EXPORT cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                   unsigned int flags) {
  return SubmitWrite(stream, address, value, flags, false);
}
SIMGPU_EXPORT cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                   unsigned int flags) {
  return SubmitWrite(stream, address, value, flags, true);
}
SIMGPU_EXPORT cuStreamBatchMemOp(CUstream stream, unsigned int count,
                                 CUstreamBatchMemOpParams* parameters, unsigned int flags) {
  return SubmitBatch(stream, count, parameters, flags);
}
