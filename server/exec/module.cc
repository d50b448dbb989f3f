// Code: modules and libraries, their functions and variables.
//
// An image comes in parts, inside the call, pulled from registered memory of the client or through
// its bounce slots, into memory of ours; a fatbin gets a wrapper around it as nvcc makes them. The
// executor loads it, because the JIT may take seconds.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "common/log.h"
#include "custom_server.gen.h"
#include "protocol/operations.h"
#include "server/exec/link.h"
#include "server/worker/operations.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// What __cudaRegisterFatBinary and cuModuleLoadData are given (fatbinary_section.h of the toolkit).
struct FatbinWrapper {
  uint32_t magic = 0x466243b1;
  uint32_t version = 1;
  const void* data = nullptr;
  const void* extra = nullptr;  // version 2: a null-terminated list of containers to be linked
};

// Part offsets are multiples of this: containers are read in place, and NVIDIA aligns them so.
constexpr uint64_t kPartAlignment = 64;

// What the images that one session is loading may take at a time. A client claims their sizes
// before it has sent anything.
constexpr uint64_t kMaxLoadingBytes = 2 * kMaxModuleBytes;

// A part of kMaxLoadingBytes, for as long as the image lives, which may end on any thread.
class Claim {
 public:
  explicit Claim(std::shared_ptr<std::atomic<uint64_t>> taken) : taken_(std::move(taken)) {}
  ~Claim() { *taken_ -= bytes_; }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  bool Take(uint64_t bytes) {
    if (bytes > kMaxLoadingBytes - std::min(kMaxLoadingBytes, taken_->load())) return false;
    *taken_ += bytes_ = bytes;
    return true;
  }

 private:
  const std::shared_ptr<std::atomic<uint64_t>> taken_;
  uint64_t bytes_ = 0;
};

struct Loading {
  explicit Loading(Worker& worker) : claim(worker.loading_bytes()) {}
  Claim claim;
  LoadModuleCommand command{};
  ReplyToken token;
  std::shared_ptr<ContextState> context;
  // Zeroes until the parts are there. From calloc, so that a size that is only claimed costs
  // nothing.
  std::shared_ptr<std::byte> image;
  std::vector<uint64_t> places, sizes;  // of the parts in the image
  std::vector<JitOption> options;
  std::vector<const void*> containers;
  FatbinWrapper wrapper;
  std::unique_ptr<transport::MemoryRegion> region;
  struct Pull {
    transport::MemoryKey key;
    uint64_t source, target, bytes;
    bool bounced;
  };
  std::vector<Pull> pulls;
  size_t next_pull = 0, pulling = 0;
  bool refused = false;
  std::string info_log, error_log;
  // An input of a link.
  std::shared_ptr<Link> link;
  CUjitInputType input_type = CU_JIT_INPUT_PTX;
  uint64_t input_bytes = 0;
  std::string input_name;
  CUmodule module = nullptr;
  CUlibrary library = nullptr;
  CUresult result = CUDA_SUCCESS;
};

std::byte* Aligned(std::byte* image) {
  const uint64_t address = reinterpret_cast<uint64_t>(image);
  return image + (-address & (kPartAlignment - 1));
}

// What the driver's load functions take.
const void* ImagePointer(Loading& loading) {
  std::byte* base = Aligned(loading.image.get());
  const bool wrapped = loading.command.format == ImageFormat::kWrapper ||
                       loading.command.format == ImageFormat::kWrapperV2;
  if (!wrapped) return base + loading.places[0];
  loading.wrapper.data = base + loading.places[0];
  if (loading.command.format == ImageFormat::kWrapperV2) {
    loading.wrapper.version = 2;
    for (size_t i = 1; i < loading.places.size(); ++i) {
      loading.containers.push_back(base + loading.places[i]);
    }
    loading.containers.push_back(nullptr);
    loading.wrapper.extra = loading.containers.data();
  }
  return &loading.wrapper;
}

