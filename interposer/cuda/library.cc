// Libraries and their kernels, which belong to no context.
//
// A library is loaded at one server at once: that of the current context, or the first. When it is
// used in a context of another server, it is loaded there too, from a copy of its image that is
// kept where there are several servers. The program knows the first record alone; the others stand
// behind it, each with what its own server says of the kernels (limits differ between kinds of
// GPUs). A launch finds the other record of a kernel with one load.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"
#include "interposer/core/session.h"
#include "interposer/cuda/module.h"

namespace penstock::interposer {
namespace {

Handle HandleOf(const void* object) {
  return Handle{reinterpret_cast<uint64_t>(object)};
}

bool ReadLibraryOptions(Call& call, unsigned count, CUlibraryOption* options, void** values) {
  if (count > kMaxJitOptions || (count > 0 && (options == nullptr || values == nullptr))) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  for (unsigned i = 0; i < count; ++i) {
    switch (options[i]) {
      case CU_LIBRARY_BINARY_IS_PRESERVED:
        // A promise about this process's memory; the server has a copy of its own.
        break;
      case CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE:
        if (values[i] != nullptr) return call.Refuse(CUDA_ERROR_NOT_SUPPORTED);
        break;
      default:
        return call.Refuse(CUDA_ERROR_INVALID_VALUE);
    }
  }
  return true;
}

CUresult LoadLibrary(Call& call, CUlibrary* library, const void* code, CUjit_option* options,
                     void** values, unsigned count, CUlibraryOption* library_options,
                     void** library_values, unsigned library_count) {
  LoadOptions read;
  Image image;
  if (!call.Out(library) || !call.Out(code) ||
      !ReadJitOptions(call, count, options, values, &read) ||
      !ReadLibraryOptions(call, library_count, library_options, library_values) ||
      !Measure(call, code, &image)) {
    return call.result();
  }
  ModuleRecord* const record = Load(call, ModuleKind::kLibrary, image, read);
  if (record == nullptr) return call.result();
  if (call.client().sessions().size() > 1) {
    std::lock_guard lock(record->mutex);
    record->kept = std::make_shared<KeptImage>(image, std::move(read.scalars));
  }
  *library = reinterpret_cast<CUlibrary>(record->handle.bits);
  return CUDA_SUCCESS;
}

void Unload(Call& call, ModuleRecord& record) {
  commands::CuLibraryUnload command{};
  command.library = record.handle.bits;
  ForgetContents(call, record, call.objects().kernels);
  if (call.objects().libraries.Remove(HandleOf(reinterpret_cast<void*>(command.library)))) {
    static_cast<void>(call.Post(command));
  }
}

}  // namespace

// --- Elsewhere than where it was loaded ---------------------------------------------------------

struct KeptImage {
  KeptImage(const Image& image, std::vector<JitOption> options) {
    copy.format = image.format;
    for (const ImagePart& part : image.parts) {
      const auto* const first = static_cast<const std::byte*>(part.data);
      bytes.emplace_back(first, first + part.bytes);
      copy.parts.push_back({bytes.back().data(), part.bytes});
    }
    load.scalars = std::move(options);
  }
  std::vector<std::vector<std::byte>> bytes;
  Image copy;  // refers to bytes
  LoadOptions load;
};

ModuleRecord* Call::LibraryHere(ModuleRecord& library) {
  const uint32_t server = session_->index();
  if (library.server == server) return &library;
  std::lock_guard lock(library.loading);
  if (const auto known = library.elsewhere.find(server); known != library.elsewhere.end()) {
    return known->second;
  }
  if (library.kept == nullptr) {
    Refuse(CUDA_ERROR_INVALID_HANDLE);  // one that stands behind another, or is being unloaded
    return nullptr;
  }
  ModuleRecord* const loaded =
      Load(*this, ModuleKind::kLibrary, library.kept->copy, library.kept->load);
  if (loaded != nullptr) library.elsewhere.emplace(server, loaded);
  return loaded;
}

FunctionRecord* Call::KernelHere(FunctionRecord& kernel) {
  const uint32_t server = session_->index();
  if (kernel.server == server) return &kernel;
  if (const FunctionRecord::Elsewhere* const others = kernel.elsewhere.load()) {
    if (FunctionRecord* const known = (*others)[server].load()) return known;
  }
  ModuleRecord* const library = objects_->libraries.Find(kernel.owner);
  if (library == nullptr) {
    Refuse(CUDA_ERROR_INVALID_HANDLE);
    return nullptr;
  }
  ModuleRecord* const here = LibraryHere(*library);
  if (here == nullptr) return nullptr;
  FunctionRecord* const found =
      interposer::FindFunction(*this, *here, objects_->kernels, kernel.name);
  if (found == nullptr) return nullptr;
  std::lock_guard lock(library->loading);
  FunctionRecord::Elsewhere* others = kernel.elsewhere.load();
  if (others == nullptr) kernel.elsewhere.store(others = new FunctionRecord::Elsewhere{});
  (*others)[server].store(found);
  return found;
}

// --- Entries ------------------------------------------------------------------------------------

CUresult CuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* options,
                           void** values, unsigned int count, CUlibraryOption* library_options,
                           void** library_values, unsigned int library_count) {
  Call call(Function::kCuLibraryLoadData, Call::kInitialised);
  if (!call.ready()) return call.result();
  return LoadLibrary(call, library, code, options, values, count, library_options, library_values,
                     library_count);
}

