// Copies between host and device.
//
// What decides is where the host side lies and who has to wait:
//
//   upload, small               inline in the call's frame, posted
//     pageable                  copied into a staging slot, posted
//     pageable, > a slot        registered for the time of the call, and pulled from where it is.
//                               Where registering is dear, through the bounce slots
//     pinned                    pulled from where it is: posted if asynchronous
//   download, pinned and async  pushed to where it belongs, posted
//     small                     comes in the reply
//     else                      pushed, and the reply comes after it: to where it belongs, or,
//     where
//                               registering is dear and the memory is pageable, through the bounce
//                               slots
//
// A download into pageable memory is complete on return, for the asynchronous functions as well.
//
// A synchronous upload that was only posted must still look synchronous: core/call.cc says when
// that is so. On a per-thread stream, which nothing else waits for, a synchronous upload is a call.
#include <algorithm>
#include <cstring>

#include "commands.gen.h"
#include "common/log.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"
#include "interposer/cuda/copy.h"
#include "interposer/cuda/rows.h"

namespace penstock::interposer {
namespace {

void SetKey(WireMemoryKey* wire, const transport::MemoryKey& key) {
  static_assert(sizeof *wire == sizeof key);
  memcpy(wire, &key, sizeof key);
}

// The host side of a copy that the server moves itself: pinned memory, or a registration for the
// time of the call.
struct Region {
  std::shared_ptr<HostAllocation> pinned;
  std::unique_ptr<transport::MemoryRegion> temporary;

  bool Describe(Call& call, const HostRows& rows, uint64_t extent, transport::Access access,
                WireMemoryKey* key, uint64_t* offset) {
    if (pinned != nullptr) {
      auto region = pinned->RegionFor(call.session().connection(), call.session().index());
      if (!region) {
        LOG_ERROR("memory", "Cannot register pinned memory (%zu bytes) for a server: %s",
                  pinned->bytes, region.error().message.c_str());
        return call.Refuse(CUDA_ERROR_OUT_OF_MEMORY);
      }
      SetKey(key, (*region)->key());
      *offset = static_cast<uint64_t>(rows.first - pinned->base);
      return true;
    }
    auto region = call.session().connection().Register(rows.first, extent, access);
    if (!region) {
      LOG_ERROR("memory", "Cannot register the host side of a copy (%llu bytes): %s",
                static_cast<unsigned long long>(extent), region.error().message.c_str());
      return call.Refuse(CUDA_ERROR_OUT_OF_MEMORY);
    }
    temporary = std::move(*region);
    SetKey(key, temporary->key());
    *offset = 0;
    return true;
  }
};

// The same through the bounce slots: the rows, as if they followed each other without gaps.
class BouncedRows final : public BouncedBytes {
 public:
  BouncedRows(Call& call, const HostRows& rows, const Shape& shape, bool fills)
      : BouncedBytes(call.session(), call.thread().index, fills, shape.width * shape.rows()),
        rows_(rows),
        shape_(shape),
        fills_(fills) {}

 private:
  void Move(uint64_t offset, std::span<std::byte> slot) override {
    uint64_t row = offset / shape_.width, column = offset % shape_.width;
    while (!slot.empty()) {
      const uint64_t bytes = std::min<uint64_t>(shape_.width - column, slot.size());
      std::byte* const host = rows_.row(shape_, row) + column;
      memcpy(fills_ ? slot.data() : host, fills_ ? host : slot.data(), bytes);
      slot = slot.subspan(bytes);
      ++row;
      column = 0;
    }
  }

  const HostRows rows_;
  const Shape shape_;
  const bool fills_;
};

// What is sent of an upload or download: of several slices, another operation that says more.
template <typename VolumeCommand>
struct Request {
  VolumeCommand command{};
  uint32_t function;
  size_t bytes;

