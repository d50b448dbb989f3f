#include "simgpu/driver/library.h"

#include "simgpu/driver/entry.h"
#include "simgpu/driver/fatbin.h"
#include "simgpu/driver/log.h"
#include "simgpu/driver/module.h"
#include "simgpu/driver/ptx_link.h"

namespace simgpu {

CUresult Library::ModuleIn(const std::shared_ptr<Context>& context,
                           std::shared_ptr<Module>* module) {
  std::lock_guard lock(modules_mutex_);
  std::weak_ptr<Module>& entry = modules_[context->id()];
  *module = entry.lock();
  if (*module != nullptr) return CUDA_SUCCESS;
  std::string log;
  const CUresult result = LoadModule(context, ptx_, module, &log);
  if (result != CUDA_SUCCESS) {
    LogWarning("A library is not loaded (error %d): %s", result, log.c_str());
    return result;
  }
  entry = *module;
  return CUDA_SUCCESS;
}

void Library::Unload() {
  std::lock_guard lock(modules_mutex_);
  for (const auto& [id, weak] : modules_) {
    const std::shared_ptr<Module> module = weak.lock();
    if (module == nullptr) continue;
    module->context()->Synchronise();
    UnloadModule(module->handle());
  }
  modules_.clear();
}

CUresult FunctionOfKernel(LibraryKernel& kernel, const std::shared_ptr<Context>& context,
                          CUfunction* function) {
  const auto library = kernel.library.lock();
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(library->ModuleIn(context, &module));
  SIMGPU_RETURN_IF_ERROR(FunctionOf(module, kernel.name, function));
  std::lock_guard lock(kernel.attributes_mutex);
  if (kernel.attributes.empty()) return CUDA_SUCCESS;
  const auto loaded = state()->functions.Find(*function);
  for (const auto& [key, value] : kernel.attributes) {
    if (loaded != nullptr && key.first == context->device()->ordinal) {
      SetFunctionAttribute(*loaded, key.second, value);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace simgpu

using namespace simgpu;

namespace {

CUresult Load(CUlibrary* handle, const void* image, unsigned count, CUjit_option* options,
              void** values) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (count > 0 && (options == nullptr || values == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  JitLogs logs;
  if (!logs.Read(count, options, values)) return CUDA_ERROR_INVALID_VALUE;
  // Devices differ in number only, so one choice of PTX serves all contexts.
  const Device& device = *state()->devices[0];
  std::string ptx;
  std::string log;
  const CUresult result = PtxOfImage(image, device.cc_major * 10 + device.cc_minor, &ptx, &log);
  logs.Write(log);
  if (result != CUDA_SUCCESS) {
    LogWarning("A library is not loaded (error %d): %s", result, log.c_str());
    return result;
  }
  auto library = std::make_shared<Library>(std::move(ptx));
  library->kernel_names = KernelNames(library->ptx());
  const CUlibrary created = state()->libraries.Insert(library);
  library->handle = created;
  for (const std::string& name : library->kernel_names) {
    auto kernel = std::make_shared<LibraryKernel>();
    kernel->library = library;
    kernel->library_handle = created;
    kernel->name = name;
    library->kernels[name] = state()->kernels.Insert(kernel);
  }
  // Eager loading: errors of the PTX show now, if there is a context to load it into.
  std::shared_ptr<Context> context;
  if (state()->eager_loading && EnterContext(&context) == CUDA_SUCCESS) {
    std::shared_ptr<Module> module;
    SIMGPU_RETURN_IF_ERROR(library->ModuleIn(context, &module));
  }
  *handle = created;
  return CUDA_SUCCESS;
}

CUresult FindLibrary(CUlibrary handle, std::shared_ptr<Library>* library) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  *library = state()->libraries.Find(handle);
  return *library == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult FindKernel(CUkernel handle, std::shared_ptr<LibraryKernel>* kernel) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  *kernel = state()->kernels.Find(handle);
  return *kernel == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

// The context in which a call about a device is answered: the current one if it is on that device,
// else the primary context.
CUresult ContextOn(CUdevice number, std::shared_ptr<Context>* context) {
  Device* device = nullptr;
  SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
  if (EnterFailedContext(context) == CUDA_SUCCESS && (*context)->device() == device) {
    return CUDA_SUCCESS;
  }
  std::lock_guard lock(device->primary_mutex);
  *context = device->primary_context;
  return *context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult FunctionOn(CUkernel handle, CUdevice number, std::shared_ptr<Function>* function) {
  std::shared_ptr<LibraryKernel> kernel;
  SIMGPU_RETURN_IF_ERROR(FindKernel(handle, &kernel));
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ContextOn(number, &context));
  return FindFunction(reinterpret_cast<CUfunction>(handle), context, function);
}

CUresult FindVariable(CUlibrary handle, const char* name, bool managed, CUdeviceptr* address,
                      size_t* bytes) {
  std::shared_ptr<Library> library;
  SIMGPU_RETURN_IF_ERROR(FindLibrary(handle, &library));
  if (name == nullptr || (address == nullptr && bytes == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Context> context;
  if (EnterContext(&context) != CUDA_SUCCESS) {
    // The runtime asks for managed variables before it has a context: they live in the first
    // device's primary one, which a runtime program uses.
    if (!managed || OnWorkerThread()) return EnterContext(&context);
    Device* const device = state()->devices[0].get();
    std::lock_guard lock(device->primary_mutex);
    context = ActivatePrimary(device);
  }
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(library->ModuleIn(context, &module));
  const Variable* const variable = module->program().FindVariable(name);
  if (variable == nullptr || (managed && !variable->managed)) return CUDA_ERROR_NOT_FOUND;
  if (address != nullptr) *address = variable->address;
  if (bytes != nullptr) *bytes = variable->bytes;
  return CUDA_SUCCESS;
}

}  // namespace

SIMGPU_EXPORT cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jit_options,
                                void** jit_values, unsigned int jit_count, CUlibraryOption* options,
                                void** values, unsigned int count) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (count > 0 && (options == nullptr || values == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    if (options[i] < 0 || options[i] >= CU_LIBRARY_NUM_OPTIONS) return CUDA_ERROR_INVALID_VALUE;
  }
  return Load(library, code, jit_count, jit_options, jit_values);
}

SIMGPU_EXPORT cuLibraryLoadFromFile(CUlibrary* library, const char* path, CUjit_option* jit_options,
                                    void** jit_values, unsigned int jit_count, CUlibraryOption*,
                                    void**, unsigned int) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string image;
  if (!ReadFile(path, &image)) return CUDA_ERROR_FILE_NOT_FOUND;
  image.append(64, '\0');
  return Load(library, image.data(), jit_count, jit_options, jit_values);
}

SIMGPU_EXPORT cuLibraryUnload(CUlibrary handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  const std::shared_ptr<Library> library = state()->libraries.Remove(handle);
  if (library == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  for (const auto& [name, kernel] : library->kernels) state()->kernels.Remove(kernel);
  library->Unload();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuLibraryGetKernel(CUkernel* kernel, CUlibrary handle, const char* name) {
  std::shared_ptr<Library> library;
  SIMGPU_RETURN_IF_ERROR(FindLibrary(handle, &library));
  if (kernel == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = library->kernels.find(name);
  if (found == library->kernels.end()) return CUDA_ERROR_NOT_FOUND;
  *kernel = found->second;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuLibraryGetKernelCount(unsigned int* count, CUlibrary handle) {
  std::shared_ptr<Library> library;
  SIMGPU_RETURN_IF_ERROR(FindLibrary(handle, &library));
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = static_cast<unsigned>(library->kernel_names.size());
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int count, CUlibrary handle) {
  std::shared_ptr<Library> library;
  SIMGPU_RETURN_IF_ERROR(FindLibrary(handle, &library));
  if (kernels == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count && i < library->kernel_names.size(); ++i) {
    kernels[i] = library->kernels[library->kernel_names[i]];
  }
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuLibraryGetModule(CUmodule* handle, CUlibrary library_handle) {
  std::shared_ptr<Library> library;
  SIMGPU_RETURN_IF_ERROR(FindLibrary(library_handle, &library));
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  std::shared_ptr<Module> module;
  SIMGPU_RETURN_IF_ERROR(library->ModuleIn(context, &module));
  *handle = module->handle();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary library,
                                 const char* name) {
  return FindVariable(library, name, /*managed=*/false, address, bytes);
}

SIMGPU_EXPORT cuLibraryGetManaged(CUdeviceptr* address, size_t* bytes, CUlibrary library,
                                  const char* name) {
  return FindVariable(library, name, /*managed=*/true, address, bytes);
}

SIMGPU_EXPORT cuKernelGetFunction(CUfunction* function, CUkernel handle) {
  std::shared_ptr<LibraryKernel> kernel;
  SIMGPU_RETURN_IF_ERROR(FindKernel(handle, &kernel));
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  return FunctionOfKernel(*kernel, context, function);
}

SIMGPU_EXPORT cuKernelGetLibrary(CUlibrary* library, CUkernel handle) {
  std::shared_ptr<LibraryKernel> kernel;
  SIMGPU_RETURN_IF_ERROR(FindKernel(handle, &kernel));
  if (library == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *library = kernel->library_handle;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuKernelGetName(const char** name, CUkernel handle) {
  std::shared_ptr<LibraryKernel> kernel;
  SIMGPU_RETURN_IF_ERROR(FindKernel(handle, &kernel));
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *name = kernel->name.c_str();
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* bytes) {
  std::shared_ptr<LibraryKernel> kernel;
  SIMGPU_RETURN_IF_ERROR(FindKernel(handle, &kernel));
  return cuFuncGetParamInfo(reinterpret_cast<CUfunction>(handle), index, offset, bytes);
}

SIMGPU_EXPORT cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel handle,
                                   CUdevice device) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(FunctionOn(handle, device, &function));
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return GetFunctionAttribute(*function, attribute, value);
}

SIMGPU_EXPORT cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle,
                                   CUdevice device) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(FunctionOn(handle, device, &function));
  SIMGPU_RETURN_IF_ERROR(SetFunctionAttribute(*function, attribute, value));
  std::shared_ptr<LibraryKernel> kernel;
  SIMGPU_RETURN_IF_ERROR(FindKernel(handle, &kernel));
  std::lock_guard lock(kernel->attributes_mutex);
  kernel->attributes[{device, attribute}] = value;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache config, CUdevice device) {
  std::shared_ptr<Function> function;
  SIMGPU_RETURN_IF_ERROR(FunctionOn(handle, device, &function));
  function->cache_config = config;
  return CUDA_SUCCESS;
}
