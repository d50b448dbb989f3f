// cuInit and the questions that come before it.
#include <cstring>
#include <vector>

#include "common/log.h"
#include "custom_client.gen.h"
#include "interop/export_tables.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"
#include "interposer/core/proc_table.h"
#include "interposer/cuda/module.h"

namespace penstock::interposer {
namespace {

// What the private tables of NVIDIA's runtime ask of the driver around them. All of it is local.
CUresult HostPrimaryContext(CUdevice device, CUcontext* context) {
  Client* const client = Client::Get();
  if (client == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  if (client->FindDevice(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *context = reinterpret_cast<CUcontext>(PrimaryContext(static_cast<uint32_t>(device)).bits);
  return CUDA_SUCCESS;
}

CUcontext HostCurrentContext() {
  return reinterpret_cast<CUcontext>(ThisThread().current().bits);
}

int HostDriverVersion() {
  Client* const client = Client::Get();
  return client == nullptr ? kDriverVersion : client->driver_version();
}

int HostDeviceCount() {
  Client* const client = Client::Get();
  return client == nullptr ? 0 : static_cast<int>(client->devices().size());
}

CUresult HostDeviceIdentity(int ordinal, interop::DeviceIdentity* identity) {
  Client* const client = Client::Get();
  const Device* const device = client == nullptr ? nullptr : client->FindDevice(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  memcpy(identity->uuid, device->info.uuid, sizeof identity->uuid);
  identity->pci_domain = device->AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0);
  identity->pci_bus = device->AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0);
  identity->pci_device = device->AttributeOr(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0);
  return CUDA_SUCCESS;
}

CUresult HostContextId(CUcontext context, unsigned long long* id) {
  return CuCtxGetId(context, id);
}

CUresult HostStreamId(CUcontext, CUstream stream, unsigned long long* id) {
  return CuStreamGetId(stream, id, false);
}

// cuFFT asks for the functions of its modules.
CUresult HostEnumerateFunctions(CUmodule module, void (*visit)(void*, CUfunction), void* user) {
  std::vector<Handle> functions;
  const CUresult result = FunctionsOf(module, UINT32_MAX, &functions);
  if (result != CUDA_SUCCESS) return result;
  for (const Handle function : functions) visit(user, reinterpret_cast<CUfunction>(function.bits));
  return CUDA_SUCCESS;
}

void HostLog(const char* message) {
  LOG_INFO("interop", "%s", message);
}

void SetInteropHost() {
  interop::SetHost({.primary_context = HostPrimaryContext,
                    .current_context = HostCurrentContext,
                    .driver_version = HostDriverVersion,
                    .device_count = HostDeviceCount,
                    .device_identity = HostDeviceIdentity,
                    .context_id = HostContextId,
                    .stream_id = HostStreamId,
                    .enumerate_functions = HostEnumerateFunctions,
                    .log = HostLog});
}

}  // namespace

CUresult CuInit(unsigned int flags) {
  Call call(Function::kCuInit, Call::kNothing);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  SetInteropHost();
  return Client::Initialise();
}

// Asked before cuInit: then it is the version of this library, and cuInit fails if the server
// cannot keep that promise in a way the program would notice.
CUresult CuDriverGetVersion(int* version) {
  Call call(Function::kCuDriverGetVersion, Call::kNothing);
  if (!call.Out(version)) return call.result();
  *version = HostDriverVersion();
  return CUDA_SUCCESS;
}

CUresult CuGetProcAddress_v2(const char* symbol, void** pfn, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  Call call(Function::kCuGetProcAddress_v2, Call::kNothing);
  if (!call.Out(symbol) || !call.Out(pfn)) return call.result();
  *pfn = FindProc(symbol, version, flags, status);
  return *pfn != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult CuGetProcAddress(const char* symbol, void** pfn, int version, cuuint64_t flags) {
  Call call(Function::kCuGetProcAddress, Call::kNothing);
  if (!call.Out(symbol) || !call.Out(pfn)) return call.result();
  *pfn = FindProc(symbol, version, flags, nullptr);
  return *pfn != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult CuGetExportTable(const void** table, const CUuuid* id) {
  Call call(Function::kCuGetExportTable, Call::kNothing);
  if (!call.Out(table) || !call.Out(id)) return call.result();
  SetInteropHost();
  return interop::GetExportTable(table, id);
}

}  // namespace penstock::interposer
