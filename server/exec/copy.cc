// Copies. Those that touch client memory are transfers; the others stay on the device.
#include "custom_server.gen.h"
#include "protocol/operations.h"
#include "server/worker/operations.h"
#include "server/worker/worker.h"

namespace penstock::server {

CUresult ServeUpload(CallContext& call, Reader& reader) {
  UploadCommand command;
  std::span<const std::byte> bytes;
  if (!reader.Take(&command)) return call.Malformed("An upload is too short.");
  const bool known = command.place == HostPlace::kInline || command.place == HostPlace::kStaged ||
                     command.place == HostPlace::kRegion || command.place == HostPlace::kBounced;
  if (!known || command.reply_when > ReplyWhen::kDone) {
    return call.Malformed("An upload has an unknown place or reply.");
  }
  if (command.place == HostPlace::kInline) {
    if (command.width > kMaxInlineCopyBytes || command.height > kMaxInlineCopyBytes ||
        !reader.TakeSection(command.width * command.height, &bytes)) {
      return call.Malformed("An upload has fewer bytes than it says.");
    }
  }
  if (!reader.AtEnd()) return call.Malformed("An upload is followed by something.");
  return call.worker().transfers().Upload(call, command, bytes);
}

CUresult ServeDownload(CallContext& call, Reader& reader) {
  DownloadCommand command;
  if (!reader.Take(&command) || !reader.AtEnd()) {
    return call.Malformed("A download has an impossible size.");
  }
  const bool known = command.place == HostPlace::kInline || command.place == HostPlace::kRegion ||
                     command.place == HostPlace::kBounced;
  if (!known || command.reply_when > ReplyWhen::kDone) {
    return call.Malformed("A download has an unknown place or reply.");
  }
  return call.worker().transfers().Download(call, command);
}

CUresult ServeBounceDone(CallContext& call, Reader& reader) {
  BounceDoneCommand command;
  if (!reader.Take(&command) || !reader.AtEnd() || call.token().needed) {
    return call.Malformed("The answer to a bounce piece is malformed.");
  }
  if (!call.worker().bounce().OnDone(command.call, command.slot)) {
    return call.Malformed("A bounce slot comes back that the client does not have.");
  }
  return CUDA_SUCCESS;
}

CUresult ServeCuMemcpy2DAsync(CallContext& call, const commands::CuMemcpy2DAsync& command,
                              Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemcpy2DAsync is followed by something.");
  CUstream stream;
  if (!call.Stream(command.stream, &stream) ||
      !call.DeviceRange2D(command.dst, command.dst_pitch, command.width, command.height) ||
      !call.DeviceRange2D(command.src, command.src_pitch, command.width, command.height)) {
    return call.error();
  }
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = command.src;
  copy.srcPitch = command.src_pitch;
  copy.dstDevice = command.dst;
  copy.dstPitch = command.dst_pitch;
  copy.WidthInBytes = command.width;
  copy.Height = command.height;
  return call.driver().cuMemcpy2DAsync_v2(&copy, stream);
}

}  // namespace penstock::server