// On the executor's thread.
void Load(const Driver& driver, Loading& loading) {
  if (loading.context != nullptr) {
    loading.result = driver.cuCtxSetCurrent(loading.context->context);
    if (loading.result != CUDA_SUCCESS) return;
  }
  const LoadModuleCommand& command = loading.command;
  loading.info_log.resize(command.info_log_bytes);
  loading.error_log.resize(command.error_log_bytes);
  std::vector<CUjit_option> jit_names;
  std::vector<void*> jit_values;
  std::vector<CUlibraryOption> library_names;
  std::vector<void*> library_values;
  const auto add = [&](CUjit_option name, void* value) {
    jit_names.push_back(name);
    jit_values.push_back(value);
  };
  for (const JitOption& option : loading.options) {
    void* value = reinterpret_cast<void*>(option.value);
    if (option.is_library_option != 0) {
      library_names.push_back(static_cast<CUlibraryOption>(option.option));
      library_values.push_back(value);
    } else {
      add(static_cast<CUjit_option>(option.option), value);
    }
  }
  const auto as_value = [](uint64_t number) { return reinterpret_cast<void*>(number); };
  const size_t info = jit_names.size() + 1;
  if (command.info_log_bytes != 0) {
    add(CU_JIT_INFO_LOG_BUFFER, loading.info_log.data());
    add(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, as_value(command.info_log_bytes));
  }
  const size_t error = jit_names.size() + 1;
  if (command.error_log_bytes != 0) {
    add(CU_JIT_ERROR_LOG_BUFFER, loading.error_log.data());
    add(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, as_value(command.error_log_bytes));
  }
  const void* image = ImagePointer(loading);
  const auto count = static_cast<unsigned>(jit_names.size());
  if (loading.link != nullptr) {
    // The logs are the link's own.
    loading.result = driver.cuLinkAddData_v2(
        loading.link->state, loading.input_type, const_cast<void*>(image), loading.input_bytes,
        loading.input_name.c_str(), count, jit_names.data(), jit_values.data());
    loading.info_log = TextOf(loading.link->info_log);
    loading.error_log = TextOf(loading.link->error_log);
    return;
  }
  if (command.kind == ModuleKind::kModule) {
    loading.result = count == 0 ? driver.cuModuleLoadData(&loading.module, image)
                                : driver.cuModuleLoadDataEx(&loading.module, image, count,
                                                            jit_names.data(), jit_values.data());
  } else {
    loading.result = driver.cuLibraryLoadData(
        &loading.library, image, jit_names.data(), jit_values.data(), count, library_names.data(),
        library_values.data(), static_cast<unsigned>(library_names.size()));
  }
  // The driver has put the used sizes where the capacities were.
  const auto trim = [&](std::string* log, size_t index, uint32_t capacity) {
    if (capacity == 0) return;
    const uint64_t used = reinterpret_cast<uint64_t>(jit_values[index]);
    log->resize(std::min<uint64_t>(used, capacity));
    log->resize(strnlen(log->data(), log->size()));
  };
  trim(&loading.info_log, info, command.info_log_bytes);
  trim(&loading.error_log, error, command.error_log_bytes);
}

// Back on the dispatch thread.
void FinishLoad(Worker& worker, Loading& loading) {
  const LoadModuleCommand& command = loading.command;
  if (loading.result == CUDA_SUCCESS && loading.link == nullptr) {
    bool adopted;
    if (command.kind == ModuleKind::kModule) {
      ModuleRecord record;
      record.module = loading.module;
      if (loading.context != nullptr) record.context = loading.context->handle;
      adopted = worker.objects().modules.Adopt(Handle{command.handle}, std::move(record));
    } else {
      LibraryRecord record;
      record.library = loading.library;
      record.image = loading.image;
      adopted = worker.objects().libraries.Adopt(Handle{command.handle}, std::move(record));
    }
    if (!adopted) return worker.End("A module is loaded under an impossible handle.", true);
  }
  const LoadModuleReply reply = {static_cast<uint32_t>(loading.info_log.size()),
                                 static_cast<uint32_t>(loading.error_log.size())};
  std::vector<std::byte> body(kMaxFrameBytes - sizeof(FrameHeader));
  Writer writer(body);
  writer.Put(reply);
  writer.PutString(loading.info_log);
  writer.PutString(loading.error_log);
  worker.ForwardOutput();
  worker.Answer(loading.token, loading.result, std::span(body).first(writer.used()));
}

void Submit(Worker& worker, std::shared_ptr<Loading> loading) {
  loading->region.reset();
  if (loading->refused) {
    LOG_WARNING("module", "A module cannot be pulled from the client.");
    return worker.Answer(loading->token, CUDA_ERROR_INVALID_VALUE);
  }
  worker.executor().Run([&worker, loading] { Load(worker.driver(), *loading); },
                        [&worker, loading] { FinishLoad(worker, *loading); });
}

void PullMore(Worker& worker, const std::shared_ptr<Loading>& loading);

