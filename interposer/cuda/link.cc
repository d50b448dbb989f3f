// Linking at run time. The link lives at the server; its inputs travel as code does, and what comes
// out is kept here for as long as the link lives, because the program gets its address.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/client.h"
#include "interposer/core/session.h"
#include "interposer/cuda/module.h"

namespace penstock::interposer {
namespace {

LinkRecord* Find(Call& call, CUlinkState state) {
  if (!call.ready()) return nullptr;
  LinkRecord* const record = call.objects().links.Find(Handle{reinterpret_cast<uint64_t>(state)});
  if (record == nullptr) {
    call.Refuse(CUDA_ERROR_INVALID_HANDLE);
    return nullptr;
  }
  return call.Bind(record->context, CUDA_ERROR_INVALID_HANDLE) ? record : nullptr;
}

// Where the link's logs go, with the options of one input.
LoadOptions WithLogsOf(const LinkRecord& link, std::vector<JitOption> scalars) {
  LoadOptions options;
  options.scalars = std::move(scalars);
  options.info_log = link.info_log;
  options.error_log = link.error_log;
  options.info_bytes = link.info_bytes;
  options.error_bytes = link.error_bytes;
  options.info_used = link.info_used;
  options.error_used = link.error_used;
  return options;
}

CUresult Add(Call& call, const LinkRecord& link, CUjitInputType type, const void* data, size_t size,
             const char* name, unsigned count, CUjit_option* options, void** values) {
  LoadOptions read;
  if (!call.Out(data) || !ReadJitOptions(call, count, options, values, &read)) {
    return call.result();
  }
  if (size == 0 || type >= CU_JIT_NUM_INPUT_TYPES) return CUDA_ERROR_INVALID_VALUE;
  if (size > kMaxModuleBytes) return CUDA_ERROR_INVALID_IMAGE;
  LinkAddCommand command{};
  command.load.handle = link.handle.bits;
  command.load.kind = ModuleKind::kLinkInput;
  command.type = static_cast<uint32_t>(type);
  const std::string_view text(name == nullptr ? "" : name);
  if (text.size() > kMaxNameBytes) return CUDA_ERROR_INVALID_VALUE;
  command.name_bytes = static_cast<uint32_t>(text.size());
  // As it is: what kind of code it is, the type says.
  const Image image{ImageFormat::kElf, {{data, size}}};
  return SendCode(call, {Operation::kLinkAdd, &command.load, sizeof command, text}, image,
                  WithLogsOf(link, std::move(read.scalars)));
}

}  // namespace

CUresult CuLinkCreate(unsigned int count, CUjit_option* options, void** values,
                      CUlinkState* state) {
  Call call(Function::kCuLinkCreate, Call::kContext);
  LoadOptions read;
  if (!call.ready() || !call.Out(state) || !ReadJitOptions(call, count, options, values, &read)) {
    return call.result();
  }
  LinkRecord* const record = call.objects().links.Mint([&](LinkRecord& made, Handle) {
    made.context = &call.context();
    made.info_log = read.info_log;
    made.error_log = read.error_log;
    made.info_bytes = read.info_bytes;
    made.error_bytes = read.error_bytes;
    made.info_used = read.info_used;
    made.error_used = read.error_used;
  });
  if (record == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  LinkCreateCommand command{};
  command.handle = record->handle.bits;
  command.option_count = static_cast<uint32_t>(read.scalars.size());
  command.info_log_bytes = std::min(read.info_bytes, kMaxJitLogBytes);
  command.error_log_bytes = std::min(read.error_bytes, kMaxJitLogBytes);
  const std::span<const std::byte> section = std::as_bytes(std::span(read.scalars));
  const CUresult result = call.InvokeBytes(static_cast<uint32_t>(Operation::kLinkCreate), &command,
                                           sizeof command, {&section, 1}, nullptr, 0, nullptr);
  if (result != CUDA_SUCCESS) {
    call.objects().links.Remove(record->handle);
    return result;
  }
  *state = reinterpret_cast<CUlinkState>(record->handle.bits);
  return CUDA_SUCCESS;
}

CUresult CuLinkAddData(CUlinkState state, CUjitInputType type, void* data, size_t size,
                       const char* name, unsigned int count, CUjit_option* options, void** values) {
  Call call(Function::kCuLinkAddData, Call::kContext);
  const LinkRecord* const link = Find(call, state);
  if (link == nullptr) return call.result();
  return Add(call, *link, type, data, size, name, count, options, values);
}

CUresult CuLinkAddFile(CUlinkState state, CUjitInputType type, const char* path, unsigned int count,
                       CUjit_option* options, void** values) {
  Call call(Function::kCuLinkAddFile, Call::kContext);
  const LinkRecord* const link = Find(call, state);
  std::vector<char> content;
  if (link == nullptr || !call.Out(path) || !ReadFile(call, path, &content)) return call.result();
  // Text ends with the NUL behind it.
  const size_t size = content.size() - (type == CU_JIT_INPUT_PTX ? 0 : 1);
  return Add(call, *link, type, content.data(), size, path, count, options, values);
}

CUresult CuLinkComplete(CUlinkState state, void** image, size_t* size) {
  Call call(Function::kCuLinkComplete, Call::kContext);
  LinkRecord* const link = Find(call, state);
  if (link == nullptr || !call.Out(image)) return call.result();
  LinkCommand command{link->handle.bits};
  LinkCompleteReply reply{};
  std::vector<std::byte> tail;
  CUresult result = call.InvokeBytes(static_cast<uint32_t>(Operation::kLinkComplete), &command,
                                     sizeof command, {}, &reply, sizeof reply, &tail);
  GiveLogs(WithLogsOf(*link, {}), reply.logs, tail);
  if (result != CUDA_SUCCESS) return result;
  if (reply.bytes > kMaxModuleBytes) return CUDA_ERROR_UNKNOWN;
  // Text that comes out without its NUL gets one.
  link->image.assign(reply.bytes + 1, std::byte{0});
  for (uint64_t offset = 0; offset < reply.bytes;) {
    LinkReadCommand read{};
    read.handle = link->handle.bits;
    read.offset = offset;
    read.bytes = static_cast<uint32_t>(std::min<uint64_t>(kMaxLinkReadBytes, reply.bytes - offset));
    result = call.InvokeInto(static_cast<uint32_t>(Operation::kLinkRead), &read, sizeof read,
                             std::span(link->image).subspan(offset, read.bytes));
    if (result != CUDA_SUCCESS) return result;
    offset += read.bytes;
  }
  *image = link->image.data();
  if (size != nullptr) *size = reply.bytes;
  return CUDA_SUCCESS;
}

CUresult CuLinkDestroy(CUlinkState state) {
  Call call(Function::kCuLinkDestroy, Call::kContext);
  LinkRecord* const link = Find(call, state);
  if (link == nullptr) return call.result();
  const LinkCommand command{link->handle.bits};
  if (!call.objects().links.Remove(link->handle)) return CUDA_ERROR_INVALID_HANDLE;
  return call.PostBytes(static_cast<uint32_t>(Operation::kLinkDestroy), &command, sizeof command,
                        {}, 0);
}

}  // namespace penstock::interposer
