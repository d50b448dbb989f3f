// Functions of the program in its streams (cuLaunchHostFunc, cuStreamAddCallback).
//
// The function runs in the client, which is told when the stream reaches it and says when it has
// returned. In between the stream stands at a gate, the same as a copy's (transfers.h):
//
//   cuEventRecord                         for what kernels have printed before the function
//   cuStreamWriteValue32(reached, n)      everything before the function is done
//   cuStreamWaitValue32(go >= n)          until it has returned
//
// So the driver keeps the order, and no thread here waits for the program.
//
// A context that has failed reaches nothing any more, but says so; its functions are then sent with
// the error. The client calls a callback with it and drops a plain host function, as CUDA does.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <list>
#include <memory>

#include "protocol/operations.h"
#include "server/worker/objects.h"

namespace penstock::server {

class CallContext;
class Worker;

class HostFunctions {
 public:
  explicit HostFunctions(Worker& worker) : worker_(worker) {}

  CUresult Enqueue(CallContext& call, const HostFunctionCommand& command);
  // The client says that it has returned.
  CUresult Done(CallContext& call, uint64_t id);

  // Tells the client of those that are reached. True if there were any.
  bool Step();
  // The context is going: the client hears this error of what has not had its turn.
  void DropContext(const ContextState& context, CUresult error);
  // Some have not been reached yet.
  bool waiting() const { return waiting_ > 0; }

 private:
  struct Entry {
    uint64_t id = 0;
    std::shared_ptr<ContextState> context;
    std::shared_ptr<StreamState> stream;
    bool gated = false;
    uint32_t gate = 0;  // value of both gate words
    CUevent event = nullptr;
    bool told = false;
    int64_t asked_ns = 0;
  };
  using Place = std::list<Entry>::iterator;

  CUresult PutGate(Entry& entry);
  bool Reached(const Entry& entry) const;
  // CUDA_SUCCESS while the context works.
  CUresult Health(const ContextState& context) const;
  void Tell(Entry& entry, CUresult status);
  void OpenGate(const Entry& entry);
  // Of all in the context that have not had their turn, in their order.
  void GiveUp(const ContextState& context, CUresult error);
  Place Erase(Place place);

  Worker& worker_;
  std::list<Entry> entries_;  // in the order of their calls, until they have returned
  size_t waiting_ = 0;        // not told
  uint64_t newest_ = 0;       // largest id seen
};

}  // namespace penstock::server
