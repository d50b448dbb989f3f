// The program's functions in streams (cuLaunchHostFunc, cuStreamAddCallback), on this side.
//
// A function is kept here under a number while the server has the number in its stream. When the
// stream gets there the server sends the number back, a thread of ours runs the function, and a
// posted frame lets the stream go on (server/worker/host_functions.h has the other half). The
// server sends after the data of earlier copies, so the function sees what they have written.
//
// One thread runs the functions of all streams, as they come. CUDA promises no order between
// streams and allows to run them one after the other; a program that needs two of them to overlap
// is wrong there too. While something is under way the thread also receives if nobody else does.
//
// The thread is started by the first function and is never joined: a function may not return, and
// the program may exit from one. What the thread needs is therefore shared with it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>

namespace penstock::interposer {

class Session;
struct ContextRecord;

struct HostFunction {
  CUhostFn function = nullptr;          // one of the two
  CUstreamCallback callback = nullptr;  // is also called for an error
  CUstream stream = nullptr;            // as the program named it
  void* user = nullptr;
  const ContextRecord* context = nullptr;
};

class HostFunctions {
 public:
  explicit HostFunctions(Session& session);

  // Keeps it and returns its number; 0 if there is no thread to be had or the session has ended.
  uint64_t Add(const HostFunction& function);
  // It could not be sent.
  void Forget(uint64_t id);
  // From the receiver: its turn. False if no such number was ever given.
  bool Reached(uint64_t id, CUresult status);

  // Before a context is destroyed: its functions run first, as far as they do within seconds.
  void Drain(const ContextRecord& context);
  // The context is gone, and with it what has not run by now.
  void DropContext(const ContextRecord& context);
  // The session has broken: callbacks are told so.
  void Fail(CUresult error);
  // The session ends. Nothing runs any more but a function that already does.
  void Stop();

 private:
  struct Shared;
  static void Run(const std::shared_ptr<Shared>& shared);

  const std::shared_ptr<Shared> shared_;
};

}  // namespace penstock::interposer
