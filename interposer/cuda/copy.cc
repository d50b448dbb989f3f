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

namespace penstock::interposer {
namespace {

// Rows in host or device memory. A plain copy is one row.
struct Shape {
  uint64_t width = 0, height = 1;
  bool empty() const { return width == 0 || height == 0; }
};

struct HostRows {
  std::byte* first = nullptr;
  uint64_t pitch = 0;
};
struct DeviceRows {
  CUdeviceptr first = 0;
  uint64_t pitch = 0;
};

// From the first byte of the first row to the last of the last; false if that is no number.
bool Extent(const Shape& shape, uint64_t pitch, uint64_t* bytes) {
  uint64_t rows = 0;
  return (shape.height == 1 || pitch >= shape.width) &&
         !__builtin_mul_overflow(shape.height - 1, pitch, &rows) &&
         !__builtin_add_overflow(rows, shape.width, bytes);
}

// The pitch of a single row says nothing, whatever the program put there. The frames say its width.
uint64_t PitchOf(const Shape& shape, uint64_t pitch) {
  return shape.height == 1 ? shape.width : pitch;
}

void Pack(std::byte* target, const HostRows& source, const Shape& shape) {
  for (uint64_t row = 0; row < shape.height; ++row) {
    memcpy(target + row * shape.width, source.first + row * source.pitch, shape.width);
  }
}

void Unpack(const HostRows& target, const std::byte* source, const Shape& shape) {
  for (uint64_t row = 0; row < shape.height; ++row) {
    memcpy(target.first + row * target.pitch, source + row * shape.width, shape.width);
  }
}

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
      SetKey(key, pinned->region->key());
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
      : BouncedBytes(call.session(), call.thread().index, fills, shape.width * shape.height),
        rows_(rows),
        width_(shape.width),
        fills_(fills) {}

 private:
  void Move(uint64_t offset, std::span<std::byte> slot) override {
    uint64_t row = offset / width_, column = offset % width_;
    while (!slot.empty()) {
      const uint64_t bytes = std::min<uint64_t>(width_ - column, slot.size());
      std::byte* const host = rows_.first + row * rows_.pitch + column;
      memcpy(fills_ ? slot.data() : host, fills_ ? host : slot.data(), bytes);
      slot = slot.subspan(bytes);
      ++row;
      column = 0;
    }
  }

  const HostRows rows_;
  const uint64_t width_;
  const bool fills_;
};

constexpr uint32_t kUploadFunction = static_cast<uint32_t>(Operation::kUpload);
constexpr uint32_t kDownloadFunction = static_cast<uint32_t>(Operation::kDownload);

// call.Stream() has been asked; `stream` is its wire value.
CUresult Upload(Call& call, uint64_t stream, const DeviceRows& target, const HostRows& source,
                const Shape& shape, bool asynchronous) {
  if (shape.empty()) return CUDA_SUCCESS;
  uint64_t extent = 0, total = 0;
  if (!call.Out(source.first) ||
      !call.DeviceRange2D(target.first, target.pitch, shape.width, shape.height)) {
    return call.result();
  }
  if (!Extent(shape, source.pitch, &extent) ||
      __builtin_mul_overflow(shape.width, shape.height, &total)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Session& session = call.session();
  // Device memory given as host memory would fault here; with a local driver it is refused.
  if (session.plan.IsDevice(reinterpret_cast<uint64_t>(source.first))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // Posting a synchronous copy is possible where its stream orders it before what comes next.
  const bool may_post = (asynchronous || call.MayPostUpload()) && !session.synchronous();

  UploadCommand command{};
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
      const CUresult result = call.InvokeBytes(kUploadFunction, &command, sizeof command, sections,
                                               nullptr, 0, nullptr);
      // Through the legacy stream it has come after all of them.
      if (result == CUDA_SUCCESS && stream == kLegacyStream.bits) context.orphans_done = orphans;
      return result;
    }
    const CUresult result =
        call.PostBytes(kUploadFunction, &command, sizeof command, sections, cost);
    if (!asynchronous && result == CUDA_SUCCESS) call.UploadPosted();
    return result;
  };

  if (total <= kMaxInlineCopyBytes && session.options().inline_copies) {
    command.place = HostPlace::kInline;
    command.host_pitch = shape.width;
    const std::byte* data = source.first;
    if (shape.height > 1) {
      call.thread().scratch.resize(total);
      Pack(call.thread().scratch.data(), source, shape);
      data = call.thread().scratch.data();
    }
    const std::span<const std::byte> section(data, total);
    return send({&section, 1}, 1);
  }

  Region region;
  region.pinned = session.plan.FindHost(source.first, extent);
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
    command.host_pitch = shape.width;
    SetKey(&command.key, slot.key);
    return send({}, kGatedCopyCost);
  }

