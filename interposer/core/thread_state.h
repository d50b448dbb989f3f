// What CUDA keeps per application thread: the stack of current contexts, and the streams that
// CU_STREAM_PER_THREAD names. It lives in the client; the server learns the current context with
// each call.
//
// The state hangs on a pthread key, whose destructor runs when the thread ends (never after the
// library is gone: it is linked with -z nodelete); a thread_local pointer makes it cheap to find.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol/handle.h"

namespace penstock::interposer {

struct ThreadState {
  uint32_t index = 0;            // travels with each call; errors of posted calls come back to it
  std::vector<Handle> contexts;  // the last one is current
  struct PerThreadStream {
    Handle context, stream;
  };
  std::vector<PerThreadStream> streams;
  std::vector<std::byte> scratch;  // for parameter blocks too large for the stack
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  bool in_host_function = false;  // where CUDA may not be called
  uint64_t process = 0;           // fork: state of the parent's life is not the child's

  Handle current() const { return contexts.empty() ? Handle{} : contexts.back(); }
};

// The calling thread's, made on first use.
ThreadState& ThisThread();
// In the child of a fork, and when a client is taken down in a test: states made before count as
// empty from now on.
void ForgetThreadStates();
// Called as a thread ends, with its state, while the key's destructors run. Set once.
void SetThreadExitHook(void (*hook)(ThreadState&));

}  // namespace penstock::interposer
