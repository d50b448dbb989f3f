// Copies. Those that touch client memory are transfers; the others stay on the device.
#include "custom_server.gen.h"
#include "protocol/operations.h"
#include "server/worker/operations.h"
#include "server/worker/worker.h"

namespace penstock::server {

namespace {

CUresult Upload(CallContext& call, Reader& reader, const UploadCommand& command,
                const VolumeShape& volume) {
  std::span<const std::byte> bytes;
  const bool known = command.place == HostPlace::kInline || command.place == HostPlace::kStaged ||
                     command.place == HostPlace::kRegion || command.place == HostPlace::kBounced;
  if (!known || command.reply_when > ReplyWhen::kDone) {
    return call.Malformed("An upload has an unknown place or reply.");
  }
  if (command.place == HostPlace::kInline) {
    if (command.width > kMaxInlineCopyBytes || command.height > kMaxInlineCopyBytes ||
        volume.depth > kMaxInlineCopyBytes ||
        !reader.TakeSection(command.width * command.height * volume.depth, &bytes)) {
      return call.Malformed("An upload has fewer bytes than it says.");
    }
  }
  if (!reader.AtEnd()) return call.Malformed("An upload is followed by something.");
  return call.worker().transfers().Upload(call, command, volume, bytes);
}

CUresult Download(CallContext& call, Reader& reader, const DownloadCommand& command,
                  const VolumeShape& volume) {
  if (!reader.AtEnd()) return call.Malformed("A download is followed by something.");
  const bool known = command.place == HostPlace::kInline || command.place == HostPlace::kRegion ||
                     command.place == HostPlace::kBounced;
  if (!known || command.reply_when > ReplyWhen::kDone) {
    return call.Malformed("A download has an unknown place or reply.");
  }
  return call.worker().transfers().Download(call, command, volume);
}

}  // namespace

CUresult ServeUpload(CallContext& call, Reader& reader) {
  UploadCommand command;
  if (!reader.Take(&command)) return call.Malformed("An upload is too short.");
  return Upload(call, reader, command, {1, command.height, command.height});
}

CUresult ServeUploadVolume(CallContext& call, Reader& reader) {
  UploadVolumeCommand command;
  if (!reader.Take(&command)) return call.Malformed("An upload of a volume is too short.");
  return Upload(call, reader, command.rows, command.volume);
}

CUresult ServeDownload(CallContext& call, Reader& reader) {
  DownloadCommand command;
  if (!reader.Take(&command)) return call.Malformed("A download is too short.");
  return Download(call, reader, command, {1, command.height, command.height});
}

CUresult ServeDownloadVolume(CallContext& call, Reader& reader) {
  DownloadVolumeCommand command;
  if (!reader.Take(&command)) return call.Malformed("A download of a volume is too short.");
  return Download(call, reader, command.rows, command.volume);
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

CUresult ServeCuMemcpy3DAsync(CallContext& call, const commands::CuMemcpy3DAsync& command,
                              Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemcpy3DAsync is followed by something.");
  CUstream stream;
  if (!call.Stream(command.stream, &stream) ||
      !call.DeviceRange3D(command.dst, command.dst_pitch, command.dst_rows, command.width,
                          command.height, command.depth) ||
      !call.DeviceRange3D(command.src, command.src_pitch, command.src_rows, command.width,
                          command.height, command.depth)) {
    return call.error();
  }
  CUDA_MEMCPY3D_PEER copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = command.src;
  copy.srcPitch = command.src_pitch;
  copy.srcHeight = command.src_rows;
  copy.dstDevice = command.dst;
  copy.dstPitch = command.dst_pitch;
  copy.dstHeight = command.dst_rows;
  copy.WidthInBytes = command.width;
  copy.Height = command.height;
  copy.Depth = command.depth;
  // Without contexts it is a copy of the current one.
  uint64_t contexts[] = {command.dst_context, command.src_context};
  for (uint64_t& context : contexts) {
    if (context == 0 && call.worker().current() != nullptr) {
      context = call.worker().current()->handle.bits;
    }
  }
  if (!call.Context(contexts[0], &copy.dstContext) ||
      !call.Context(contexts[1], &copy.srcContext)) {
    return call.error();
  }
  return call.driver().cuMemcpy3DPeerAsync(&copy, stream);
}

}  // namespace penstock::server