// Gets a piece that is counted in `pulling`. `slot` is where a bounced one lies.
void PullPiece(Worker& worker, const std::shared_ptr<Loading>& loading, const Loading::Pull& piece,
               uint32_t slot) {
  const uint64_t cookie = worker.AddPull([&worker, loading, slot](transport::BulkStatus status) {
    if (slot != BounceSlots::kNone) worker.bounce().Return(slot);
    --loading->pulling;
    if (status != transport::BulkStatus::kOk) loading->refused = true;
    PullMore(worker, loading);
  });
  const uint64_t source = piece.bounced ? worker.bounce().Offset(slot) : piece.source;
  const transport::Outcome outcome = worker.connection().Get(
      *loading->region, piece.target, piece.key, source, piece.bytes, cookie);
  if (outcome == transport::Outcome::kOk) return;
  worker.DropPull(cookie);
  if (outcome == transport::Outcome::kAgain) {
    worker.bounce().RunLater(
        [&worker, loading, piece, slot] { PullPiece(worker, loading, piece, slot); });
    return;
  }
  --loading->pulling;
  loading->refused = true;  // the session ends anyway
}

// Keeps some pulls under way; the last one starts the load.
void PullMore(Worker& worker, const std::shared_ptr<Loading>& loading) {
  constexpr size_t kDepth = 4;
  while (!loading->refused && loading->pulling < kDepth &&
         loading->next_pull < loading->pulls.size()) {
    Loading::Pull& pull = loading->pulls[loading->next_pull];
    const uint64_t bytes = std::min<uint64_t>(pull.bytes, kBounceSlotBytes);
    Loading::Pull piece = pull;
    piece.bytes = bytes;
    if (pull.bounced) {
      const uint32_t slot = worker.bounce().Take();
      if (slot == BounceSlots::kNone) {
        // Pieces of our own that are under way come back here.
        if (loading->pulling > 0) return;
        worker.bounce().RunLater([&worker, loading] { PullMore(worker, loading); });
        return;
      }
      worker.bounce().Lend(
          slot, loading->token.sequence, pull.source, bytes,
          [&worker, loading, piece, slot] { PullPiece(worker, loading, piece, slot); });
    } else {
      PullPiece(worker, loading, piece, BounceSlots::kNone);
    }
    ++loading->pulling;
    pull.source += bytes;
    pull.target += bytes;
    pull.bytes -= bytes;
    if (pull.bytes == 0) ++loading->next_pull;
  }
  if (loading->pulling == 0) Submit(worker, loading);
}

bool FormatFits(const LoadModuleCommand& command) {
  switch (command.format) {
    case ImageFormat::kPtx:
    case ImageFormat::kElf:
    case ImageFormat::kContainer:
    case ImageFormat::kWrapper:
      return command.part_count == 1;
    case ImageFormat::kWrapperV2:
      return command.part_count >= 1 && command.part_count <= kMaxModuleParts;
  }
  return false;
}

// The function's attributes and layout. For a kernel without a current context they come from the
// kernel and the first device.
CUresult Describe(CallContext& call, FunctionRecord& record, FunctionInfo* info,
                  std::vector<KernelParameter>* parameters) {
  const Driver& driver = call.driver();
  CUfunction function = record.function;
  CUdevice device = 0;
  const bool by_kernel = function == nullptr && call.worker().current() == nullptr;
  if (by_kernel) {
    if (!call.Device(0, &device)) return call.error();
  } else if (function == nullptr) {
    const CUresult result = driver.cuKernelGetFunction(&function, record.kernel);
    if (result != CUDA_SUCCESS) return result;
    record.by_context.emplace_back(call.worker().current()->context, function);
  }
  for (uint32_t i = 0; i < kFunctionAttributeSlots; ++i) {
    int value = 0;
    const auto attribute = static_cast<CUfunction_attribute>(i);
    const CUresult result =
        by_kernel ? driver.cuKernelGetAttribute(&value, attribute, record.kernel, device)
                  : driver.cuFuncGetAttribute(&value, attribute, function);
    if (result != CUDA_SUCCESS) continue;
    info->attributes[i] = value;
    info->attribute_known |= 1u << i;
  }
  for (uint32_t i = 0; i < kMaxKernelParameters; ++i) {
    size_t offset = 0, size = 0;
    const CUresult result = by_kernel
                                ? driver.cuKernelGetParamInfo(record.kernel, i, &offset, &size)
                                : driver.cuFuncGetParamInfo(function, i, &offset, &size);
    if (result == CUDA_ERROR_INVALID_VALUE) break;  // beyond the last one
    if (result != CUDA_SUCCESS) return result;
    parameters->push_back({static_cast<uint32_t>(offset), static_cast<uint32_t>(size)});
    info->parameter_bytes = std::max(info->parameter_bytes, static_cast<uint32_t>(offset + size));
  }
  info->parameter_count = static_cast<uint32_t>(parameters->size());
  record.parameter_bytes = info->parameter_bytes;
  return CUDA_SUCCESS;
}

