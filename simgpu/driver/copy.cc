// All copies of linear memory. Every entry point describes what it does as a box (width, height,
// depth) between two places and calls Copy.
//
// When the call returns is CUDA's "API synchronization behavior": synchronous copies wait, except
// between device memories; asynchronous ones wait if the target is pageable, and otherwise return
// once a pageable source has been read (small ones are staged, large ones waited for). A program
// that touches pinned memory before its stream is done sees the race it has on a real device.
#include <cstring>

#include "simgpu/driver/entry.h"

namespace simgpu {
namespace {

constexpr size_t kStagedBytes = 64 << 10;

enum class PlaceKind { kHost, kDevice, kUnified };

struct Place {
  PlaceKind kind = PlaceKind::kUnified;
  uint64_t address = 0;
  size_t pitch = 0;  // bytes from row to row
  size_t slice = 0;  // bytes from slice to slice
  // Found by Resolve:
  bool pageable = false;
  bool device_memory = false;
};

struct Box {
  size_t width = 0;  // bytes
  size_t height = 1;
  size_t depth = 1;
  size_t bytes() const { return width * height * depth; }
};

// From the first to one past the last byte that the box touches; false on overflow.
bool Span(const Place& place, const Box& box, size_t* bytes) {
  size_t rows = 0;
  size_t slices = 0;
  return !__builtin_mul_overflow(place.pitch, box.height - 1, &rows) &&
         !__builtin_mul_overflow(place.slice, box.depth - 1, &slices) &&
         !__builtin_add_overflow(rows, slices, bytes) &&
         !__builtin_add_overflow(*bytes, box.width, bytes);
}

CUresult Resolve(Place& place, const Box& box) {
  if (box.height > 1 && place.pitch < box.width) return CUDA_ERROR_INVALID_VALUE;
  size_t span = 0;
  if (place.address == 0 || !Span(place, box, &span)) return CUDA_ERROR_INVALID_VALUE;
  const auto found = state()->memory.Find(place.address);
  if (found == nullptr) {
    if (place.kind == PlaceKind::kDevice || state()->memory.InReserved(place.address)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    place.pageable = true;
    return CUDA_SUCCESS;
  }
  const bool inside = span <= found->end() - place.address;
  if (found->host_accessible()) {
    // Host memory that is only partly registered counts as pageable.
    if (!inside && (place.kind == PlaceKind::kDevice || found->kind != MemoryKind::kRegistered)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    place.pageable = !inside;
    return CUDA_SUCCESS;
  }
  if (place.kind == PlaceKind::kHost || !inside) return CUDA_ERROR_INVALID_VALUE;
  place.device_memory = true;
  return CUDA_SUCCESS;
}

void Move(const Place& target, const Place& source, const Box& box) {
  auto* const to = reinterpret_cast<std::byte*>(target.address);
  const auto* const from = reinterpret_cast<const std::byte*>(source.address);
  for (size_t z = 0; z < box.depth; ++z) {
    for (size_t y = 0; y < box.height; ++y) {
      std::memmove(to + z * target.slice + y * target.pitch,
                   from + z * source.slice + y * source.pitch, box.width);
    }
  }
}

// Whether what Resolve found is still there when the stream reaches the copy.
bool StillLive(const Place& place, const Box& box) {
  if (place.pageable) return true;
  size_t span = 0;
  Span(place, box, &span);
  return state()->memory.FindRange(place.address, span) != nullptr;
}

CUresult Copy(CUstream handle, bool asynchronous, Place target, Place source, Box box) {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(ResolveStream(handle, &stream, &context));
  if (box.bytes() == 0) return CUDA_SUCCESS;
  SIMGPU_RETURN_IF_ERROR(Resolve(target, box));
  SIMGPU_RETURN_IF_ERROR(Resolve(source, box));
  if (source.pageable && target.pageable) {
    // Host to host: the driver copies on the calling thread, after the stream's earlier work.
    SIMGPU_RETURN_IF_ERROR(context->WaitFor(context->PendingOf(stream)));
    Move(target, source, box);
    return CUDA_SUCCESS;
  }
  bool wait = target.pageable || (!asynchronous && !(source.device_memory && target.device_memory));
  std::shared_ptr<std::vector<std::byte>> staged;
  if (source.pageable && !wait) {
    if (box.bytes() <= kStagedBytes) {
      staged = std::make_shared<std::vector<std::byte>>(box.bytes());
      Place stage;
      stage.address = reinterpret_cast<uint64_t>(staged->data());
      stage.pitch = box.width;
      stage.slice = box.width * box.height;
      stage.pageable = true;
      Move(stage, source, box);
      source = stage;
    } else {
      wait = true;
    }
  }
  Context* const owner = context.get();  // its streams do not outlive it
  const Point point = context->Enqueue(stream, [owner, target, source, box, staged] {
    if (StillLive(target, box) && StillLive(source, box)) {
      Move(target, source, box);
    } else {
      owner->Poison(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
  });
  return wait ? context->WaitFor({point}) : CUDA_SUCCESS;
}

Place AtDevice(CUdeviceptr address) {
  return {PlaceKind::kDevice, address};
}
Place AtUnified(CUdeviceptr address) {
  return {PlaceKind::kUnified, address};
}
Place AtHost(const void* pointer) {
  return {PlaceKind::kHost, reinterpret_cast<uint64_t>(pointer)};
}
Box Linear(size_t bytes) {
  return {bytes, 1, 1};
}

CUresult MakePlace(CUmemorytype type, const void* host, CUdeviceptr device, Place* place) {
  switch (type) {
    case CU_MEMORYTYPE_HOST:
      *place = AtHost(host);
      return CUDA_SUCCESS;
    case CU_MEMORYTYPE_DEVICE:
      *place = AtDevice(device);
      return CUDA_SUCCESS;
    case CU_MEMORYTYPE_UNIFIED:
      *place = AtUnified(device);
      return CUDA_SUCCESS;
    case CU_MEMORYTYPE_ARRAY:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// Moves the place to the box's first byte, with CUDA's check of the pitch.
CUresult Offset(Place& place, size_t x, size_t y, size_t z, size_t pitch, size_t rows,
                const Box& box) {
  if (pitch == 0) pitch = box.width + x;
  if (pitch < box.width + x) return CUDA_ERROR_INVALID_VALUE;
  if (rows == 0) rows = box.height + y;
  if (rows < box.height + y && box.depth > 1) return CUDA_ERROR_INVALID_VALUE;
  place.pitch = pitch;
  place.slice = pitch * rows;
  place.address += z * place.slice + y * pitch + x;
  return CUDA_SUCCESS;
}

CUresult Copy2D(const CUDA_MEMCPY2D* c, CUstream stream, bool asynchronous) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (c == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Box box = {c->WidthInBytes, c->Height, 1};
  Place target;
  Place source;
  SIMGPU_RETURN_IF_ERROR(MakePlace(c->dstMemoryType, c->dstHost, c->dstDevice, &target));
  SIMGPU_RETURN_IF_ERROR(MakePlace(c->srcMemoryType, c->srcHost, c->srcDevice, &source));
  SIMGPU_RETURN_IF_ERROR(Offset(target, c->dstXInBytes, c->dstY, 0, c->dstPitch, 0, box));
  SIMGPU_RETURN_IF_ERROR(Offset(source, c->srcXInBytes, c->srcY, 0, c->srcPitch, 0, box));
  return Copy(stream, asynchronous, target, source, box);
}

// CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER name their fields alike.
template <typename Description>
CUresult Copy3D(const Description* c, CUstream stream, bool asynchronous) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (c == nullptr || c->srcLOD != 0 || c->dstLOD != 0) return CUDA_ERROR_INVALID_VALUE;
  const Box box = {c->WidthInBytes, c->Height, c->Depth};
  Place target;
  Place source;
  SIMGPU_RETURN_IF_ERROR(MakePlace(c->dstMemoryType, c->dstHost, c->dstDevice, &target));
  SIMGPU_RETURN_IF_ERROR(MakePlace(c->srcMemoryType, c->srcHost, c->srcDevice, &source));
  SIMGPU_RETURN_IF_ERROR(
      Offset(target, c->dstXInBytes, c->dstY, c->dstZ, c->dstPitch, c->dstHeight, box));
  SIMGPU_RETURN_IF_ERROR(
      Offset(source, c->srcXInBytes, c->srcY, c->srcZ, c->srcPitch, c->srcHeight, box));
  return Copy(stream, asynchronous, target, source, box);
}

// cuMemcpyPeer and cuMemcpy3DPeer: serialised, as documented, with all that both contexts have
// under way, and with what comes after them.
template <typename CopyNow>
CUresult BetweenPeers(CUcontext target_context, CUcontext source_context, CopyNow copy) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  for (const CUcontext handle : {target_context, source_context}) {
    if (handle != nullptr) SIMGPU_RETURN_IF_ERROR(cuCtxSynchronize_v2(handle));
  }
  SIMGPU_RETURN_IF_ERROR(copy());
  return cuCtxSynchronize_v2(nullptr);
}

CUresult CopyPeer(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                  CUcontext source_context, size_t bytes, CUstream stream, bool asynchronous) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  std::shared_ptr<Context> context;
  SIMGPU_RETURN_IF_ERROR(FindContext(target_context, &context));
  SIMGPU_RETURN_IF_ERROR(FindContext(source_context, &context));
  return Copy(stream, asynchronous, AtUnified(target), AtUnified(source), Linear(bytes));
}

CUresult CopyBatch(const CUdeviceptr* targets, const CUdeviceptr* sources, const size_t* sizes,
                   size_t count, const CUmemcpyAttributes* attributes, const size_t* indices,
                   size_t attribute_count, size_t* failed, CUstream stream) {
  SIMGPU_RETURN_IF_ERROR(Enter());
  if (failed != nullptr) *failed = SIZE_MAX;
  if (targets == nullptr || sources == nullptr || sizes == nullptr || count == 0 ||
      attributes == nullptr || indices == nullptr || attribute_count == 0 ||
      attribute_count > count || stream == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < count; ++i) {
    const CUresult result =
        Copy(stream, true, AtUnified(targets[i]), AtUnified(sources[i]), Linear(sizes[i]));
    if (result != CUDA_SUCCESS) {
      if (failed != nullptr) *failed = i;
      return result;
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace simgpu

#undef cuMemcpyBatchAsync

using namespace simgpu;

SIMGPU_EXPORT cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
  return Copy(nullptr, false, AtUnified(target), AtUnified(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
  return Copy(stream, true, AtUnified(target), AtUnified(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t bytes) {
  return Copy(nullptr, false, AtDevice(target), AtHost(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, size_t bytes,
                                   CUstream stream) {
  return Copy(stream, true, AtDevice(target), AtHost(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t bytes) {
  return Copy(nullptr, false, AtHost(target), AtDevice(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, size_t bytes,
                                   CUstream stream) {
  return Copy(stream, true, AtHost(target), AtDevice(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
  return Copy(nullptr, false, AtDevice(target), AtDevice(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes,
                                   CUstream stream) {
  return Copy(stream, true, AtDevice(target), AtDevice(source), Linear(bytes));
}

SIMGPU_EXPORT cuMemcpy2D_v2(const CUDA_MEMCPY2D* copy) {
  return Copy2D(copy, nullptr, false);
}

SIMGPU_EXPORT cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* copy) {
  return Copy2D(copy, nullptr, false);
}

SIMGPU_EXPORT cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  return Copy2D(copy, stream, true);
}

SIMGPU_EXPORT cuMemcpy3D_v2(const CUDA_MEMCPY3D* copy) {
  return Copy3D(copy, nullptr, false);
}

SIMGPU_EXPORT cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* copy, CUstream stream) {
  return Copy3D(copy, stream, true);
}

SIMGPU_EXPORT cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* copy) {
  if (copy == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return BetweenPeers(copy->dstContext, copy->srcContext,
                      [copy] { return Copy3D(copy, nullptr, false); });
}

SIMGPU_EXPORT cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* copy, CUstream stream) {
  return Copy3D(copy, stream, true);
}

SIMGPU_EXPORT cuMemcpyPeer(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                           CUcontext source_context, size_t bytes) {
  return BetweenPeers(target_context, source_context, [=] {
    return CopyPeer(target, target_context, source, source_context, bytes, nullptr, false);
  });
}

SIMGPU_EXPORT cuMemcpyPeerAsync(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                                CUcontext source_context, size_t bytes, CUstream stream) {
  return CopyPeer(target, target_context, source, source_context, bytes, stream, true);
}

SIMGPU_EXPORT cuMemcpyBatchAsync_v2(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes,
                                    size_t count, CUmemcpyAttributes* attributes, size_t* indices,
                                    size_t attribute_count, CUstream stream) {
  return CopyBatch(targets, sources, sizes, count, attributes, indices, attribute_count, nullptr,
                   stream);
}

SIMGPU_EXPORT cuMemcpyBatchAsync(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes,
                                 size_t count, CUmemcpyAttributes* attributes, size_t* indices,
                                 size_t attribute_count, size_t* failed, CUstream stream) {
  return CopyBatch(targets, sources, sizes, count, attributes, indices, attribute_count, failed,
                   stream);
}