  Request(Operation rows, Operation volume, const Shape& shape, const DeviceRows& device,
          const HostRows& host) {
    const bool slices = shape.depth > 1;
    function = static_cast<uint32_t>(slices ? volume : rows);
    bytes = slices ? sizeof command : sizeof command.rows;
    command.volume = {shape.depth, device.slice_rows, host.slice_rows};
  }
  void PackHost(const Shape& shape) {
    command.rows.host_pitch = shape.width;
    command.volume.host_rows = shape.height;
  }
};

// call.Stream() has been asked; `stream` is its wire value.
bool OnDevice(Call& call, const DeviceRows& rows, const Shape& shape) {
  if (shape.depth == 1) {
    return call.DeviceRange2D(rows.first, rows.pitch, shape.width, shape.height);
  }
  uint64_t extent = 0, total = 0;
  if (!Extent(shape, rows.pitch, rows.slice_rows, &extent, &total)) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  return call.DeviceRange(rows.first, extent);
}

CUresult Upload(Call& call, uint64_t stream, const DeviceRows& target, const HostRows& source,
                const Shape& shape, bool asynchronous) {
  if (shape.empty()) return CUDA_SUCCESS;
  uint64_t extent = 0, total = 0;
  if (!call.Out(source.first) || !OnDevice(call, target, shape)) return call.result();
  if (!Extent(shape, source.pitch, source.slice_rows, &extent, &total)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Session& session = call.session();
  // Device memory given as host memory would fault here; with a local driver it is refused.
  if (call.objects().plan.IsDevice(reinterpret_cast<uint64_t>(source.first))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Posting a synchronous copy is possible where its stream orders it before what comes next.
  const bool may_post = (asynchronous || call.MayPostUpload()) && !session.synchronous();

  Request<UploadVolumeCommand> request(Operation::kUpload, Operation::kUploadVolume, shape, target,
                                       source);
  UploadCommand& command = request.command.rows;
  command.target = target.first;
  command.stream = stream;
  command.width = shape.width;
  command.height = shape.height;
  command.target_pitch = PitchOf(shape, target.pitch);
  command.reply_when = may_post ? ReplyWhen::kNever : ReplyWhen::kDone;
  const auto send = [&](std::span<const std::span<const std::byte>> sections, uint32_t cost) {
    if (!may_post) {
      ContextRecord& context = call.context();
      const uint64_t orphans = context.orphans;
      const CUresult result = call.InvokeBytes(request.function, &request.command, request.bytes,
                                               sections, nullptr, 0, nullptr);
      // Through the legacy stream it has come after all of them.
      if (result == CUDA_SUCCESS && stream == kLegacyStream.bits) context.orphans_done = orphans;
      return result;
    }
    const CUresult result =
        call.PostBytes(request.function, &request.command, request.bytes, sections, cost);
    if (!asynchronous && result == CUDA_SUCCESS) call.UploadPosted();
    return result;
  };

  if (total <= kMaxInlineCopyBytes && session.options().inline_copies) {
    command.place = HostPlace::kInline;
    request.PackHost(shape);
    const std::byte* data = source.first;
    if (shape.rows() > 1) {
      call.thread().scratch.resize(total);
      Pack(call.thread().scratch.data(), source, shape);
      data = call.thread().scratch.data();
    }
    const std::span<const std::byte> section(data, total);
    return send({&section, 1}, 1);
  }

  Region region;
  region.pinned = call.objects().plan.FindHost(source.first, extent);
  if (region.pinned == nullptr && total <= kLargeStagingBytes && session.options().staging) {
    StagingSlot slot;
    if (!session.TakeStaging(total, &slot)) {
      const CUresult state = session.state();
      return state != CUDA_SUCCESS ? state : CUDA_ERROR_OUT_OF_MEMORY;
    }
    Pack(slot.memory.data(), source, shape);
    session.counters().bulk_copies.fetch_add(total, std::memory_order_relaxed);
    session.counters().bulk_sent.fetch_add(total, std::memory_order_relaxed);
    command.place = HostPlace::kStaged;
    command.slot = slot.index;
    command.offset = slot.offset;
    request.PackHost(shape);
    SetKey(&command.key, slot.key);
    return send({}, kGatedCopyCost);
  }

  // The program's own memory: hold it until it has been read, or, if the copy is synchronous, done.
  const ReplyWhen when_free = asynchronous ? ReplyWhen::kPulled : ReplyWhen::kDone;
  if (transport::MemoryKey key;
      region.pinned == nullptr && session.bounces() && session.bounce().Key(&key)) {
    command.place = HostPlace::kBounced;
    request.PackHost(shape);
    command.reply_when = when_free;
    SetKey(&command.key, key);
    BouncedRows rows(call, source, shape, true);
    return call.InvokeBytes(request.function, &request.command, request.bytes, {}, nullptr, 0,
                            nullptr, &rows);
  }

  command.place = HostPlace::kRegion;
  command.host_pitch = PitchOf(shape, source.pitch);
  if (!region.Describe(call, source, extent, transport::Access::kPeerReads, &command.key,
                       &command.offset)) {
    return call.result();
  }
  session.counters().bulk_sent.fetch_add(total, std::memory_order_relaxed);
  if (asynchronous && region.pinned != nullptr && may_post) {
    const CUresult result = send({}, kGatedCopyCost);
    if (result == CUDA_SUCCESS) {
      call.objects().plan.NoteUse(*region.pinned, call.stream(), call.issued());
    }
    return result;
  }
  command.reply_when = when_free;
  return call.InvokeBytes(request.function, &request.command, request.bytes, {}, nullptr, 0,
                          nullptr);
}

CUresult Download(Call& call, uint64_t stream, const HostRows& target, const DeviceRows& source,
                  const Shape& shape, bool asynchronous) {
  if (shape.empty()) return CUDA_SUCCESS;
  uint64_t extent = 0, total = 0;
  if (!call.Out(target.first) || !OnDevice(call, source, shape)) return call.result();
  if (!Extent(shape, target.pitch, target.slice_rows, &extent, &total)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Session& session = call.session();
  if (call.objects().plan.IsDevice(reinterpret_cast<uint64_t>(target.first))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Request<DownloadVolumeCommand> request(Operation::kDownload, Operation::kDownloadVolume, shape,
                                         source, target);
  DownloadCommand& command = request.command.rows;
  command.source = source.first;
  command.stream = stream;
  command.width = shape.width;
  command.height = shape.height;
  command.source_pitch = PitchOf(shape, source.pitch);
  command.host_pitch = PitchOf(shape, target.pitch);
  command.reply_when = ReplyWhen::kDone;

  Region region;
  region.pinned = call.objects().plan.FindHost(target.first, extent);
  const bool post = asynchronous && region.pinned != nullptr && !session.synchronous();
  if (!post && total <= kMaxInlineCopyBytes && session.options().inline_copies) {
    command.place = HostPlace::kInline;
    if (shape.rows() == 1) {
      return call.InvokeInto(request.function, &request.command, request.bytes,
                             {target.first, total});
    }
    call.thread().scratch.resize(total);
    const CUresult result = call.InvokeInto(request.function, &request.command, request.bytes,
                                            {call.thread().scratch.data(), total});
    if (result == CUDA_SUCCESS) Unpack(target, call.thread().scratch.data(), shape);
    return result;
  }

  if (transport::MemoryKey key;
      region.pinned == nullptr && session.bounces() && session.bounce().Key(&key)) {
    command.place = HostPlace::kBounced;
    request.PackHost(shape);
    SetKey(&command.key, key);
    BouncedRows rows(call, target, shape, false);
    return call.InvokeBytes(request.function, &request.command, request.bytes, {}, nullptr, 0,
                            nullptr, &rows);
  }

  command.place = HostPlace::kRegion;
  if (!region.Describe(call, target, extent, transport::Access::kPeerWrites, &command.key,
                       &command.offset)) {
    return call.result();
  }
  session.counters().bulk_received.fetch_add(total, std::memory_order_relaxed);
  if (post) {
    command.reply_when = ReplyWhen::kNever;
    const CUresult result =
        call.PostBytes(request.function, &request.command, request.bytes, {}, kGatedCopyCost);
    if (result == CUDA_SUCCESS) {
      call.DownloadPosted();
      call.objects().plan.NoteUse(*region.pinned, call.stream(), call.issued());
    }
    return result;
  }
  return call.InvokeBytes(request.function, &request.command, request.bytes, {}, nullptr, 0,
                          nullptr);
}

CUresult DeviceToDevice(Call& call, uint64_t stream, const DeviceRows& target,
                        const DeviceRows& source, const Shape& shape, uint64_t target_context,
                        uint64_t source_context) {
  if (shape.empty()) return CUDA_SUCCESS;
  if (!OnDevice(call, target, shape) || !OnDevice(call, source, shape)) return call.result();
  if (shape.depth > 1 || target_context != 0 || source_context != 0) {
    commands::CuMemcpy3DAsync command{};
    command.stream = stream;
    command.dst = target.first;
    command.src = source.first;
    command.dst_pitch = PitchOf(shape, target.pitch);
    command.src_pitch = PitchOf(shape, source.pitch);
    command.dst_rows = target.slice_rows;
    command.src_rows = source.slice_rows;
    command.width = shape.width;
    command.height = shape.height;
    command.depth = shape.depth;
    command.dst_context = target_context;
    command.src_context = source_context;
    return call.Post(command, {}, 1);
  }
  if (shape.height == 1) {
    commands::CuMemcpyDtoDAsync command{};
    command.dstDevice = target.first;
    command.srcDevice = source.first;
    command.ByteCount = shape.width;
    command.hStream = stream;
    return call.Post(command, {}, 1);
  }
  commands::CuMemcpy2DAsync command{};
  command.stream = stream;
  command.dst = target.first;
  command.src = source.first;
  command.dst_pitch = target.pitch;
  command.src_pitch = source.pitch;
  command.width = shape.width;
  command.height = shape.height;
  return call.Post(command, {}, 1);
}

// In stream order, like any other copy: what the stream still does may touch this memory.
CUresult HostToHost(Call& call, uint64_t stream, const HostRows& target, const HostRows& source,
                    const Shape& shape) {
  if (shape.empty()) return CUDA_SUCCESS;
  uint64_t extent = 0, total = 0;
  if (!call.Out(target.first) || !call.Out(source.first)) return call.result();
  if (!Extent(shape, target.pitch, target.slice_rows, &extent, &total) ||
      !Extent(shape, source.pitch, source.slice_rows, &extent, &total)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  commands::CuStreamSynchronize command{};
  command.hStream = stream;
  const CUresult waited = call.Invoke(command);
  if (waited != CUDA_SUCCESS) return waited;
  for (uint64_t row = 0; row < shape.rows(); ++row) {
    memmove(target.row(shape, row), source.row(shape, row), shape.width);
  }
  return CUDA_SUCCESS;
}

std::byte* HostAddress(uint64_t address) {
  return reinterpret_cast<std::byte*>(address);
}

HostRows Plain(const void* memory) {
  // Rows of one direction only are written; the other is never written through.
  return {static_cast<std::byte*>(const_cast<void*>(memory)), 0, 1};
}

Place PlaceOf(const void* memory) {
  return {reinterpret_cast<uint64_t>(memory)};
}

CUresult HostToDevice(Call& call, CUdeviceptr target, const void* source, size_t bytes,
                      CUstream hstream, bool per_thread, bool asynchronous) {
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(hstream, per_thread, &stream)) return call.result();
  if (!AtOneServer(call, {target}, PlaceOf(source))) {
    return CopyAcross(call, stream, {target}, PlaceOf(source), {bytes}, asynchronous);
  }
  return Upload(call, stream, {target, 0, 1}, Plain(source), {bytes}, asynchronous);
}

CUresult DeviceToHost(Call& call, void* target, CUdeviceptr source, size_t bytes, CUstream hstream,
                      bool per_thread, bool asynchronous) {
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(hstream, per_thread, &stream)) return call.result();
  if (!AtOneServer(call, PlaceOf(target), {source})) {
    return CopyAcross(call, stream, PlaceOf(target), {source}, {bytes}, asynchronous);
  }
  return Download(call, stream, Plain(target), {source, 0, 1}, {bytes}, asynchronous);
}

CUresult OnDevices(Call& call, CUdeviceptr target, CUdeviceptr source, size_t bytes,
                   CUstream hstream, bool per_thread, bool asynchronous) {
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(hstream, per_thread, &stream)) return call.result();
  if (!AtOneServer(call, {target}, {source})) {
    return CopyAcross(call, stream, {target}, {source}, {bytes}, asynchronous);
  }
  return DeviceToDevice(call, stream, {target, 0, 1}, {source, 0, 1}, {bytes}, 0, 0);
}

}  // namespace

CUresult CopyBetween(Call& call, uint64_t stream, const Place& target, const Place& source,
                     Shape shape, bool asynchronous) {
  if (!AtOneServer(call, target, source)) {
    return CopyAcross(call, stream, target, source, shape, asynchronous);
  }
  // Slices that follow each other without gaps on both sides are one with more rows.
  uint64_t rows = 0;
  if (shape.depth > 1 && target.slice_rows == shape.height && source.slice_rows == shape.height &&
      !__builtin_mul_overflow(shape.height, shape.depth, &rows)) {
    shape.height = rows;
    shape.depth = 1;
  }
  if (shape.depth > 1 && !call.session().options().volumes) return CUDA_ERROR_NOT_SUPPORTED;
  const auto device = [&](const Place& place) {
    return DeviceRows{place.address, place.pitch,
                      shape.depth > 1 ? place.slice_rows : shape.height};
  };
  const auto host = [&](const Place& place) {
    return HostRows{HostAddress(place.address), place.pitch,
                    shape.depth > 1 ? place.slice_rows : shape.height};
  };
  const AddressPlan& plan = call.objects().plan;
  const bool to_device = plan.IsDevice(target.address);
  const bool from_device = plan.IsDevice(source.address);
  if (to_device && from_device) {
    const bool peers = !asynchronous && (target.owner != nullptr || source.owner != nullptr);
    CUresult result = peers ? WaitForPeers(call, target, source) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) return result;
    result = DeviceToDevice(call, stream, device(target), device(source), shape, target.context,
                            source.context);
    commands::CuStreamSynchronize wait{};
    wait.hStream = stream;
    return peers && result == CUDA_SUCCESS ? call.Invoke(wait) : result;
  }
  if (to_device) return Upload(call, stream, device(target), host(source), shape, asynchronous);
  if (from_device) return Download(call, stream, host(target), device(source), shape, asynchronous);
  return HostToHost(call, stream, host(target), host(source), shape);
}

CUresult CuMemcpyHtoD(CUdeviceptr target, const void* source, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpyHtoD, Call::kContext);
  return HostToDevice(call, target, source, bytes, nullptr, per_thread, false);
}

CUresult CuMemcpyHtoDAsync(CUdeviceptr target, const void* source, size_t bytes, CUstream stream,
                           bool per_thread) {
  Call call(Function::kCuMemcpyHtoDAsync, Call::kContext);
  return HostToDevice(call, target, source, bytes, stream, per_thread, true);
}

CUresult CuMemcpyDtoH(void* target, CUdeviceptr source, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpyDtoH, Call::kContext);
  return DeviceToHost(call, target, source, bytes, nullptr, per_thread, false);
}

CUresult CuMemcpyDtoHAsync(void* target, CUdeviceptr source, size_t bytes, CUstream stream,
                           bool per_thread) {
  Call call(Function::kCuMemcpyDtoHAsync, Call::kContext);
  return DeviceToHost(call, target, source, bytes, stream, per_thread, true);
}

CUresult CuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpyDtoD, Call::kContext);
  return OnDevices(call, target, source, bytes, nullptr, per_thread, false);
}

CUresult CuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream,
                           bool per_thread) {
  Call call(Function::kCuMemcpyDtoDAsync, Call::kContext);
  return OnDevices(call, target, source, bytes, stream, per_thread, true);
}

CUresult CuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpy, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(nullptr, per_thread, &stream)) return call.result();
  return CopyBetween(call, stream, {target}, {source}, {bytes}, false);
}

CUresult CuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream hstream,
                       bool per_thread) {
  Call call(Function::kCuMemcpyAsync, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(hstream, per_thread, &stream)) return call.result();
  return CopyBetween(call, stream, {target}, {source}, {bytes}, true);
}

}  // namespace penstock::interposer