template <typename Reply>
CUresult FoundVariable(CallContext& call, CUresult result, CUdeviceptr address, size_t bytes,
                       Handle owner, Handle context) {
  if (result != CUDA_SUCCESS) return result;
  if (bytes != 0 && call.worker().allocations().Find(address, bytes) == nullptr) {
    call.worker().allocations().Add(
        {address, address + bytes, AllocationKind::kVariable, context, owner, {}});
  }
  call.reply().Put(Reply{address, bytes});
  return result;
}

}  // namespace

namespace {

// What follows the command: the parts, the options, and of a link's input its name.
CUresult ServeCode(CallContext& call, Reader& reader, const std::shared_ptr<Loading>& loading,
                   uint32_t name_bytes) {
  LoadModuleCommand& command = loading->command;
  std::span<const ModulePart> parts;
  if (!FormatFits(command) || command.info_log_bytes > kMaxJitLogBytes ||
      command.error_log_bytes > kMaxJitLogBytes || name_bytes > kMaxNameBytes ||
      !reader.TakeArray(command.part_count, kMaxModuleParts, &parts) || !call.token().needed) {
    return call.Malformed("A module load is malformed.");
  }
  // Logs share the reply's frame.
  command.info_log_bytes = std::min(command.info_log_bytes, kMaxJitLogBytes / 2);
  command.error_log_bytes = std::min(command.error_log_bytes, kMaxJitLogBytes / 2);
  uint64_t total = 0;
  for (const ModulePart& part : parts) {
    if (part.bytes == 0 || part.bytes > kMaxModuleBytes - total) {
      return call.Malformed("A module has an impossible size.");
    }
    loading->places.push_back(total);
    total += (part.bytes + kPartAlignment - 1) & ~(kPartAlignment - 1);
    if (total > kMaxModuleBytes) return call.Malformed("A module is too large.");
  }
  if (!loading->claim.Take(total)) return CUDA_ERROR_OUT_OF_MEMORY;
  // One byte more, so that PTX text always ends.
  loading->image.reset(static_cast<std::byte*>(calloc(total + 2 * kPartAlignment, 1)), free);
  if (loading->image == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  std::byte* base = Aligned(loading->image.get());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].inlined != 0) {
      std::span<const std::byte> bytes;
      if (!reader.TakeSection(parts[i].bytes, &bytes)) {
        return call.Malformed("A module has fewer bytes than it says.");
      }
      memcpy(base + loading->places[i], bytes.data(), bytes.size());
      continue;
    }
    Loading::Pull pull;
    static_assert(sizeof pull.key == sizeof parts[i].key);
    memcpy(static_cast<void*>(&pull.key), &parts[i].key, sizeof pull.key);
    pull.source = parts[i].offset;
    pull.target = loading->places[i];
    pull.bytes = parts[i].bytes;
    pull.bounced = parts[i].bounced != 0;
    if (pull.bounced && pull.source > kMaxModuleBytes) {
      return call.Malformed("A part of a module has an impossible place.");
    }
    loading->pulls.push_back(pull);
  }
  std::span<const JitOption> options;
  std::string_view name;
  if (!reader.TakeArray(command.option_count, kMaxJitOptions, &options) ||
      (name_bytes != 0 && !reader.TakeString(name_bytes, &name)) || !reader.AtEnd()) {
    return call.Malformed("A module load has impossible options.");
  }
  loading->input_name = name.substr(0, name.find('\0'));
  loading->input_bytes = parts[0].bytes;
  for (const JitOption& option : options) {
    // Others hold addresses; what they ask for travels as capacities. Of library options one holds
    // an address and one is a promise about the client's memory: none travels.
    if (!OptionIsScalar(option)) {
      return call.Malformed("A module load has an option that holds an address.");
    }
    loading->options.push_back(option);
  }
  Worker& worker = call.worker();
  loading->token = call.token();
  loading->context = worker.current();
  if (command.kind != ModuleKind::kLibrary && loading->context == nullptr) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (loading->pulls.empty()) {
    Submit(worker, loading);
    return kDeferred;
  }
  auto region = worker.connection().Register(base, total, transport::Access::kPeerReadsAndWrites);
  if (!region) {
    LOG_ERROR("module", "%s", region.error().message.c_str());
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  loading->region = std::move(*region);
  PullMore(worker, loading);
  return kDeferred;
}

}  // namespace