CUresult CuLibraryLoadFromFile(CUlibrary* library, const char* path, CUjit_option* options,
                               void** values, unsigned int count, CUlibraryOption* library_options,
                               void** library_values, unsigned int library_count) {
  Call call(Function::kCuLibraryLoadFromFile, Call::kInitialised);
  std::vector<char> content;
  if (!call.ready() || !call.Out(path) || !ReadFile(call, path, &content)) return call.result();
  return LoadLibrary(call, library, content.data(), options, values, count, library_options,
                     library_values, library_count);
}

CUresult CuLibraryUnload(CUlibrary library) {
  Call call(Function::kCuLibraryUnload, Call::kInitialised);
  if (!call.ready()) return call.result();
  ModuleRecord* const record = call.objects().libraries.Find(HandleOf(library));
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::map<uint32_t, ModuleRecord*> elsewhere;
  {
    std::lock_guard lock(record->loading);
    record->kept.reset();
    elsewhere.swap(record->elsewhere);
  }
  for (const auto& [server, other] : elsewhere) {
    Call there(call, *call.client().sessions()[server], nullptr);
    Unload(there, *other);
  }
  Call here(call, *call.client().sessions()[record->server], nullptr);
  Unload(here, *record);
  return here.result();
}

CUresult CuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  Call call(Function::kCuLibraryGetKernel, Call::kInitialised);
  std::string_view text;
  if (!call.ready() || !call.Out(kernel) || !NameOf(call, name, &text)) return call.result();
  ModuleRecord* const record = call.objects().libraries.Find(HandleOf(library));
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Call home(call, *call.client().sessions()[record->server], nullptr);
  const FunctionRecord* const found = FindFunction(home, *record, call.objects().kernels, text);
  if (found == nullptr) return home.result();
  *kernel = reinterpret_cast<CUkernel>(found->handle.bits);
  return CUDA_SUCCESS;
}

CUresult CuLibraryEnumerateKernels(CUkernel* kernels, unsigned int count, CUlibrary library) {
  Call call(Function::kCuLibraryEnumerateKernels, Call::kInitialised);
  if (!call.ready()) return call.result();
  ModuleRecord* const record = call.objects().libraries.Find(HandleOf(library));
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (count == 0) return CUDA_SUCCESS;
  if (!call.Out(kernels)) return call.result();
  Call home(call, *call.client().sessions()[record->server], nullptr);
  std::vector<Handle> found;
  const CUresult result = ListFunctions(home, *record, call.objects().kernels, count, &found);
  for (size_t i = 0; i < found.size(); ++i) {
    kernels[i] = reinterpret_cast<CUkernel>(found[i].bits);
  }
  return result;
}

CUresult CuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary library,
                            const char* name) {
  Call call(Function::kCuLibraryGetGlobal, Call::kContext);
  std::string_view text;
  if (!call.ready() || !NameOf(call, name, &text)) return call.result();
  ModuleRecord* const record = call.FindLibrary(library);
  if (record == nullptr) return call.result();
  return FindGlobal(call, *record, text, true, address, bytes);
}

}  // namespace penstock::interposer
