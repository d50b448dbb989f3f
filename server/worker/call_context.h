// One received call on the worker's dispatch thread: what every handler, generated or hand-written,
// works with.
//
// A handler decodes its command, resolves handles to the driver's objects (each step records CUDA's
// error on failure), calls the driver and returns its CUresult. The current context has been set
// before. What it writes to reply() goes to the client if somebody waits; the result of a posted
// call that failed is kept for the issuing thread's next call marked `delivers`.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "protocol/frame.h"
#include "protocol/handle.h"
#include "protocol/reader.h"
#include "protocol/writer.h"
#include "server/worker/outbox.h"

namespace penstock::server {

struct Driver;  // driver.gen.h: one pointer per driver symbol
class Worker;
struct ContextState;
struct StreamState;
struct FunctionRecord;

class CallContext {
 public:
  virtual ~CallContext() = default;

  const FrameHeader& header() const { return header_; }
  Worker& worker() const { return *worker_; }
  const Driver& driver() const { return *driver_; }
  Writer& reply() { return reply_; }
  const ReplyToken& token() const { return token_; }  // for an answer that comes later
  // The stream that the last Stream() found; null if none.
  const std::shared_ptr<StreamState>& stream_state() const { return stream_state_; }
  // The reply's body goes out although the call fails (the log of a JIT).
  void KeepBody() { keeps_body_ = true; }
  bool keeps_body() const { return keeps_body_; }
  bool is_malformed() const { return malformed_; }

  // The error recorded by the last failed check.
  CUresult error() const { return error_; }
  bool Refuse(CUresult error) {
    error_ = error;
    return false;
  }
  // Ends the session after this call, with one log line: what no honest client sends.
  CUresult Malformed(const char* what);

  // Checks. Each resolves a wire handle; a destroyed one gives what CUDA documents, a tombstone the
  // error of its creation, one that was never minted ends the session. 0 resolves to the null
  // object where CUDA allows it.
  bool Device(int32_t wire, CUdevice* device);
  bool Context(uint64_t wire, CUcontext* context);
  bool ContextState(uint64_t wire, std::shared_ptr<server::ContextState>* context);
  bool Stream(uint64_t wire, CUstream* stream);
  bool Event(uint64_t wire, CUevent* event);
  bool Module(uint64_t wire, CUmodule* module);
  bool FunctionOrKernel(uint64_t wire, CUfunction* function);
  // The same with its record, null on failure.
  FunctionRecord* FindFunction(uint64_t wire, CUfunction* function);
  bool Library(uint64_t wire, CUlibrary* library);
  bool Kernel(uint64_t wire, CUkernel* kernel);
  bool MemoryPool(uint64_t wire, CUmemoryPool* pool);
  bool DeviceRange(CUdeviceptr address, uint64_t bytes);
  bool DeviceRange2D(CUdeviceptr address, uint64_t pitch, uint64_t width, uint64_t height);
  // `depth` such rectangles, each `rows` rows after the one before.
  bool DeviceRange3D(CUdeviceptr address, uint64_t pitch, uint64_t rows, uint64_t width,
                     uint64_t height, uint64_t depth);

  // After a create call: enters the object under the client's handle, or a tombstone if `result` is
  // an error. Returns result, or ends the session if the handle cannot have been minted.
  CUresult AdoptStream(uint64_t wire, CUresult result, CUstream stream);
  CUresult AdoptEvent(uint64_t wire, CUresult result, CUevent event);
  // Before a destroy call: takes the object out of the table. False as for the checks above.
  bool TakeStream(uint64_t wire, CUstream* stream);
  bool TakeEvent(uint64_t wire, CUevent* event);

 protected:
  FrameHeader header_{};
  Worker* worker_ = nullptr;
  const Driver* driver_ = nullptr;
  Writer reply_{{}};
  ReplyToken token_;
  std::shared_ptr<StreamState> stream_state_;
  CUresult error_ = CUDA_SUCCESS;
  bool malformed_ = false, keeps_body_ = false;
};

using HandlerFunction = CUresult (*)(CallContext& call, Reader& reader);

// What a handler may return besides a CUresult: the reply comes later (a wait, an executor job). No
// driver's error, but a number that the enum can hold: any other would be undefined behaviour.
inline constexpr CUresult kDeferred = static_cast<CUresult>(1023);

enum HandlerFlags : uint32_t {
  kDelivers = 1,   // reports this thread's earlier posted failure instead of running
  kNoContext = 2,  // belongs to none, so the current one stays
};
struct HandlerEntry {
  uint32_t function;  // id of the spec
  const char* name;
  HandlerFunction handler;
  uint32_t flags;
};

}  // namespace penstock::server
