// cuInit, versions, the profiler switch, and joining this library to NVIDIA's runtime.
#include <cudaProfiler.h>

#include "interop/export_tables.h"
#include "simgpu/driver/entry.h"
#include "simgpu/driver/log.h"
#include "simgpu/driver/module.h"

using namespace simgpu;

namespace {

constexpr int kDriverVersion = 13000;

// What the private tables ask of us; see interop/export_tables.h.
penstock::interop::Host MakeHost() {
  penstock::interop::Host host{};
  host.primary_context = [](CUdevice number, CUcontext* context) {
    Device* device = nullptr;
    SIMGPU_RETURN_IF_ERROR(FindDevice(number, &device));
    *context = device->primary_handle;
    return CUDA_SUCCESS;
  };
  host.current_context = [] { return CurrentHandle(); };
  host.driver_version = [] { return kDriverVersion; };
  host.device_count = [] {
    return state() == nullptr ? 0 : static_cast<int>(state()->devices.size());
  };
  host.device_identity = [](int ordinal, penstock::interop::DeviceIdentity* identity) {
    Device* device = nullptr;
    SIMGPU_RETURN_IF_ERROR(FindDevice(ordinal, &device));
    for (size_t i = 0; i < sizeof(identity->uuid); ++i) {
      identity->uuid[i] = static_cast<unsigned char>(device->uuid.bytes[i]);
    }
    identity->pci_domain = device->pci_domain;
    identity->pci_bus = device->pci_bus;
    identity->pci_device = device->pci_device;
    return CUDA_SUCCESS;
  };
  host.context_id = [](CUcontext context, unsigned long long* id) {
    return cuCtxGetId(context, id);
  };
  host.stream_id = [](CUcontext, CUstream stream, unsigned long long* id) {
    return cuStreamGetId(stream, id);
  };
  host.enumerate_functions = [](CUmodule module, void (*visit)(void*, CUfunction), void* user) {
    unsigned count = 0;
    SIMGPU_RETURN_IF_ERROR(cuModuleGetFunctionCount(&count, module));
    std::vector<CUfunction> functions(count);
    SIMGPU_RETURN_IF_ERROR(cuModuleEnumerateFunctions(functions.data(), count, module));
    for (CUfunction function : functions) visit(user, function);
    return CUDA_SUCCESS;
  };
  host.log = [](const char* message) { LogWarning("%s", message); };
  return host;
}

}  // namespace

SIMGPU_EXPORT cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return InitialiseState();
}

SIMGPU_EXPORT cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuGetExportTable(const void** table, const CUuuid* id) {
  static const bool host_is_set = (penstock::interop::SetHost(MakeHost()), true);
  (void)host_is_set;
  return penstock::interop::GetExportTable(table, id);
}

SIMGPU_EXPORT cuProfilerInitialize(const char*, const char*, CUoutput_mode) {
  return CUDA_ERROR_NOT_SUPPORTED;  // deprecated; the real driver refuses it as well
}
SIMGPU_EXPORT cuProfilerStart() {
  std::shared_ptr<Context> context;
  return EnterContext(&context);
}
SIMGPU_EXPORT cuProfilerStop() {
  std::shared_ptr<Context> context;
  return EnterContext(&context);
}
