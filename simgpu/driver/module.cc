#include "simgpu/driver/module.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "simgpu/driver/entry.h"
#include "simgpu/driver/fatbin.h"
#include "simgpu/driver/library.h"
#include "simgpu/driver/log.h"

namespace simgpu {
namespace {

constexpr double kNewestPtx = 9.0;

CUresult ResultOf(LoadError::Kind kind) {
  switch (kind) {
    case LoadError::Kind::kInvalidPtx:
      return CUDA_ERROR_INVALID_PTX;
    case LoadError::Kind::kUnsupported:
      return CUDA_ERROR_NOT_SUPPORTED;
    case LoadError::Kind::kOutOfMemory:
      return CUDA_ERROR_OUT_OF_MEMORY;
    case LoadError::Kind::kUnresolvedSymbol:
      return CUDA_ERROR_INVALID_PTX;
  }
  return CUDA_ERROR_UNKNOWN;
}

}  // namespace

int Function::dynamic_shared_limit() const {
  const int set = max_dynamic_shared.load();
  return set >= 0 ? set
                  : std::max(0, kSharedPerBlock - static_cast<int>(info_.static_shared_bytes));
}

CUresult LoadModule(const std::shared_ptr<Context>& context, const std::string& ptx,
                    std::shared_ptr<Module>* module, std::string* log) {
  if (const size_t at = ptx.find(".version"); at != std::string::npos) {
    if (atof(ptx.c_str() + at + 8) > kNewestPtx) {
      *log = "The PTX is of a newer version than 9.0.";
      return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    }
  }
  LoadError error{};
  std::unique_ptr<Program> program = Program::Load(ptx, *context, &error);
  if (program == nullptr) {
    *log = error.message;
    return ResultOf(error.kind);
  }
  for (const Variable& variable : program->variables()) {
    if (!variable.managed) continue;
    const auto allocation = state()->memory.Find(variable.address);
    if (allocation != nullptr) allocation->kind = MemoryKind::kManagedVariable;
  }
  *module = std::make_shared<Module>(context, std::move(program));
  (*module)->handle_ = state()->modules.Insert(*module);
  context->AddModule((*module)->handle_);
  return CUDA_SUCCESS;
}

CUresult UnloadModule(CUmodule handle) {
  const std::shared_ptr<Module> module = state()->modules.Remove(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  module->context()->RemoveModule(handle);
  std::lock_guard lock(module->functions_mutex_);
  for (const auto& [name, function] : module->functions_) state()->functions.Remove(function);
  module->functions_.clear();
  return CUDA_SUCCESS;
}

CUresult FunctionOf(const std::shared_ptr<Module>& module, const std::string& name,
                    CUfunction* handle) {
  std::lock_guard lock(module->functions_mutex_);
  const auto found = module->functions_.find(name);
  if (found != module->functions_.end()) {
    *handle = found->second;
    return CUDA_SUCCESS;
  }
  Kernel* const kernel = module->program_->FindKernel(name);
  if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
  auto function = std::make_shared<Function>(module, kernel);
  *handle = state()->functions.Insert(function);
  function->set_handle(*handle);
  module->functions_[name] = *handle;
  return CUDA_SUCCESS;
}

CUresult FindFunction(CUfunction handle, const std::shared_ptr<Context>& context,
                      std::shared_ptr<Function>* function) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  *function = state()->functions.Find(handle);
  if (*function != nullptr) return CUDA_SUCCESS;
  if (!HandleTable<LibraryKernel, CUkernel, HandleKind::kKernel>::IsKind(handle)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const auto kernel = state()->kernels.Find(reinterpret_cast<CUkernel>(handle));
  if (kernel == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  CUfunction real = nullptr;
  SIMGPU_RETURN_IF_ERROR(FunctionOfKernel(*kernel, context, &real));
  *function = state()->functions.Find(real);
  return *function == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult GetFunctionAttribute(const Function& function, CUfunction_attribute attribute,
                              int* value) {
  const KernelInfo& info = function.info();
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = static_cast<int>(info.max_threads);
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = static_cast<int>(info.static_shared_bytes);
      break;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
      *value = static_cast<int>(info.constant_bytes);
      break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = static_cast<int>(info.local_bytes);
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = static_cast<int>(info.registers);
      break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      *value = info.target;
      break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: {
      const Device& device = *function.module()->context()->device();
      *value = device.cc_major * 10 + device.cc_minor;
      break;
    }
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
      *value = 0;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = function.dynamic_shared_limit();
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *value = function.shared_carveout;
      break;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      *value = 0;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult SetFunctionAttribute(Function& function, CUfunction_attribute attribute, int value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: {
      const int most = function.module()->context()->device()->limits.shared_per_block_max -
                       static_cast<int>(function.info().static_shared_bytes);
      if (value < 0 || value > most) return CUDA_ERROR_INVALID_VALUE;
      function.max_dynamic_shared = value;
      return CUDA_SUCCESS;
    }
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
      function.shared_carveout = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

bool JitLogs::Read(unsigned count, CUjit_option* options, void** values) {
  for (unsigned i = 0; i < count; ++i) {
    if (options[i] < 0 || options[i] >= CU_JIT_NUM_OPTIONS) return false;
    switch (options[i]) {
      case CU_JIT_ERROR_LOG_BUFFER:
        error_buffer_ = static_cast<char*>(values[i]);
        break;
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        error_bytes_ = &values[i];
        break;
      case CU_JIT_INFO_LOG_BUFFER:
        info_buffer_ = static_cast<char*>(values[i]);
        break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        info_bytes_ = &values[i];
        break;
      default:
        break;  // the rest steers a compiler that is not here
    }
  }
  return true;
}

void JitLogs::Write(const std::string& errors) {
  // The size option is an input and becomes the number of bytes written.
  if (error_bytes_ != nullptr) {
    const auto room = static_cast<unsigned>(reinterpret_cast<uintptr_t>(*error_bytes_));
    size_t length = 0;
    if (error_buffer_ != nullptr && room > 0) {
      length = std::min<size_t>(errors.size(), room - 1);
      std::memcpy(error_buffer_, errors.data(), length);
      error_buffer_[length] = '\0';
    }
    *error_bytes_ = reinterpret_cast<void*>(static_cast<uintptr_t>(length));
  }
  if (info_bytes_ != nullptr) {
    const auto room = static_cast<unsigned>(reinterpret_cast<uintptr_t>(*info_bytes_));
    if (info_buffer_ != nullptr && room > 0) info_buffer_[0] = '\0';
    *info_bytes_ = nullptr;
  }
}

}  // namespace simgpu

using namespace simgpu;

namespace {

CUresult LoadImage(CUmodule* handle, const void* image, unsigned count, CUjit_option* options,
                   void** values) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (count > 0 && (options == nullptr || values == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  JitLogs logs;
  if (!logs.Read(count, options, values)) return CUDA_ERROR_INVALID_VALUE;
  const Device& device = *context->device();
  std::string ptx;
  std::string log;
  CUresult result = PtxOfImage(image, device.cc_major * 10 + device.cc_minor, &ptx, &log);
  std::shared_ptr<Module> module;
  if (result == CUDA_SUCCESS) result = LoadModule(context, ptx, &module, &log);
  logs.Write(log);
  if (result != CUDA_SUCCESS) {
    LogWarning("A module is not loaded (error %d): %s", result, log.c_str());
    return result;
  }
  *handle = module->handle();
  return CUDA_SUCCESS;
}

CUresult FindModule(CUmodule handle, std::shared_ptr<Module>* module) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  *module = state()->modules.Find(handle);
  return *module == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult EnterFunction(CUfunction handle, std::shared_ptr<Function>* function) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  return FindFunction(handle, context, function);
}

}  // namespace

SIMGPU_EXPORT cuModuleLoadData(CUmodule* module, const void* image) {
  return LoadImage(module, image, 0, nullptr, nullptr);
}

SIMGPU_EXPORT cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count,
                                 CUjit_option* options, void** values) {
  return LoadImage(module, image, count, options, values);
}

SIMGPU_EXPORT cuModuleLoadFatBinary(CUmodule* module, const void* image) {
  return LoadImage(module, image, 0, nullptr, nullptr);
}

SIMGPU_EXPORT cuModuleLoad(CUmodule* module, const char* path) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (module == nullptr || path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string image;
  if (!ReadFile(path, &image)) return CUDA_ERROR_FILE_NOT_FOUND;
  image.append(64, '\0');  // PTX text needs its NUL; headers are read whole
  return LoadImage(module, image.data(), 0, nullptr, nullptr);
}

SIMGPU_EXPORT cuModuleUnload(CUmodule handle) {
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(FindModule(handle, &module));
  if (OnWorkerThread()) return CUDA_ERROR_NOT_PERMITTED;
  module->context()->Synchronise();
  return UnloadModule(handle);
}

SIMGPU_EXPORT cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  SIMGPU_RETURN_IF_ERROR(FindModule(handle, &module));
  return FunctionOf(module, name, function);
}

SIMGPU_EXPORT cuModuleGetFunctionCount(unsigned int* count, CUmodule handle) {
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(FindModule(handle, &module));
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<unsigned>(module->program().kernels().size());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuModuleEnumerateFunctions(CUfunction* functions, unsigned int count,
                                         CUmodule handle) {
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(FindModule(handle, &module));
  if (functions == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto& kernels = module->program().kernels();
  for (size_t i = 0; i < std::min<size_t>(count, kernels.size()); ++i) {
    SIMGPU_RETURN_IF_ERROR(FunctionOf(module, kernels[i]->info().name, &functions[i]));
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule handle,
                                   const char* name) {
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(FindModule(handle, &module));
  if (name == nullptr || (address == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  const Variable* const variable = module->program().FindVariable(name);
  if (variable == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (address != nullptr) *address = variable->address;
  if (bytes != nullptr) *bytes = variable->bytes;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *mode = state()->eager_loading ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterFunction(handle, &function));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return GetFunctionAttribute(*function, attribute, value);
}

SIMGPU_EXPORT cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterFunction(handle, &function));
  return SetFunctionAttribute(*function, attribute, value);
}

SIMGPU_EXPORT cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterFunction(handle, &function));
  if (config < CU_FUNC_CACHE_PREFER_NONE || config > CU_FUNC_CACHE_PREFER_EQUAL) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  function->cache_config = config;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig) {
  std::shared_ptr<Function> function;
  return EnterFunction(handle, &function);
}

SIMGPU_EXPORT cuFuncGetModule(CUmodule* module, CUfunction handle) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterFunction(handle, &function));
  if (module == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *module = function->module()->handle();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuFuncGetName(const char** name, CUfunction handle) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterFunction(handle, &function));
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *name = function->info().name.c_str();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterFunction(handle, &function));
  const auto& parameters = function->info().parameters;
  if (offset == nullptr || index >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = parameters[index].offset;
  if (bytes != nullptr) *bytes = parameters[index].size;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuFuncIsLoaded(CUfunctionLoadingState* loaded, CUfunction handle) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(EnterFunction(handle, &function));
  if (loaded == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *loaded = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuFuncLoad(CUfunction handle) {
  std::shared_ptr<Function> function;
  return EnterFunction(handle, &function);
}
