// Modules, and what they have in common with libraries: loading code, and finding functions and
// variables in it.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "commands.gen.h"
#include "common/log.h"
#include "common/unique_fd.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"
#include "interposer/cuda/image.h"
#include "interposer/cuda/module.h"

namespace penstock::interposer {
namespace {

Handle HandleOf(const void* object) {
  return Handle{reinterpret_cast<uint64_t>(object)};
}

// --- Options ------------------------------------------------------------------------------------

uint32_t AsNumber(void* value) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(value));
}

}  // namespace

bool ReadJitOptions(Call& call, unsigned count, CUjit_option* options, void** values,
                    LoadOptions* result) {
  if (count > kMaxJitOptions || (count > 0 && (options == nullptr || values == nullptr))) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  for (unsigned i = 0; i < count; ++i) {
    switch (options[i]) {
      case CU_JIT_INFO_LOG_BUFFER:
        result->info_log = static_cast<char*>(values[i]);
        break;
      case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        result->info_bytes = AsNumber(values[i]);
        result->info_used = &values[i];
        break;
      case CU_JIT_ERROR_LOG_BUFFER:
        result->error_log = static_cast<char*>(values[i]);
        break;
      case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        result->error_bytes = AsNumber(values[i]);
        result->error_used = &values[i];
        break;
      case CU_JIT_WALL_TIME: {
        // An output; the time spent elsewhere is not this program's.
        const float none = 0;
        memcpy(&values[i], &none, sizeof none);
        break;
      }
      case CU_JIT_GLOBAL_SYMBOL_NAMES:
      case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
        return call.Refuse(CUDA_ERROR_NOT_SUPPORTED);
      default:
        result->scalars.push_back(
            {static_cast<uint32_t>(options[i]), 0, reinterpret_cast<uint64_t>(values[i])});
    }
  }
  if (result->info_log == nullptr) result->info_bytes = 0;
  if (result->error_log == nullptr) result->error_bytes = 0;
  return true;
}

namespace {

void GiveLog(char* buffer, uint32_t capacity, std::span<const std::byte> text, void** used) {
  if (capacity > 0) {
    const size_t bytes = std::min<size_t>(text.size(), capacity - 1);
    memcpy(buffer, text.data(), bytes);
    buffer[bytes] = '\0';
  }
  if (used != nullptr) *used = reinterpret_cast<void*>(std::min<size_t>(text.size(), capacity));
}

// --- Loading ------------------------------------------------------------------------------------

// The parts of an image that go through the bounce slots, as if they followed each other.
class BouncedParts final : public BouncedBytes {
 public:
  BouncedParts(Call& call, std::span<const ImagePart> parts, uint64_t bytes)
      : BouncedBytes(call.session(), call.thread().index, true, bytes), parts_(parts) {}

 private:
  void Move(uint64_t offset, std::span<std::byte> slot) override {
    for (const ImagePart& part : parts_) {
      if (offset < part.bytes && !slot.empty()) {
        const uint64_t bytes = std::min<uint64_t>(part.bytes - offset, slot.size());
        memcpy(slot.data(), static_cast<const std::byte*>(part.data) + offset, bytes);
        slot = slot.subspan(bytes);
        offset = 0;
      } else {
        offset -= std::min(offset, part.bytes);
      }
    }
  }

  const std::span<const ImagePart> parts_;
};

}  // namespace

