// A CUDA driver without a GPU for the worker's fuzzer, built as a shared library that the worker
// opens as any driver. It does nothing useful and everything at once, on the calling thread; what
// it is good for is what it touches:
//   - every object is an allocation, so a worker that uses one after its end is caught by
//     AddressSanitizer, one that ends it twice too;
//   - device memory is malloc'ed, exactly as large as asked for, so a range that the worker let
//     pass wrongly is caught when it is copied;
//   - host memory, module images, names and log buffers that it is given are read or written whole.
// Functions that are not here answer CUDA_ERROR_NOT_SUPPORTED (LoadDriver sees to it).
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr size_t kMostMemory = 8 << 20;
constexpr size_t kTotalMemory = size_t{16} << 30;

struct Object {
  uint32_t magic;
};

std::mutex mutex;
std::map<CUdeviceptr, size_t> memory;  // under mutex, as all of these
size_t memory_bytes = 0;
std::set<Object*> objects;
thread_local CUcontext current = nullptr;

template <typename T>
CUresult Make(T* handle, uint32_t magic) {
  std::lock_guard lock(mutex);
  auto* object = new Object{magic};
  objects.insert(object);
  *handle = reinterpret_cast<T>(object);
  return CUDA_SUCCESS;
}
// Reads the object, which AddressSanitizer notices if it has ended.
template <typename T>
void Touch(T handle, uint32_t magic) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return;  // null, legacy and per-thread streams
  if (reinterpret_cast<const volatile Object*>(handle)->magic != magic) abort();
}
template <typename T>
CUresult End(T handle, uint32_t magic) {
  Touch(handle, magic);
  std::lock_guard lock(mutex);
  auto* object = reinterpret_cast<Object*>(handle);
  if (objects.erase(object) == 0) abort();
  delete object;
  return CUDA_SUCCESS;
}

constexpr uint32_t kContext = 1, kStream = 2, kEvent = 3, kModule = 4, kLibrary = 5, kFunction = 6,
                   kKernel = 7, kPool = 8, kLink = 9;

// What belongs to a context is made in one, as every driver has it.
template <typename T>
CUresult MakeInContext(T* handle, uint32_t magic) {
  return current == nullptr ? CUDA_ERROR_INVALID_CONTEXT : Make(handle, magic);
}

CUresult Allocate(CUdeviceptr* address, size_t bytes) {
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex);
  if (bytes > kMostMemory || memory_bytes + bytes > kMostMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  void* block = calloc(1, bytes);
  *address = reinterpret_cast<CUdeviceptr>(block);
  memory[*address] = bytes;
  memory_bytes += bytes;
  return CUDA_SUCCESS;
}

CUresult Free(CUdeviceptr address) {
  std::lock_guard lock(mutex);
  auto found = memory.find(address);
  if (found == memory.end()) abort();  // the worker knows what it has
  memory_bytes -= found->second;
  free(reinterpret_cast<void*>(address));
  memory.erase(found);
  return CUDA_SUCCESS;
}