  // The program's own memory: hold it until it has been read, or, if the copy is synchronous, done.
  const ReplyWhen when_free = asynchronous ? ReplyWhen::kPulled : ReplyWhen::kDone;
  if (transport::MemoryKey key;
      region.pinned == nullptr && session.bounces() && session.bounce().Key(&key)) {
    command.place = HostPlace::kBounced;
    command.host_pitch = shape.width;
    command.reply_when = when_free;
    SetKey(&command.key, key);
    BouncedRows rows(call, source, shape, true);
    return call.InvokeBytes(kUploadFunction, &command, sizeof command, {}, nullptr, 0, nullptr,
                            &rows);
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
      session.plan.NoteUse(*region.pinned, call.stream(), call.issued());
    }
    return result;
  }
  command.reply_when = when_free;
  return call.InvokeBytes(kUploadFunction, &command, sizeof command, {}, nullptr, 0, nullptr);
}

CUresult Download(Call& call, uint64_t stream, const HostRows& target, const DeviceRows& source,
                  const Shape& shape, bool asynchronous) {
  if (shape.empty()) return CUDA_SUCCESS;
  uint64_t extent = 0, total = 0;
  if (!call.Out(target.first) ||
      !call.DeviceRange2D(source.first, source.pitch, shape.width, shape.height)) {
    return call.result();
  }
  if (!Extent(shape, target.pitch, &extent) ||
      __builtin_mul_overflow(shape.width, shape.height, &total)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Session& session = call.session();
  if (session.plan.IsDevice(reinterpret_cast<uint64_t>(target.first))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  DownloadCommand command{};
  command.source = source.first;
  command.stream = stream;
  command.width = shape.width;
  command.height = shape.height;
  command.source_pitch = PitchOf(shape, source.pitch);
  command.host_pitch = PitchOf(shape, target.pitch);
  command.reply_when = ReplyWhen::kDone;

  Region region;
  region.pinned = session.plan.FindHost(target.first, extent);
  const bool post = asynchronous && region.pinned != nullptr && !session.synchronous();
  if (!post && total <= kMaxInlineCopyBytes && session.options().inline_copies) {
    command.place = HostPlace::kInline;
    if (shape.height == 1) {
      return call.InvokeInto(kDownloadFunction, &command, sizeof command, {target.first, total});
    }
    call.thread().scratch.resize(total);
    const CUresult result = call.InvokeInto(kDownloadFunction, &command, sizeof command,
                                            {call.thread().scratch.data(), total});
    if (result == CUDA_SUCCESS) Unpack(target, call.thread().scratch.data(), shape);
    return result;
  }

  if (transport::MemoryKey key;
      region.pinned == nullptr && session.bounces() && session.bounce().Key(&key)) {
    command.place = HostPlace::kBounced;
    command.host_pitch = shape.width;
    SetKey(&command.key, key);
    BouncedRows rows(call, target, shape, false);
    return call.InvokeBytes(kDownloadFunction, &command, sizeof command, {}, nullptr, 0, nullptr,
                            &rows);
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
        call.PostBytes(kDownloadFunction, &command, sizeof command, {}, kGatedCopyCost);
    if (result == CUDA_SUCCESS) {
      call.DownloadPosted();
      session.plan.NoteUse(*region.pinned, call.stream(), call.issued());
    }
    return result;
  }
  return call.InvokeBytes(kDownloadFunction, &command, sizeof command, {}, nullptr, 0, nullptr);
}

CUresult DeviceToDevice(Call& call, uint64_t stream, const DeviceRows& target,
                        const DeviceRows& source, const Shape& shape) {
  if (shape.empty()) return CUDA_SUCCESS;
  if (!call.DeviceRange2D(target.first, target.pitch, shape.width, shape.height) ||
      !call.DeviceRange2D(source.first, source.pitch, shape.width, shape.height)) {
    return call.result();
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
  uint64_t extent = 0;
  if (!call.Out(target.first) || !call.Out(source.first)) return call.result();
  if (!Extent(shape, target.pitch, &extent) || !Extent(shape, source.pitch, &extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  commands::CuStreamSynchronize command{};
  command.hStream = stream;
  const CUresult waited = call.Invoke(command);
  if (waited != CUDA_SUCCESS) return waited;
  for (uint64_t row = 0; row < shape.height; ++row) {
    memmove(target.first + row * target.pitch, source.first + row * source.pitch, shape.width);
  }
  return CUDA_SUCCESS;
}

std::byte* HostAddress(uint64_t address) {
  return reinterpret_cast<std::byte*>(address);
}

HostRows Plain(const void* memory) {
  // Rows of one direction only are written; the other is never written through.
  return {static_cast<std::byte*>(const_cast<void*>(memory)), 0};
}

// Either side is a device address or host memory; the address tells.
CUresult Unified(Call& call, uint64_t stream, uint64_t target, uint64_t target_pitch,
                 uint64_t source, uint64_t source_pitch, const Shape& shape, bool asynchronous) {
  const AddressPlan& plan = call.session().plan;
  const bool to_device = plan.IsDevice(target), from_device = plan.IsDevice(source);
  const DeviceRows device_target{target, target_pitch}, device_source{source, source_pitch};
  const HostRows host_target{HostAddress(target), target_pitch},
      host_source{HostAddress(source), source_pitch};
  if (to_device && from_device) {
    return DeviceToDevice(call, stream, device_target, device_source, shape);
  }
  if (to_device) return Upload(call, stream, device_target, host_source, shape, asynchronous);
  if (from_device) return Download(call, stream, host_target, device_source, shape, asynchronous);
  return HostToHost(call, stream, host_target, host_source, shape);
}

// One side of a two-dimensional copy as a plain address; false for what is not memory.
bool Side(Call& call, CUmemorytype type, const void* host, CUdeviceptr device, size_t pitch,
          size_t x, size_t y, const Shape& shape, uint64_t* address) {
  uint64_t rows = 0;
  switch (type) {
    case CU_MEMORYTYPE_HOST:
      *address = reinterpret_cast<uint64_t>(host);
      break;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
      *address = device;
      break;
    case CU_MEMORYTYPE_ARRAY:
      return call.Refuse(CUDA_ERROR_NOT_SUPPORTED);
    default:
      return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  if ((shape.height > 1 || y > 0) && pitch < shape.width + x) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  if (__builtin_mul_overflow(pitch, y, &rows)) return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  const AddressPlan& plan = call.session().plan;
  const bool on_device = plan.IsDevice(*address);
  *address += rows + x;
  // What starts on the device does not reach into the program's memory.
  if (on_device && !shape.empty() && !plan.IsDevice(*address)) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  return true;
}

CUresult Copy2D(Call& call, const CUDA_MEMCPY2D* copy, CUstream stream, bool per_thread,
                bool asynchronous) {
  uint64_t wire = 0, target = 0, source = 0;
  if (!call.ready() || !call.Out(copy) || !call.Stream(stream, per_thread, &wire)) {
    return call.result();
  }
  const Shape shape{copy->WidthInBytes, copy->Height};
  if (!Side(call, copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstPitch,
            copy->dstXInBytes, copy->dstY, shape, &target) ||
      !Side(call, copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcPitch,
            copy->srcXInBytes, copy->srcY, shape, &source)) {
    return call.result();
  }
  if (shape.empty()) return CUDA_SUCCESS;
  const AddressPlan& plan = call.session().plan;
  // A side that claims to be device memory must be; a host side must not.
  const auto lies = [&](CUmemorytype type, uint64_t address) {
    return (type == CU_MEMORYTYPE_DEVICE && !plan.IsDevice(address)) ||
           (type == CU_MEMORYTYPE_HOST && plan.IsDevice(address));
  };
  if (lies(copy->dstMemoryType, target) || lies(copy->srcMemoryType, source)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return Unified(call, wire, target, copy->dstPitch, source, copy->srcPitch, shape, asynchronous);
}

}  // namespace

CUresult CuMemcpyHtoD(CUdeviceptr target, const void* source, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpyHtoD, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(nullptr, per_thread, &stream)) return call.result();
  return Upload(call, stream, {target, 0}, Plain(source), {bytes}, false);
}

CUresult CuMemcpyHtoDAsync(CUdeviceptr target, const void* source, size_t bytes, CUstream hstream,
                           bool per_thread) {
  Call call(Function::kCuMemcpyHtoDAsync, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(hstream, per_thread, &stream)) return call.result();
  return Upload(call, stream, {target, 0}, Plain(source), {bytes}, true);
}

CUresult CuMemcpyDtoH(void* target, CUdeviceptr source, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpyDtoH, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(nullptr, per_thread, &stream)) return call.result();
  return Download(call, stream, Plain(target), {source, 0}, {bytes}, false);
}

CUresult CuMemcpyDtoHAsync(void* target, CUdeviceptr source, size_t bytes, CUstream hstream,
                           bool per_thread) {
  Call call(Function::kCuMemcpyDtoHAsync, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(hstream, per_thread, &stream)) return call.result();
  return Download(call, stream, Plain(target), {source, 0}, {bytes}, true);
}

CUresult CuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpy, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(nullptr, per_thread, &stream)) return call.result();
  return Unified(call, stream, target, 0, source, 0, {bytes}, false);
}

CUresult CuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream hstream,
                       bool per_thread) {
  Call call(Function::kCuMemcpyAsync, Call::kContext);
  uint64_t stream = 0;
  if (!call.ready() || !call.Stream(hstream, per_thread, &stream)) return call.result();
  return Unified(call, stream, target, 0, source, 0, {bytes}, true);
}

CUresult CuMemcpy2D(const CUDA_MEMCPY2D* copy, bool per_thread) {
  Call call(Function::kCuMemcpy2D, Call::kContext);
  return Copy2D(call, copy, nullptr, per_thread, false);
}

CUresult CuMemcpy2DUnaligned(const CUDA_MEMCPY2D* copy, bool per_thread) {
  Call call(Function::kCuMemcpy2DUnaligned, Call::kContext);
  return Copy2D(call, copy, nullptr, per_thread, false);
}

CUresult CuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream, bool per_thread) {
  Call call(Function::kCuMemcpy2DAsync, Call::kContext);
  return Copy2D(call, copy, stream, per_thread, true);
}

}  // namespace penstock::interposer
