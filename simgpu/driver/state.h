// Everything the library knows, in one leaked object that cuInit makes. It is never destroyed: the
// CUDA runtime's exit handler calls in after static destructors have run.
#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <vector>

#include "simgpu/driver/address_space.h"
#include "simgpu/driver/device.h"
#include "simgpu/driver/handle_table.h"

namespace simgpu {

class Context;
class Stream;
class Event;
class Module;
class Function;
class Library;
struct LibraryKernel;
struct MemoryPool;
struct LinkState;

struct State {
  std::unique_ptr<MemoryLedger> ledger;  // SIMGPU_SHARED, else null
  std::vector<std::unique_ptr<Device>> devices;
  AddressSpace memory;
  HandleTable<Context, CUcontext, HandleKind::kContext> contexts;
  HandleTable<Stream, CUstream, HandleKind::kStream> streams;
  HandleTable<Event, CUevent, HandleKind::kEvent> events;
  HandleTable<Module, CUmodule, HandleKind::kModule> modules;
  HandleTable<Function, CUfunction, HandleKind::kFunction> functions;
  HandleTable<Library, CUlibrary, HandleKind::kLibrary> libraries;
  HandleTable<LibraryKernel, CUkernel, HandleKind::kKernel> kernels;
  HandleTable<MemoryPool, CUmemoryPool, HandleKind::kPool> pools;
  HandleTable<LinkState, CUlinkState, HandleKind::kLink> links;
  bool launch_blocking = false;  // CUDA_LAUNCH_BLOCKING
  bool eager_loading = false;    // CUDA_MODULE_LOADING=EAGER
};

// Null before cuInit, and in a child that was forked after it, as with the real driver.
State* state();
CUresult InitialiseState();

}  // namespace simgpu