void* At(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

// A simple sum, so that the reads are not optimised away.
unsigned Read(const void* bytes, size_t count) {
  unsigned sum = 0;
  for (size_t i = 0; i < count; ++i) sum += static_cast<const volatile unsigned char*>(bytes)[i];
  return sum;
}

void ReadImage(const void* image, unsigned count, CUjit_option* options, void** values) {
  Read(image, 4);
  for (unsigned i = 0; i < count; ++i) {
    const bool buffer =
        options[i] == CU_JIT_INFO_LOG_BUFFER || options[i] == CU_JIT_ERROR_LOG_BUFFER;
    // Its size is the next option, as the worker says it.
    if (buffer && i + 1 < count) memset(values[i], 'x', reinterpret_cast<size_t>(values[i + 1]));
  }
}

template <typename T>
CUresult Fill(CUdeviceptr target, size_t pitch, T value, size_t width, size_t height) {
  for (size_t row = 0; row < height; ++row) {
    for (size_t i = 0; i < width; ++i) {
      memcpy(At(target + row * pitch + i * sizeof value), &value, sizeof value);
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Forgets everything, between two inputs.
void FuzzDriverReset() {
  std::lock_guard lock(mutex);
  for (Object* object : objects) delete object;
  objects.clear();
  for (const auto& [address, bytes] : memory) free(reinterpret_cast<void*>(address));
  memory.clear();
  memory_bytes = 0;
}

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  return *version = 13000, CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "CUDA_ERROR";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return *device = ordinal, CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  return *value = 1, CUDA_SUCCESS;
}
CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice) {
  return Make(pool, kPool);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return Make(context, kContext);
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) {
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxReset(CUdevice) {
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
#undef cuCtxCreate
#undef cuCtxCreate_v2
CUresult cuCtxCreate_v2(CUcontext* context, unsigned, CUdevice) {
  return Make(context, kContext);
}
CUresult cuCtxDestroy(CUcontext context) {
  if (current == context) current = nullptr;
  return End(context, kContext);
}
CUresult cuCtxSetCurrent(CUcontext context) {
  Touch(context, kContext);
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (context != nullptr) *context = current;
  current = nullptr;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  return *value = 1024, CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_SUCCESS;
}
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
CUresult cuCtxResetPersistingL2Cache() {
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  return MakeInContext(stream, kStream);
}
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  return MakeInContext(stream, kStream);
}
CUresult cuStreamDestroy(CUstream stream) {
  return End(stream, kStream);
}
CUresult cuStreamQuery(CUstream stream) {
  return Touch(stream, kStream), CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
  return Touch(stream, kStream), CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  Touch(stream, kStream);
  Touch(event, kEvent);
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t, unsigned) {
  Touch(stream, kStream);
  Read(At(address), 4);
  return CUDA_SUCCESS;
}
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  Touch(stream, kStream);
  memcpy(At(address), &value, sizeof value);
  return CUDA_SUCCESS;
}
CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned) {
  Touch(stream, kStream);
  memcpy(At(address), &value, sizeof value);
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned) {
  return MakeInContext(event, kEvent);
}
CUresult cuEventDestroy(CUevent event) {
  return End(event, kEvent);
}
CUresult cuEventQuery(CUevent event) {
  return Touch(event, kEvent), CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) {
  return Touch(event, kEvent), CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  Touch(event, kEvent);
  Touch(stream, kStream);
  return CUDA_SUCCESS;
}
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) {
  return cuEventRecord(event, stream);
}
CUresult cuEventElapsedTime(float* ms, CUevent start, CUevent end) {
  Touch(start, kEvent);
  Touch(end, kEvent);
  *ms = 1;
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
  *free = *total = kTotalMemory;
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  return Allocate(address, bytes);
}
CUresult cuMemAllocPitch(CUdeviceptr* address, size_t* pitch, size_t width, size_t height,
                         unsigned) {
  *pitch = (width + 511) / 512 * 512;
  if (height != 0 && *pitch > kMostMemory / height) return CUDA_ERROR_OUT_OF_MEMORY;
  return Allocate(address, *pitch * height);
}
CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
  Touch(stream, kStream);
  return Allocate(address, bytes);
}
CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool pool,
                                 CUstream stream) {
  Touch(pool, kPool);
  return cuMemAllocAsync(address, bytes, stream);
}
CUresult cuMemFree(CUdeviceptr address) {
  return Free(address);
}
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  Touch(stream, kStream);
  return Free(address);
}
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  std::lock_guard lock(mutex);
  auto found = memory.upper_bound(address);
  if (found == memory.begin()) return CUDA_ERROR_NOT_FOUND;
  --found;
  if (address - found->first >= found->second) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = found->first;
  if (bytes != nullptr) *bytes = found->second;
  return CUDA_SUCCESS;
}
CUresult cuMemHostRegister(void*, size_t, unsigned) {
  return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void*) {
  return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* host, unsigned) {
  *address = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute, void* value) {
  Touch(pool, kPool);
  memset(value, 0, 4);
  return CUDA_SUCCESS;
}
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute, void* value) {
  Touch(pool, kPool);
  Read(value, 4);
  return CUDA_SUCCESS;
}
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
  return Touch(pool, kPool), CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void* source, size_t bytes, CUstream stream) {
  Touch(stream, kStream);
  memcpy(At(target), source, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void* target, CUdeviceptr source, size_t bytes, CUstream stream) {
  Touch(stream, kStream);
  memcpy(target, At(source), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
  Touch(stream, kStream);
  memmove(At(target), At(source), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  Touch(stream, kStream);
  const auto place = [](CUmemorytype type, void* host, CUdeviceptr device) {
    return static_cast<char*>(type == CU_MEMORYTYPE_HOST ? host : At(device));
  };
  char* target = place(copy->dstMemoryType, copy->dstHost, copy->dstDevice);
  char* source = place(copy->srcMemoryType, const_cast<void*>(copy->srcHost), copy->srcDevice);
  for (size_t row = 0; row < copy->Height; ++row) {
    memmove(target + (copy->dstY + row) * copy->dstPitch + copy->dstXInBytes,
            source + (copy->srcY + row) * copy->srcPitch + copy->srcXInBytes, copy->WidthInBytes);
  }
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream stream) {
  Touch(stream, kStream);
  return Fill(target, 0, value, count, 1);
}
CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t count, CUstream stream) {
  Touch(stream, kStream);
  return Fill(target, 0, value, count, 1);
}
CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream stream) {
  Touch(stream, kStream);
  return Fill(target, 0, value, count, 1);
}
CUresult cuMemsetD2D8Async(CUdeviceptr target, size_t pitch, unsigned char value, size_t width,
                           size_t height, CUstream stream) {
  Touch(stream, kStream);
  return Fill(target, pitch, value, width, height);
}
CUresult cuMemsetD2D16Async(CUdeviceptr target, size_t pitch, unsigned short value, size_t width,
                            size_t height, CUstream stream) {
  Touch(stream, kStream);
  return Fill(target, pitch, value, width, height);
}
CUresult cuMemsetD2D32Async(CUdeviceptr target, size_t pitch, unsigned value, size_t width,
                            size_t height, CUstream stream) {
  Touch(stream, kStream);
  return Fill(target, pitch, value, width, height);
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  ReadImage(image, 0, nullptr, nullptr);
  return MakeInContext(module, kModule);
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned count,
                            CUjit_option* options, void** values) {
  ReadImage(image, count, options, values);
  return MakeInContext(module, kModule);
}
CUresult cuModuleUnload(CUmodule module) {
  return End(module, kModule);
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Touch(module, kModule);
  if (strlen(name) == 0) return CUDA_ERROR_NOT_FOUND;
  return Make(function, kFunction);
}
CUresult cuModuleGetFunctionCount(unsigned* count, CUmodule module) {
  Touch(module, kModule);
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned count, CUmodule module) {
  Touch(module, kModule);
  for (unsigned i = 0; i < count; ++i) Make(&functions[i], kFunction);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetName(const char** name, CUfunction function) {
  Touch(function, kFunction);
  return *name = "function", CUDA_SUCCESS;
}
CUresult cuLinkCreate_v2(unsigned count, CUjit_option* options, void** values, CUlinkState* link) {
  const uint32_t nothing = 0;
  ReadImage(&nothing, count, options, values);
  return MakeInContext(link, kLink);
}
CUresult cuLinkAddData_v2(CUlinkState link, CUjitInputType, void* data, size_t bytes,
                          const char* name, unsigned count, CUjit_option* options, void** values) {
  Touch(link, kLink);
  Read(data, bytes);
  Read(name, strlen(name) + 1);
  const uint32_t nothing = 0;
  ReadImage(&nothing, count, options, values);
  return CUDA_SUCCESS;
}
CUresult cuLinkComplete(CUlinkState link, void** image, size_t* bytes) {
  Touch(link, kLink);
  static char result[100'000];
  *image = result;
  *bytes = sizeof result;
  return CUDA_SUCCESS;
}
CUresult cuLinkDestroy(CUlinkState link) {
  return End(link, kLink);
}
CUresult cuModuleGetGlobal(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  Touch(module, kModule);
  Read(name, strlen(name));
  if (Allocate(address, 64) != CUDA_SUCCESS) return CUDA_ERROR_NOT_FOUND;
  *bytes = 64;
  return CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option* options,
                           void** values, unsigned count, CUlibraryOption* library_options,
                           void** library_values, unsigned library_count) {
  for (unsigned i = 0; i < library_count; ++i) {
    if (library_options[i] == CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE) {
      Read(library_values[i], sizeof(CUlibraryHostUniversalFunctionAndDataTable));
    }
  }
  ReadImage(image, count, options, values);
  return Make(library, kLibrary);
}
CUresult cuLibraryUnload(CUlibrary library) {
  return End(library, kLibrary);
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  Touch(library, kLibrary);
  Read(name, strlen(name));
  return Make(kernel, kKernel);
}
CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary library) {
  Touch(library, kLibrary);
  return *count = 1, CUDA_SUCCESS;
}
CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary library,
                            const char* name) {
  Touch(library, kLibrary);
  Read(name, strlen(name));
  if (Allocate(address, 64) != CUDA_SUCCESS) return CUDA_ERROR_NOT_FOUND;
  *bytes = 64;
  return CUDA_SUCCESS;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  Touch(kernel, kKernel);
  return MakeInContext(function, kFunction);
}
CUresult cuKernelGetAttribute(int* value, CUfunction_attribute, CUkernel kernel, CUdevice) {
  Touch(kernel, kKernel);
  return *value = 8, CUDA_SUCCESS;
}
// Three parameters of 8, 4 and 16 bytes.
CUresult ParameterInfo(size_t index, size_t* offset, size_t* bytes) {
  constexpr size_t kOffsets[] = {0, 8, 16}, kSizes[] = {8, 4, 16};
  if (index >= 3) return CUDA_ERROR_INVALID_VALUE;
  *offset = kOffsets[index];
  if (bytes != nullptr) *bytes = kSizes[index];
  return CUDA_SUCCESS;
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* bytes) {
  Touch(kernel, kKernel);
  return ParameterInfo(index, offset, bytes);
}
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* bytes) {
  Touch(function, kFunction);
  return ParameterInfo(index, offset, bytes);
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction function) {
  Touch(function, kFunction);
  return *value = 8, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute, int) {
  return Touch(function, kFunction), CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache) {
  return Touch(function, kFunction), CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void** parameters, void** extra) {
  Touch(function, kFunction);
  Touch(stream, kStream);
  if (parameters != nullptr) {
    for (size_t i = 0; i < 3; ++i) {
      size_t offset, bytes;
      ParameterInfo(i, &offset, &bytes);
      Read(parameters[i], bytes);
    }
  }
  if (extra != nullptr && extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER &&
      extra[2] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
    const size_t bytes = *static_cast<size_t*>(extra[3]);
    if (bytes < 32) abort();  // the driver reads the kernel's whole block
    Read(extra[1], bytes);
  }
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  Read(config->attrs, config->numAttrs * sizeof(CUlaunchAttribute));
  return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, config->hStream, parameters, extra);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function, int,
                                                              size_t, unsigned) {
  Touch(function, kFunction);
  return *blocks = 1, CUDA_SUCCESS;
}
CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction function, int, int) {
  Touch(function, kFunction);
  return *bytes = 1024, CUDA_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