CUresult SendCode(Call& call, const CodeCommand& sent, const Image& image,
                  const LoadOptions& options) {
  LoadModuleCommand& command = *sent.load;
  command.format = image.format;
  command.part_count = static_cast<uint32_t>(image.parts.size());
  command.option_count = static_cast<uint32_t>(options.scalars.size());
  command.info_log_bytes = std::min(options.info_bytes, kMaxJitLogBytes);
  command.error_log_bytes = std::min(options.error_bytes, kMaxJitLogBytes);

  // Small parts travel in the frame. The others are pulled from where they are during the call, or
  // go through the bounce slots.
  std::vector<ModulePart> parts(image.parts.size());
  std::vector<std::unique_ptr<transport::MemoryRegion>> regions;
  std::vector<std::span<const std::byte>> sections(1);
  uint64_t inlined = 0, total = 0, bounced = 0;
  std::vector<ImagePart> bounced_parts;
  transport::MemoryKey bounce_key;
  for (size_t i = 0; i < parts.size(); ++i) {
    const ImagePart& part = image.parts[i];
    parts[i] = ModulePart{};
    parts[i].bytes = part.bytes;
    total += part.bytes;
    if (inlined + part.bytes <= kMaxInlineCopyBytes) {
      parts[i].inlined = 1;
      inlined += part.bytes;
      sections.emplace_back(static_cast<const std::byte*>(part.data), part.bytes);
      continue;
    }
    static_assert(sizeof parts[i].key == sizeof bounce_key);
    if (call.session().bounces() && call.session().bounce().Key(&bounce_key)) {
      memcpy(&parts[i].key, &bounce_key, sizeof bounce_key);
      parts[i].bounced = 1;
      parts[i].offset = bounced;
      bounced += part.bytes;
      bounced_parts.push_back(part);
      continue;
    }
    auto region = call.session().connection().Register(const_cast<void*>(part.data), part.bytes,
                                                       transport::Access::kPeerReads);
    if (!region) {
      LOG_ERROR("module", "Cannot register an image (%llu bytes): %s",
                static_cast<unsigned long long>(part.bytes), region.error().message.c_str());
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    call.session().counters().bulk_sent.fetch_add(part.bytes, std::memory_order_relaxed);
    memcpy(&parts[i].key, &(*region)->key(), sizeof parts[i].key);
    regions.push_back(std::move(*region));
  }
  if (total > kMaxModuleBytes) return CUDA_ERROR_INVALID_IMAGE;
  sections[0] = std::as_bytes(std::span(parts));
  sections.push_back(std::as_bytes(std::span(options.scalars)));
  if (!sent.name.empty()) sections.push_back(std::as_bytes(std::span(sent.name)));

  BouncedParts pieces(call, bounced_parts, bounced);
  LoadModuleReply reply{};
  std::vector<std::byte> logs;
  const CUresult result =
      call.InvokeBytes(static_cast<uint32_t>(sent.operation), sent.load, sent.bytes, sections,
                       &reply, sizeof reply, &logs, bounced_parts.empty() ? nullptr : &pieces);
  GiveLogs(options, reply, logs);
  return result;
}

void GiveLogs(const LoadOptions& options, const LoadModuleReply& reply,
              std::span<const std::byte> rest) {
  const auto take = [&](uint64_t bytes) {
    const std::span<const std::byte> log = rest.first(std::min<uint64_t>(bytes, rest.size()));
    rest =
        rest.subspan(std::min<uint64_t>(PaddedTo8(static_cast<uint32_t>(log.size())), rest.size()));
    return log;
  };
  GiveLog(options.info_log, options.info_bytes, take(reply.info_log_bytes), options.info_used);
  GiveLog(options.error_log, options.error_bytes, take(reply.error_log_bytes), options.error_used);
}

bool Measure(Call& call, const void* program_image, Image* image) {
  Result<Image> measured = MeasureImage(program_image);
  if (!measured) {
    LOG_WARNING("module", "%s", measured.error().message.c_str());
    return call.Refuse(CUDA_ERROR_INVALID_IMAGE);
  }
  *image = std::move(*measured);
  return true;
}

ModuleRecord* Load(Call& call, ModuleKind kind, const Image& image, const LoadOptions& options) {
  RecordTable<ModuleRecord>& table =
      kind == ModuleKind::kModule ? call.objects().modules : call.objects().libraries;
  ModuleRecord* const record = table.Mint([&](ModuleRecord& made, Handle) {
    made.context = kind == ModuleKind::kModule ? &call.context() : nullptr;
    made.server = call.session().index();
  });
  if (record == nullptr) {
    call.Refuse(CUDA_ERROR_OUT_OF_MEMORY);
    return nullptr;
  }
  LoadModuleCommand command{};
  command.handle = record->handle.bits;
  command.kind = kind;
  const CUresult result =
      SendCode(call, {Operation::kLoadModule, &command, sizeof command, {}}, image, options);
  if (result == CUDA_SUCCESS) return record;
  table.Remove(record->handle);
  call.Refuse(result);
  return nullptr;
}

namespace {

CUresult LoadModule(Call& call, CUmodule* module, const void* program_image,
                    const LoadOptions& options) {
  Image image;
  if (!Measure(call, program_image, &image)) return call.result();
  const ModuleRecord* const record = Load(call, ModuleKind::kModule, image, options);
  if (record == nullptr) return call.result();
  *module = reinterpret_cast<CUmodule>(record->handle.bits);
  return CUDA_SUCCESS;
}

}  // namespace

bool ReadFile(Call& call, const char* path, std::vector<char>* content) {
  UniqueFd file(open(path, O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file.valid() || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return call.Refuse(CUDA_ERROR_FILE_NOT_FOUND);
  }
  if (static_cast<uint64_t>(status.st_size) > kMaxModuleBytes) {
    return call.Refuse(CUDA_ERROR_INVALID_IMAGE);
  }
  content->assign(static_cast<size_t>(status.st_size) + 1, '\0');
  size_t filled = 0;
  while (filled + 1 < content->size()) {
    const ssize_t got = read(file.get(), content->data() + filled, content->size() - 1 - filled);
    if (got <= 0) return call.Refuse(CUDA_ERROR_FILE_NOT_FOUND);
    filled += static_cast<size_t>(got);
  }
  return true;
}

// --- Looking up ---------------------------------------------------------------------------------

bool NameOf(Call& call, const char* name, std::string_view* text) {
  if (!call.Out(name)) return false;
  *text = {name, strnlen(name, kMaxNameBytes + 1)};
  // No module holds a name of this length.
  return text->size() <= kMaxNameBytes || call.Refuse(CUDA_ERROR_NOT_FOUND);
}

namespace {

// A parameter layout that a launch can rely on without looking again.
bool LayoutIsSound(const FunctionInfo& info, const std::vector<KernelParameter>& parameters) {
  if (info.parameter_bytes > kMaxKernelParameterBytes) return false;
  uint64_t end = 0;
  for (const KernelParameter& parameter : parameters) {
    if (parameter.offset < end) return false;
    end = uint64_t{parameter.offset} + parameter.size;
    if (end > info.parameter_bytes) return false;
  }
  return true;
}

}  // namespace

FunctionRecord* FindFunction(Call& call, ModuleRecord& owner, RecordTable<FunctionRecord>& table,
                             std::string_view name) {
  {
    std::lock_guard lock(owner.mutex);
    const auto known = owner.functions.find(name);
    if (known != owner.functions.end()) return known->second;
  }
  FunctionRecord* const record = table.Mint([&](FunctionRecord& made, Handle) {
    made.owner = owner.handle;
    made.context = owner.context;
    made.server = owner.server;
    made.name = name;
  });
  if (record == nullptr) {
    call.Refuse(CUDA_ERROR_OUT_OF_MEMORY);
    return nullptr;
  }
  GetFunctionCommand command{};
  command.handle = record->handle.bits;
  command.owner = owner.handle.bits;
  command.name_bytes = static_cast<uint32_t>(name.size());
  const std::span<const std::byte> section = std::as_bytes(std::span(name));
  std::vector<std::byte> tail;
  CUresult result =
      call.InvokeBytes(static_cast<uint32_t>(Operation::kGetFunction), &command, sizeof command,
                       {&section, 1}, &record->info, sizeof record->info, &tail);
  if (result == CUDA_SUCCESS) {
    const uint32_t count = record->info.parameter_count;
    if (count <= kMaxKernelParameters && tail.size() >= count * sizeof(KernelParameter)) {
      record->parameters.resize(count);
      if (count > 0)
        memcpy(record->parameters.data(), tail.data(), count * sizeof(KernelParameter));
    }
    if (record->parameters.size() != count || !LayoutIsSound(record->info, record->parameters)) {
      LOG_ERROR("module", "The server describes impossible parameters of the kernel (%s).",
                record->name.c_str());
      result = CUDA_ERROR_UNKNOWN;
    }
  }
  if (result != CUDA_SUCCESS) {
    table.Remove(record->handle);
    call.Refuse(result);
    return nullptr;
  }
  std::lock_guard lock(owner.mutex);
  // Another thread may have been first; both handles work.
  owner.functions.emplace(name, record);
  return record;
}

CUresult ListFunctions(Call& call, ModuleRecord& owner, RecordTable<FunctionRecord>& table,
                       size_t most, std::vector<Handle>* functions) {
  ListFunctionsCommand command{};
  command.owner = owner.handle.bits;
  ListFunctionsReply reply{};
  do {
    std::vector<std::byte> tail;
    const CUresult result =
        call.InvokeBytes(static_cast<uint32_t>(Operation::kListFunctions), &command, sizeof command,
                         {}, &reply, sizeof reply, &tail);
    if (result != CUDA_SUCCESS) return result;
    std::string_view names(reinterpret_cast<const char*>(tail.data()),
                           std::min<size_t>(reply.bytes, tail.size()));
    for (uint32_t i = 0; i < reply.listed && functions->size() < most; ++i) {
      const size_t end = names.find('\0');
      if (end == std::string_view::npos) return CUDA_ERROR_UNKNOWN;
      const FunctionRecord* const found = FindFunction(call, owner, table, names.substr(0, end));
      if (found == nullptr) return call.result();
      functions->push_back(found->handle);
      names.remove_prefix(end + 1);
    }
    command.first += reply.listed;
  } while (reply.listed != 0 && command.first < reply.total && functions->size() < most);
  return CUDA_SUCCESS;
}

CUresult FindGlobal(Call& call, ModuleRecord& owner, std::string_view name, bool library,
                    CUdeviceptr* address, size_t* bytes) {
  const auto key = std::make_pair(&call.context(), std::string(name));
  GlobalVariable variable;
  {
    std::lock_guard lock(owner.mutex);
    const auto known = owner.globals.find(key);
    if (known != owner.globals.end()) variable = known->second;
  }
  if (variable.address == 0) {
    const auto ask = [&](auto command, auto reply) {
      command.name_bytes = static_cast<uint32_t>(name.size());
      const std::span<const std::byte> section = std::as_bytes(std::span(name));
      const CUresult result = call.Invoke(command, &reply, {&section, 1});
      variable = {reply.dptr, reply.bytes};
      return result;
    };
    commands::CuModuleGetGlobal of_module{};
    commands::CuLibraryGetGlobal of_library{};
    of_module.hmod = of_library.library = owner.handle.bits;
    const CUresult result = library ? ask(of_library, commands::CuLibraryGetGlobalReply{})
                                    : ask(of_module, commands::CuModuleGetGlobalReply{});
    if (result != CUDA_SUCCESS) return result;
    call.objects().plan.AddGlobal(variable.address, variable.bytes, &call.context());
    std::lock_guard lock(owner.mutex);
    owner.globals.emplace(key, variable);
  }
  if (address != nullptr) *address = variable.address;
  if (bytes != nullptr) *bytes = variable.bytes;
  return CUDA_SUCCESS;
}

void ForgetContents(Call& call, ModuleRecord& owner, RecordTable<FunctionRecord>& functions) {
  functions.RemoveIf([&](const FunctionRecord& record) { return record.owner == owner.handle; });
  std::lock_guard lock(owner.mutex);
  for (const auto& [key, variable] : owner.globals) {
    call.objects().plan.RemoveGlobal(variable.address, key.first);
  }
}

// --- Modules ------------------------------------------------------------------------------------

CUresult CuModuleLoad(CUmodule* module, const char* path) {
  Call call(Function::kCuModuleLoad, Call::kContext);
  std::vector<char> content;
  if (!call.ready() || !call.Out(module) || !call.Out(path) || !ReadFile(call, path, &content)) {
    return call.result();
  }
  return LoadModule(call, module, content.data(), {});
}

CUresult CuModuleLoadData(CUmodule* module, const void* image) {
  Call call(Function::kCuModuleLoadData, Call::kContext);
  if (!call.ready() || !call.Out(module) || !call.Out(image)) return call.result();
  return LoadModule(call, module, image, {});
}

CUresult CuModuleLoadFatBinary(CUmodule* module, const void* image) {
  Call call(Function::kCuModuleLoadFatBinary, Call::kContext);
  if (!call.ready() || !call.Out(module) || !call.Out(image)) return call.result();
  return LoadModule(call, module, image, {});
}

CUresult CuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count,
                            CUjit_option* options, void** values) {
  Call call(Function::kCuModuleLoadDataEx, Call::kContext);
  LoadOptions read;
  if (!call.ready() || !call.Out(module) || !call.Out(image) ||
      !ReadJitOptions(call, count, options, values, &read)) {
    return call.result();
  }
  return LoadModule(call, module, image, read);
}

CUresult CuModuleUnload(CUmodule module) {
  Call call(Function::kCuModuleUnload, Call::kContext);
  if (!call.ready()) return call.result();
  commands::CuModuleUnload command{};
  if (!call.Module(module, &command.hmod)) return call.result();
  ModuleRecord* const record = call.objects().modules.Find(HandleOf(module));
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  ForgetContents(call, *record, call.objects().functions);
  if (!call.objects().modules.Remove(HandleOf(module))) return CUDA_ERROR_INVALID_HANDLE;
  return call.Post(command);
}

CUresult CuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  Call call(Function::kCuModuleGetLoadingMode, Call::kInitialised);
  if (!call.ready() || !call.Out(mode)) return call.result();
  *mode = call.client().options().lazy_loading ? CU_MODULE_LAZY_LOADING : CU_MODULE_EAGER_LOADING;
  return CUDA_SUCCESS;
}

