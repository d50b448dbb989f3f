// What makes a shared object of it: the end of the process.
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

// Runs after the program's exit handlers, among them those of NVIDIA's runtime that unload its
// code, and before the C library ends.
__attribute__((destructor)) void OnUnload() {
  Client::Finish();
}

}  // namespace
}  // namespace penstock::interposer
