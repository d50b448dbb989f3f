// Linking at run time: making, completing and reading. An input is code like any other, so
// module.cc adds it.
#include "server/exec/link.h"

#include <cstring>

#include "server/worker/operations.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

std::shared_ptr<Link> Find(CallContext& call, uint64_t handle, CUresult* error) {
  LinkRecord* const record = call.worker().objects().links.Find(Handle{handle});
  if (record != nullptr) return record->link;
  *error = call.worker().objects().links.WasMinted(Handle{handle})
               ? CUDA_ERROR_INVALID_HANDLE
               : call.Malformed("A call names a link that was never made.");
  return nullptr;
}

}  // namespace

bool OptionIsScalar(const JitOption& option) {
  switch (option.option) {
    case CU_JIT_INFO_LOG_BUFFER:
    case CU_JIT_ERROR_LOG_BUFFER:
    case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_GLOBAL_SYMBOL_NAMES:
    case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
    case CU_JIT_REFERENCED_KERNEL_NAMES:
    case CU_JIT_REFERENCED_VARIABLE_NAMES:
      return false;
    default:
      return option.is_library_option == 0;
  }
}

CUresult ServeLinkCreate(CallContext& call, Reader& reader) {
  LinkCreateCommand command;
  std::span<const JitOption> options;
  if (!reader.Take(&command) || command.info_log_bytes > kMaxJitLogBytes ||
      command.error_log_bytes > kMaxJitLogBytes ||
      !reader.TakeArray(command.option_count, kMaxJitOptions, &options) || !reader.AtEnd()) {
    return call.Malformed("The making of a link is malformed.");
  }
  const auto context = call.worker().current();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  auto link = std::make_shared<Link>(call.driver());
  const auto add = [&](CUjit_option name, uint64_t value) {
    link->names.push_back(name);
    link->values.push_back(reinterpret_cast<void*>(value));
  };
  for (const JitOption& option : options) {
    if (!OptionIsScalar(option))
      return call.Malformed("A link has an option that holds an address.");
    add(static_cast<CUjit_option>(option.option), option.value);
  }
  // Logs share a reply's frame.
  const auto log = [&](std::string* text, uint32_t bytes, CUjit_option buffer, CUjit_option size) {
    if (bytes == 0) return;
    text->assign(std::min(bytes, kMaxJitLogBytes / 2), '\0');
    add(buffer, reinterpret_cast<uint64_t>(text->data()));
    add(size, text->size());
  };
  log(&link->info_log, command.info_log_bytes, CU_JIT_INFO_LOG_BUFFER,
      CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES);
  log(&link->error_log, command.error_log_bytes, CU_JIT_ERROR_LOG_BUFFER,
      CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
  const CUresult result =
      call.driver().cuLinkCreate_v2(static_cast<unsigned>(link->names.size()), link->names.data(),
                                    link->values.data(), &link->state);
  if (result != CUDA_SUCCESS) return result;
  LinkRecord record;
  record.link = std::move(link);
  record.context = context->handle;
  return call.worker().objects().links.Adopt(Handle{command.handle}, std::move(record))
             ? CUDA_SUCCESS
             : call.Malformed("A link is made under an impossible handle.");
}

CUresult ServeLinkComplete(CallContext& call, Reader& reader) {
  LinkCommand command;
  if (!reader.Take(&command) || !reader.AtEnd() || !call.token().needed) {
    return call.Malformed("The end of a link is malformed.");
  }
  CUresult error = CUDA_SUCCESS;
  const auto link = Find(call, command.handle, &error);
  if (link == nullptr) return error;
  Worker& worker = call.worker();
  const auto context = worker.current();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const auto result = std::make_shared<CUresult>(CUDA_SUCCESS);
  link->complete = false;
  worker.executor().Run(
      [link, context, result] {
        void* image = nullptr;
        size_t bytes = 0;
        *result = link->driver.cuCtxSetCurrent(context->context);
        if (*result == CUDA_SUCCESS) {
          *result = link->driver.cuLinkComplete(link->state, &image, &bytes);
        }
        if (*result != CUDA_SUCCESS) return;
        if (bytes > kMaxModuleBytes) {
          *result = CUDA_ERROR_OUT_OF_MEMORY;
          return;
        }
        link->image.assign(static_cast<const char*>(image), bytes);
      },
      [&worker, link, result, token = call.token()] {
        link->complete = *result == CUDA_SUCCESS;
        const std::string info = TextOf(link->info_log), errors = TextOf(link->error_log);
        LinkCompleteReply reply{};
        reply.logs = {static_cast<uint32_t>(info.size()), static_cast<uint32_t>(errors.size())};
        reply.bytes = *result == CUDA_SUCCESS ? link->image.size() : 0;
        std::vector<std::byte> body(kMaxFrameBytes - sizeof(FrameHeader));
        Writer writer(body);
        writer.Put(reply);
        writer.PutString(info);
        writer.PutString(errors);
        worker.Answer(token, *result, std::span(body).first(writer.used()));
      });
  return kDeferred;
}

CUresult ServeLinkRead(CallContext& call, Reader& reader) {
  LinkReadCommand command;
  if (!reader.Take(&command) || !reader.AtEnd() || command.bytes > kMaxLinkReadBytes) {
    return call.Malformed("A read of a link's result is malformed.");
  }
  CUresult error = CUDA_SUCCESS;
  const auto link = Find(call, command.handle, &error);
  if (link == nullptr) return error;
  if (!link->complete || command.offset > link->image.size() ||
      command.bytes > link->image.size() - command.offset) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  call.reply().PutSection(link->image.data() + command.offset, command.bytes);
  return CUDA_SUCCESS;
}

CUresult ServeLinkDestroy(CallContext& call, Reader& reader) {
  LinkCommand command;
  if (!reader.Take(&command) || !reader.AtEnd()) {
    return call.Malformed("The destroying of a link is malformed.");
  }
  CUresult error = CUDA_SUCCESS;
  if (Find(call, command.handle, &error) == nullptr) return error;
  call.worker().objects().links.Remove(Handle{command.handle});
  return CUDA_SUCCESS;
}

}  // namespace penstock::server