CUresult CuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Call call(Function::kCuModuleGetFunction, Call::kContext);
  std::string_view text;
  uint64_t wire = 0;
  if (!call.ready() || !call.Out(function) || !NameOf(call, name, &text) ||
      !call.Module(module, &wire)) {
    return call.result();
  }
  ModuleRecord* const record = call.objects().modules.Find(HandleOf(module));
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const FunctionRecord* const found = FindFunction(call, *record, call.objects().functions, text);
  if (found == nullptr) return call.result();
  *function = reinterpret_cast<CUfunction>(found->handle.bits);
  return CUDA_SUCCESS;
}

CUresult FunctionsOf(CUmodule module, size_t most, std::vector<Handle>* functions) {
  Call call(Function::kCuModuleEnumerateFunctions, Call::kContext);
  uint64_t wire = 0;
  if (!call.ready() || !call.Module(module, &wire)) return call.result();
  ModuleRecord* const record = call.objects().modules.Find(HandleOf(module));
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return ListFunctions(call, *record, call.objects().functions, most, functions);
}

CUresult CuModuleEnumerateFunctions(CUfunction* functions, unsigned int count, CUmodule module) {
  if (count > 0 && functions == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Handle> found;
  const CUresult result = FunctionsOf(module, count, &found);
  for (size_t i = 0; i < found.size(); ++i) {
    functions[i] = reinterpret_cast<CUfunction>(found[i].bits);
  }
  return result;
}

CUresult CuModuleGetGlobal(CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  Call call(Function::kCuModuleGetGlobal, Call::kContext);
  std::string_view text;
  uint64_t wire = 0;
  if (!call.ready() || !NameOf(call, name, &text) || !call.Module(module, &wire)) {
    return call.result();
  }
  ModuleRecord* const record = call.objects().modules.Find(HandleOf(module));
  if (record == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return FindGlobal(call, *record, text, false, address, bytes);
}

}  // namespace penstock::interposer