CUresult ServeLoadModule(CallContext& call, Reader& reader) {
  auto loading = std::make_shared<Loading>(call.worker());
  const LoadModuleCommand& command = loading->command;
  if (!reader.Take(&loading->command) ||
      (command.kind != ModuleKind::kModule && command.kind != ModuleKind::kLibrary)) {
    return call.Malformed("A module load is malformed.");
  }
  return ServeCode(call, reader, loading, 0);
}

CUresult ServeLinkAdd(CallContext& call, Reader& reader) {
  auto loading = std::make_shared<Loading>(call.worker());
  LinkAddCommand command;
  if (!reader.Take(&command) || command.load.kind != ModuleKind::kLinkInput ||
      command.load.part_count != 1 || command.load.format == ImageFormat::kWrapper ||
      command.load.format == ImageFormat::kWrapperV2) {
    return call.Malformed("An input of a link is malformed.");
  }
  HandleTable<LinkRecord>& links = call.worker().objects().links;
  LinkRecord* const record = links.Find(Handle{command.load.handle});
  if (record == nullptr) {
    return links.WasMinted(Handle{command.load.handle})
               ? CUDA_ERROR_INVALID_HANDLE
               : call.Malformed("A call names a link that was never made.");
  }
  loading->command = command.load;
  loading->link = record->link;
  loading->input_type = static_cast<CUjitInputType>(command.type);
  return ServeCode(call, reader, loading, command.name_bytes);
}

CUresult ServeGetFunction(CallContext& call, Reader& reader) {
  GetFunctionCommand command;
  std::string_view name_view;
  if (!reader.Take(&command) || command.name_bytes > kMaxNameBytes ||
      !reader.TakeString(command.name_bytes, &name_view) || !reader.AtEnd()) {
    return call.Malformed("A function lookup is malformed.");
  }
  const std::string name(name_view.substr(0, name_view.find('\0')));
  const Handle handle{command.handle};
  FunctionRecord record;
  record.owner = Handle{command.owner};
  CUresult result;
  if (handle.kind() == HandleKind::kKernel) {
    CUlibrary library;
    if (!call.Library(command.owner, &library)) return call.error();
    result = call.driver().cuLibraryGetKernel(&record.kernel, library, name.c_str());
  } else {
    CUmodule module;
    if (!call.Module(command.owner, &module)) return call.error();
    result = call.driver().cuModuleGetFunction(&record.function, module, name.c_str());
  }
  if (result != CUDA_SUCCESS) return result;
  FunctionInfo info = {};
  std::vector<KernelParameter> parameters;
  result = Describe(call, record, &info, &parameters);
  Worker& worker = call.worker();
  if (result == CUDA_ERROR_INVALID_CONTEXT && worker.current() == nullptr) {
    // The runtime asks for kernels before it has a context; a driver that answers only in one gets
    // that of the first device.
    result = worker.RetainPrimary(0);
    if (result == CUDA_SUCCESS) result = worker.MakeCurrent(worker.objects().primaries[0]);
    info = {};
    parameters.clear();
    if (result == CUDA_SUCCESS) result = Describe(call, record, &info, &parameters);
  }
  if (result != CUDA_SUCCESS) return result;
  Objects& objects = worker.objects();
  auto& table = handle.kind() == HandleKind::kKernel ? objects.kernels : objects.functions;
  if (!table.Adopt(handle, std::move(record))) {
    return call.Malformed("A function is looked up under an impossible handle.");
  }
  call.reply().Put(info);
  call.reply().PutSection(parameters.data(), parameters.size() * sizeof(KernelParameter));
  return CUDA_SUCCESS;
}

