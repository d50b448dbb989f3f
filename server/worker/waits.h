// Calls that wait: for streams, an event, a stream's progress, the reaper. Each is kept here with
// what it waits for and answered when a query says that it is over, so no call waits in the driver.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "server/worker/objects.h"
#include "server/worker/outbox.h"
#include "server/worker/reaper.h"

namespace penstock::server {

class CallContext;
class Worker;

struct Wait {
  ReplyToken token;  // of a posted call: nobody is answered unless it fails
  std::shared_ptr<ContextState> context;
  // Any of these; the wait is over when none is left.
  std::vector<CUevent> events;  // from the context's pool, recorded when the wait began
  CUevent user_event = nullptr;
  std::shared_ptr<StreamState> stream;  // until `cost` has finished
  uint64_t cost = 0;
  std::vector<std::shared_ptr<StreamState>> retiring;  // destroyed ones: until they have run dry
  std::vector<std::shared_ptr<ReapJob>> reaping;
  // Memory freed in stream order: until the streams get there.
  std::vector<std::pair<std::shared_ptr<StreamState>, std::shared_ptr<Quota::Charge>>> freeing;
  // Run at the end on success: makes the body of the reply, or fails; kDeferred answers later.
  std::function<CUresult(std::vector<std::byte>*)> finish;
  bool reveals_output = false;  // a synchronisation, at which the driver flushes kernel output
  int64_t since_ns = 0;
};

class Waits {
 public:
  explicit Waits(Worker& worker) : worker_(worker) {}

  // Begins a wait for everything in these streams up to now, and in these destroyed ones.
  // kDeferred, or an error at once.
  CUresult ForStreams(CallContext& call, const std::shared_ptr<ContextState>& context,
                      const std::vector<std::shared_ptr<StreamState>>& streams,
                      const std::vector<std::shared_ptr<StreamState>>& retiring = {});
  CUresult ForEvent(CallContext& call, const std::shared_ptr<ContextState>& context, CUevent event);
  CUresult ForProgress(CallContext& call, const std::shared_ptr<StreamState>& stream,
                       uint64_t cost);
  void Add(Wait wait);
  // The program destroys an event that somebody waits for.
  void DropEvent(CUevent event);
  // The context is gone: its waits end with this error.
  void DropContext(const ContextState& context, CUresult error);

  // Asks about each. True if one has ended.
  bool Step();
  bool empty() const { return waits_.empty(); }

 private:
  // CUDA_ERROR_NOT_READY while it goes on.
  CUresult Ask(Wait& wait);
  void End(Wait wait, CUresult result);

  Worker& worker_;
  std::vector<Wait> waits_;
};

}  // namespace penstock::server
