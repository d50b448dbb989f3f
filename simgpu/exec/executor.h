// The seam between the two halves of simgpu: the driver face (contexts, streams, memory, modules as
// CUDA names them) sits on this interface; the PTX parser and warp interpreter stand behind it.
//
// A Program is one PTX module, parsed and with its variables placed in device memory. Kernels of it
// are run with Launch, which executes every thread block on the calling thread and returns when the
// grid is done or has faulted. The caller decides on which thread (a stream's) that happens;
// several launches may run at the same time on different threads.
//
// Device addresses are host addresses: a generic pointer in a kernel is the pointer the driver
// gave. Every access to global memory is checked against the live ranges of a MemoryMap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace simgpu {

class DeviceHeap;

// What lives where. Implemented by the driver face; called by the executor from many threads.
class MemoryMap {
 public:
  struct Range {
    uint64_t begin = 0;
    uint64_t end = 0;  // one past the last byte
    bool read_only = false;
  };
  virtual ~MemoryMap() = default;
  // The live range that contains the address; false if there is none.
  virtual bool Find(uint64_t address, Range* range) const = 0;
  // Changes whenever a range appears or goes, so that found ranges may be cached between changes.
  virtual uint64_t generation() const = 0;
  // Memory for module variables: zeroed, aligned, live until the Program is destroyed; 0 if full.
  virtual uint64_t AllocateVariable(uint64_t bytes, uint64_t alignment, bool read_only) = 0;
  virtual void FreeVariable(uint64_t address) = 0;
  // What malloc in a kernel takes from (heap.h); without one it returns null.
  virtual DeviceHeap* heap() { return nullptr; }
};

struct Parameter {
  uint32_t offset = 0;  // in the packed parameter block, natural alignment
  uint32_t size = 0;
};

// What the driver reports of a kernel (cuFuncGetAttribute, cuFuncGetParamInfo) and checks a launch
// by.
struct KernelInfo {
  std::string name;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t static_shared_bytes = 0;
  uint32_t constant_bytes = 0;
  uint32_t local_bytes = 0;                  // per thread
  uint32_t registers = 0;                    // per thread, an estimate from the PTX
  uint32_t max_threads = 1024;               // .maxntid / .reqntid product, else 1024
  uint32_t required_threads[3] = {0, 0, 0};  // .reqntid, zeros if absent
  int ptx_version = 0;                       // 90 for ISA 9.0
  int target = 0;                            // 75 for sm_75
};

struct Variable {
  std::string name;
  uint64_t address = 0;
  uint64_t bytes = 0;
  bool constant = false;
  bool managed = false;
};

enum class Fault {
  kNone,
  kIllegalAddress,      // CUDA_ERROR_ILLEGAL_ADDRESS
  kMisalignedAddress,   // CUDA_ERROR_MISALIGNED_ADDRESS
  kIllegalInstruction,  // CUDA_ERROR_ILLEGAL_INSTRUCTION
  kAssert,              // CUDA_ERROR_ASSERT
  kTrap,                // CUDA_ERROR_LAUNCH_FAILED
  kDeadlock,            // no thread of a block can go on: CUDA_ERROR_LAUNCH_FAILED
  kStopped,             // LaunchRequest::stop was set
  kOutOfMemory,         // the host has no memory for a block: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
};

struct LaunchResult {
  Fault fault = Fault::kNone;
  std::string message;  // names kernel, block, thread and PTX line; empty if no fault
};

struct LaunchRequest {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t dynamic_shared_bytes = 0;
  const std::byte* parameters = nullptr;  // KernelInfo::parameter_bytes, packed
  bool cooperative = false;
  const std::atomic<bool>* stop = nullptr;  // polled at back edges; may be null
  // Kernel printf: called with finished text, possibly from inside Launch; may be null.
  void (*print)(void* user, std::string_view text) = nullptr;
  // What the device says on stderr: the message of an assertion, one call per thread; may be null.
  void (*print_error)(void* user, std::string_view text) = nullptr;
  void* print_user = nullptr;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual const KernelInfo& info() const = 0;
  // Decodes lazily on first use; a refused instruction gives kIllegalInstruction with its text.
  virtual LaunchResult Launch(const LaunchRequest& request) = 0;
};

struct LoadError {
  enum class Kind { kInvalidPtx, kUnsupported, kOutOfMemory, kUnresolvedSymbol } kind;
  std::string message;  // with line number and text, for the JIT error log
};

class Program {
 public:
  // Parses the text (with or without a trailing NUL). Null and *error on failure. The map must
  // outlive the Program. Kernels and variables are sorted by order of appearance.
  static std::unique_ptr<Program> Load(std::string_view ptx, MemoryMap& memory, LoadError* error);
  virtual ~Program() = default;
  virtual const std::vector<Kernel*>& kernels() const = 0;
  virtual const std::vector<Variable>& variables() const = 0;
  Kernel* FindKernel(std::string_view name) const;
  const Variable* FindVariable(std::string_view name) const;
};

}  // namespace simgpu