CUresult ServeListFunctions(CallContext& call, Reader& reader) {
  ListFunctionsCommand command;
  if (!reader.Take(&command) || !reader.AtEnd()) {
    return call.Malformed("A list of functions is malformed.");
  }
  const Driver& driver = call.driver();
  std::vector<std::string> names;
  // What it has, and what each is called, with the functions of modules or of libraries.
  const auto list = [&](auto owner, auto count_of, auto enumerate, auto name_of, auto none) {
    unsigned count = 0;
    CUresult result = count_of(&count, owner);
    std::vector<decltype(none)> all(count);
    if (result == CUDA_SUCCESS && count > 0) result = enumerate(all.data(), count, owner);
    for (const auto one : all) {
      const char* name = nullptr;
      if (result == CUDA_SUCCESS) result = name_of(&name, one);
      if (result == CUDA_SUCCESS) names.emplace_back(name);
    }
    return result;
  };
  CUresult result;
  if (Handle{command.owner}.kind() == HandleKind::kLibrary) {
    CUlibrary library;
    if (!call.Library(command.owner, &library)) return call.error();
    result = list(library, driver.cuLibraryGetKernelCount, driver.cuLibraryEnumerateKernels,
                  driver.cuKernelGetName, CUkernel{});
  } else {
    CUmodule module;
    if (!call.Module(command.owner, &module)) return call.error();
    result = list(module, driver.cuModuleGetFunctionCount, driver.cuModuleEnumerateFunctions,
                  driver.cuFuncGetName, CUfunction{});
  }
  if (result != CUDA_SUCCESS) return result;
  ListFunctionsReply reply{};
  reply.total = static_cast<uint32_t>(names.size());
  std::string text;
  for (size_t i = command.first; i < names.size(); ++i) {
    if (text.size() + names[i].size() + 64 > call.reply().left()) break;
    text.append(names[i].c_str(), names[i].size() + 1);
    ++reply.listed;
  }
  reply.bytes = static_cast<uint32_t>(text.size());
  call.reply().Put(reply);
  call.reply().PutString(text);
  return CUDA_SUCCESS;
}

CUresult ServeCuModuleGetGlobal(CallContext& call, const commands::CuModuleGetGlobal& command,
                                Reader& rest) {
  std::string_view name;
  CUmodule module;
  if (!rest.TakeString(command.name_bytes, &name) || !rest.AtEnd()) {
    return call.Malformed("cuModuleGetGlobal has an impossible name.");
  }
  if (!call.Module(command.hmod, &module)) return call.error();
  const Handle owner{command.hmod};
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string text(name.substr(0, name.find('\0')));
  const CUresult result =
      call.driver().cuModuleGetGlobal_v2(&address, &bytes, module, text.c_str());
  return FoundVariable<commands::CuModuleGetGlobalReply>(
      call, result, address, bytes, owner, call.worker().objects().modules.Find(owner)->context);
}

CUresult ServeCuLibraryGetGlobal(CallContext& call, const commands::CuLibraryGetGlobal& command,
                                 Reader& rest) {
  std::string_view name;
  CUlibrary library;
  if (!rest.TakeString(command.name_bytes, &name) || !rest.AtEnd()) {
    return call.Malformed("cuLibraryGetGlobal has an impossible name.");
  }
  if (!call.Library(command.library, &library)) return call.error();
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const std::string text(name.substr(0, name.find('\0')));
  const CUresult result = call.driver().cuLibraryGetGlobal(&address, &bytes, library, text.c_str());
  const auto& context = call.worker().current();
  return FoundVariable<commands::CuLibraryGetGlobalReply>(
      call, result, address, bytes, Handle{command.library},
      context == nullptr ? Handle{} : context->handle);
}

CUresult ServeCuLibraryUnload(CallContext& call, const commands::CuLibraryUnload& command,
                              Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuLibraryUnload is followed by something.");
  CUlibrary library;
  if (!call.Library(command.library, &library)) return call.error();
  Worker& worker = call.worker();
  Objects& objects = worker.objects();
  const Handle handle{command.library};
  const auto record = objects.libraries.Remove(handle);
  std::vector<Handle> kernels;
  objects.kernels.ForEach([&](Handle kernel, const FunctionRecord& candidate) {
    if (candidate.owner == handle) kernels.push_back(kernel);
  });
  for (Handle kernel : kernels) objects.kernels.Remove(kernel);
  worker.allocations().RemoveIf(
      [handle](const Allocation& range) { return range.owner == handle; });
  // It may wait for the devices, as a module's end does; the image lives until the driver is done.
  const ReplyToken token = call.token();
  auto result = std::make_shared<CUresult>(CUDA_SUCCESS);
  worker.executor().Run(
      [&worker, library, result] { *result = worker.driver().cuLibraryUnload(library); },
      [&worker, token, result, image = record->image] { worker.Answer(token, *result); });
  return kDeferred;
}

}  // namespace penstock::server
