// Functions and kernels: what can be asked about them came with the handle.
#include <bit>

#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"

namespace penstock::interposer {
namespace {

Handle HandleOf(const void* object) {
  return Handle{reinterpret_cast<uint64_t>(object)};
}

// A CUkernel is taken wherever a CUfunction is.
FunctionRecord* Find(Call& call, CUfunction function) {
  return call.ready() ? call.FindFunction(function) : nullptr;
}

// The kernel wherever it was loaded, for what is the same everywhere.
FunctionRecord* Known(Call& call, CUkernel kernel) {
  if (!call.ready()) return nullptr;
  FunctionRecord* const record = call.objects().kernels.Find(HandleOf(kernel));
  if (record == nullptr) call.Refuse(CUDA_ERROR_INVALID_HANDLE);
  return record;
}

CUresult GetAttribute(Call& call, const FunctionRecord* record, int* value, int attribute) {
  if (record == nullptr || !call.Out(value)) return call.result();
  if (attribute < 0 || attribute >= static_cast<int>(kFunctionAttributeSlots) ||
      (record->info.attribute_known >> attribute & 1) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *value = record->info.attributes[attribute];
  return CUDA_SUCCESS;
}

CUresult SetAttribute(Call& call, FunctionRecord* record, int attribute, int value) {
  if (record == nullptr) return call.result();
  if (attribute < 0 || attribute >= static_cast<int>(kFunctionAttributeSlots)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if ((record->info.attribute_known >> attribute & 1) != 0 &&
      record->info.attributes[attribute] == value) {
    return CUDA_SUCCESS;
  }
  commands::CuFuncSetAttribute command{};
  command.hfunc = record->handle.bits;
  command.attrib = static_cast<uint32_t>(attribute);
  command.value = value;
  const CUresult result = call.Invoke(command);
  if (result != CUDA_SUCCESS) return result;
  record->info.attributes[attribute] = value;
  record->info.attribute_known |= 1u << attribute;
  return CUDA_SUCCESS;
}

CUresult ParameterInfo(Call& call, const FunctionRecord* record, size_t index, size_t* offset,
                       size_t* size) {
  if (record == nullptr || !call.Out(offset)) return call.result();
  if (index >= record->parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = record->parameters[index].offset;
  if (size != nullptr) *size = record->parameters[index].size;
  return CUDA_SUCCESS;
}

CUresult Name(Call& call, const FunctionRecord* record, const char** name) {
  if (record == nullptr || !call.Out(name)) return call.result();
  *name = record->name.c_str();
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  Call call(Function::kCuFuncGetAttribute, Call::kContext);
  return GetAttribute(call, Find(call, function), value, attribute);
}

CUresult CuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  Call call(Function::kCuFuncSetAttribute, Call::kContext);
  return SetAttribute(call, Find(call, function), attribute, value);
}

CUresult CuFuncGetModule(CUmodule* module, CUfunction function) {
  Call call(Function::kCuFuncGetModule, Call::kContext);
  const FunctionRecord* const record = Find(call, function);
  if (record == nullptr || !call.Out(module)) return call.result();
  // A kernel's module is an instance of its library, which has no handle here.
  if (record->owner.kind() != HandleKind::kModule) return CUDA_ERROR_NOT_SUPPORTED;
  *module = reinterpret_cast<CUmodule>(record->owner.bits);
  return CUDA_SUCCESS;
}

CUresult CuFuncGetName(const char** name, CUfunction function) {
  Call call(Function::kCuFuncGetName, Call::kContext);
  return Name(call, Find(call, function), name);
}

CUresult CuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size) {
  Call call(Function::kCuFuncGetParamInfo, Call::kContext);
  return ParameterInfo(call, Find(call, function), index, offset, size);
}

CUresult CuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function) {
  Call call(Function::kCuFuncIsLoaded, Call::kContext);
  if (Find(call, function) == nullptr || !call.Out(state)) return call.result();
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

CUresult CuFuncLoad(CUfunction function) {
  Call call(Function::kCuFuncLoad, Call::kContext);
  return Find(call, function) == nullptr ? call.result() : CUDA_SUCCESS;
}

// A preference without effect since devices of compute capability 5.
CUresult CuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig) {
  Call call(Function::kCuFuncSetSharedMemConfig, Call::kContext);
  return Find(call, function) == nullptr ? call.result() : CUDA_SUCCESS;
}

// The handle of the kernel does as a function: both are accepted everywhere.
CUresult CuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  Call call(Function::kCuKernelGetFunction, Call::kContext);
  const FunctionRecord* const record = Known(call, kernel);
  if (record == nullptr || !call.Out(function)) return call.result();
  *function = reinterpret_cast<CUfunction>(record->handle.bits);
  return CUDA_SUCCESS;
}

CUresult CuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
  Call call(Function::kCuKernelGetLibrary, Call::kInitialised);
  const FunctionRecord* const record = Known(call, kernel);
  if (record == nullptr || !call.Out(library)) return call.result();
  *library = reinterpret_cast<CUlibrary>(record->owner.bits);
  return CUDA_SUCCESS;
}

CUresult CuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel,
                              CUdevice device) {
  Call call(Function::kCuKernelGetAttribute, Call::kInitialised);
  int32_t wire = 0;
  if (!call.ready() || !call.Device(device, &wire)) return call.result();
  return GetAttribute(call, call.FindKernel(kernel), value, attribute);
}

CUresult CuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                              CUdevice device) {
  Call call(Function::kCuKernelSetAttribute, Call::kContext);
  int32_t wire = 0;
  if (!call.ready() || !call.Device(device, &wire)) return call.result();
  return SetAttribute(call, call.FindKernel(kernel), attribute, value);
}

CUresult CuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device) {
  Call call(Function::kCuKernelSetCacheConfig, Call::kInitialised);
  int32_t wire = 0;
  if (!call.ready() || !call.Device(device, &wire)) return call.result();
  FunctionRecord* const record = call.FindKernel(kernel);
  if (record == nullptr) return call.result();
  if (config < CU_FUNC_CACHE_PREFER_NONE || config > CU_FUNC_CACHE_PREFER_EQUAL) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  record->cache_config = config;
  return CUDA_SUCCESS;
}

CUresult CuKernelGetName(const char** name, CUkernel kernel) {
  Call call(Function::kCuKernelGetName, Call::kInitialised);
  return Name(call, Known(call, kernel), name);
}

CUresult CuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  Call call(Function::kCuKernelGetParamInfo, Call::kInitialised);
  return ParameterInfo(call, Known(call, kernel), index, offset, size);
}

}  // namespace penstock::interposer
