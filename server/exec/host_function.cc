// Functions of the program in a stream: see worker/host_functions.h.
#include "protocol/operations.h"
#include "server/worker/operations.h"
#include "server/worker/worker.h"

namespace penstock::server {

CUresult ServeHostFunction(CallContext& call, Reader& reader) {
  HostFunctionCommand command;
  if (!reader.Take(&command) || !reader.AtEnd()) {
    return call.Malformed("A host function has an impossible size.");
  }
  return call.worker().host_functions().Enqueue(call, command);
}

CUresult ServeHostFunctionDone(CallContext& call, Reader& reader) {
  HostFunctionDoneCommand command;
  if (!reader.Take(&command) || !reader.AtEnd()) {
    return call.Malformed("The end of a host function has an impossible size.");
  }
  return call.worker().host_functions().Done(call, command.id);
}

}  // namespace penstock::server
