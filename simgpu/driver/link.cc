// cuLink*: joins PTX texts. The "cubin" that comes out is PTX again, which cuModuleLoadData takes.
#include "simgpu/driver/link.h"

#include "simgpu/driver/entry.h"
#include "simgpu/driver/fatbin.h"
#include "simgpu/driver/log.h"
#include "simgpu/driver/ptx_link.h"

using namespace simgpu;

namespace {

CUresult Add(CUlinkState handle, CUjitInputType type, const void* data, size_t bytes) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  const auto link = state()->links.Find(handle);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (data == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  std::string image(static_cast<const char*>(data), bytes);
  image.append(64, '\0');
  if (type == CU_JIT_INPUT_PTX) {
    link->texts.push_back(image.c_str());
    return CUDA_SUCCESS;
  }
  if (type != CU_JIT_INPUT_FATBINARY && type != CU_JIT_INPUT_CUBIN) {
    link->logs.Write("Only PTX and fat binaries that contain it can be linked.");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const Device& device = *context->device();
  std::string ptx;
  std::string log;
  const CUresult result =
      PtxOfImage(image.data(), device.cc_major * 10 + device.cc_minor, &ptx, &log);
  if (result != CUDA_SUCCESS) {
    link->logs.Write(log);
    LogWarning("An image is not linked (error %d): %s", result, log.c_str());
    return result;
  }
  link->texts.push_back(std::move(ptx));
  return CUDA_SUCCESS;
}

}  // namespace

SIMGPU_EXPORT cuLinkCreate_v2(unsigned int count, CUjit_option* options, void** values,
                              CUlinkState* handle) {
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(EnterContext(&context));
  if (handle == nullptr || (count > 0 && (options == nullptr || values == nullptr))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto link = std::make_shared<LinkState>();
  if (!link->logs.Read(count, options, values)) return CUDA_ERROR_INVALID_VALUE;
  *handle = state()->links.Insert(link);
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuLinkAddData_v2(CUlinkState handle, CUjitInputType type, void* data, size_t bytes,
                               const char*, unsigned int, CUjit_option*, void**) {
  return Add(handle, type, data, bytes);
}

SIMGPU_EXPORT cuLinkAddFile_v2(CUlinkState handle, CUjitInputType type, const char* path,
                               unsigned int, CUjit_option*, void**) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string image;
  if (!ReadFile(path, &image)) return CUDA_ERROR_FILE_NOT_FOUND;
  return Add(handle, type, image.data(), image.size());
}

SIMGPU_EXPORT cuLinkComplete(CUlinkState handle, void** image, size_t* bytes) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  const auto link = state()->links.Find(handle);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string log;
  const bool linked = !link->texts.empty() && LinkPtx(link->texts, &link->linked, &log);
  link->logs.Write(log);
  if (!linked) {
    LogWarning("PTX is not linked: %s", log.empty() ? "There is no input." : log.c_str());
    return CUDA_ERROR_INVALID_PTX;
  }
  *image = link->linked.data();
  if (bytes != nullptr) *bytes = link->linked.size() + 1;
  return CUDA_SUCCESS;
}

SIMGPU_EXPORT cuLinkDestroy(CUlinkState handle) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  return state()->links.Remove(handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
