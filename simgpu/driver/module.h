// A module: one PTX program, loaded into one context.
#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "simgpu/driver/context.h"
#include "simgpu/exec/executor.h"

namespace simgpu {

class Function;

class Module {
 public:
  Module(const std::shared_ptr<Context>& context, std::unique_ptr<Program> program)
      : context_(context), program_(std::move(program)) {}

  const std::shared_ptr<Context>& context() const { return context_; }
  Program& program() { return *program_; }
  CUmodule handle() const { return handle_; }

 private:
  friend CUresult LoadModule(const std::shared_ptr<Context>&, const std::string&,
                             std::shared_ptr<Module>*, std::string*);
  friend CUresult FunctionOf(const std::shared_ptr<Module>&, const std::string&, CUfunction*);
  friend CUresult UnloadModule(CUmodule);

  const std::shared_ptr<Context> context_;  // outlives the program, whose memory it owns
  const std::unique_ptr<Program> program_;
  CUmodule handle_ = nullptr;
  std::mutex functions_mutex_;
  std::unordered_map<std::string, CUfunction> functions_;  // guarded by functions_mutex_
};

// A kernel of a module, with what cuFuncSetAttribute changed.
class Function {
 public:
  Function(const std::shared_ptr<Module>& module, Kernel* kernel)
      : module_(module), kernel_(kernel), info_(kernel->info()) {}

  // Keeps the module alive while a launch is queued.
  const std::shared_ptr<Module>& module() const { return module_; }
  Kernel& kernel() const { return *kernel_; }
  const KernelInfo& info() const { return info_; }
  CUfunction handle() const { return handle_; }
  void set_handle(CUfunction handle) { handle_ = handle; }

  std::atomic<int> max_dynamic_shared{-1};  // -1: what fits into 48 KiB beside static shared memory
  std::atomic<int> shared_carveout{-1};
  std::atomic<int> cache_config{CU_FUNC_CACHE_PREFER_NONE};
  int dynamic_shared_limit() const;

 private:
  const std::shared_ptr<Module> module_;
  Kernel* const kernel_;
  const KernelInfo info_;
  CUfunction handle_ = nullptr;
};

// *log receives the reason of a failure, for the JIT error log.
CUresult LoadModule(const std::shared_ptr<Context>& context, const std::string& ptx,
                    std::shared_ptr<Module>* module, std::string* log);
CUresult UnloadModule(CUmodule handle);
// The handle of a kernel: the same at each call. CUDA_ERROR_NOT_FOUND.
CUresult FunctionOf(const std::shared_ptr<Module>& module, const std::string& name,
                    CUfunction* handle);
// What a CUfunction stands for; a CUkernel in its place means that kernel in `context`.
CUresult FindFunction(CUfunction handle, const std::shared_ptr<Context>& context,
                      std::shared_ptr<Function>* function);
// One attribute, as cuFuncGetAttribute and cuKernelGetAttribute report it.
CUresult GetFunctionAttribute(const Function& function, CUfunction_attribute attribute, int* value);
CUresult SetFunctionAttribute(Function& function, CUfunction_attribute attribute, int value);

// The log buffers among the options of a JIT compilation.
class JitLogs {
 public:
  // False if an option is unknown.
  bool Read(unsigned count, CUjit_option* options, void** values);
  void Write(const std::string& errors);

 private:
  char* error_buffer_ = nullptr;
  void** error_bytes_ = nullptr;
  void** info_bytes_ = nullptr;
  char* info_buffer_ = nullptr;
};

}  // namespace simgpu
