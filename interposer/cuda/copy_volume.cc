// Copies of rows, volumes and batches, and between contexts: the program's descriptions checked and
// turned into places. copy.cc does the rest.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"
#include "interposer/cuda/copy.h"

namespace penstock::interposer {
namespace {

// One side of a copy as the program describes it.
struct Side {
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  size_t pitch, rows;  // rows: from slice to slice
  size_t x, y, z;
};

// False for what is not memory.
bool Resolve(Call& call, const Side& side, const Shape& shape, Place* place) {
  switch (side.type) {
    case CU_MEMORYTYPE_HOST:
      place->address = reinterpret_cast<uint64_t>(side.host);
      break;
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
      place->address = side.device;
      break;
    case CU_MEMORYTYPE_ARRAY:
      return call.Refuse(CUDA_ERROR_NOT_SUPPORTED);
    default:
      return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  const bool one_row = shape.height <= 1 && shape.depth <= 1 && side.y == 0 && side.z == 0;
  const bool one_slice = shape.depth <= 1 && side.z == 0;
  uint64_t width = 0, height = 0, slices = 0, before = 0;
  if (__builtin_add_overflow(shape.width, side.x, &width) ||
      __builtin_add_overflow(shape.height, side.y, &height)) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  // Nothing said of them, they follow from the copy.
  place->pitch = side.pitch != 0 || one_row ? side.pitch : width;
  place->slice_rows = side.rows != 0 && !one_slice ? side.rows : height;
  if ((!one_row && place->pitch < width) || place->slice_rows < height) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  if (__builtin_mul_overflow(place->slice_rows, side.z, &slices) ||
      __builtin_add_overflow(slices, side.y, &before) ||
      __builtin_mul_overflow(before, place->pitch, &before) ||
      __builtin_add_overflow(before, side.x, &before)) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  const AddressPlan& plan = call.objects().plan;
  const bool on_device = plan.IsDevice(place->address);
  place->address += before;
  if (shape.empty()) return true;
  const bool ends_on_device = plan.IsDevice(place->address);
  // A side that claims to be device memory must be, a host side must not, and what starts on the
  // device does not reach into the program's memory.
  if ((on_device && !ends_on_device) || (side.type == CU_MEMORYTYPE_DEVICE && !ends_on_device) ||
      (side.type == CU_MEMORYTYPE_HOST && ends_on_device)) {
    return call.Refuse(CUDA_ERROR_INVALID_VALUE);
  }
  return true;
}

CUresult Copy2D(Call& call, const CUDA_MEMCPY2D* copy, CUstream stream, bool per_thread,
                bool asynchronous) {
  uint64_t wire = 0;
  Place target, source;
  if (!call.ready() || !call.Out(copy) || !call.Stream(stream, per_thread, &wire)) {
    return call.result();
  }
  const Shape shape{copy->WidthInBytes, copy->Height};
  if (!Resolve(call,
               {copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstPitch, 0,
                copy->dstXInBytes, copy->dstY, 0},
               shape, &target) ||
      !Resolve(call,
               {copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcPitch, 0,
                copy->srcXInBytes, copy->srcY, 0},
               shape, &source)) {
    return call.result();
  }
  if (shape.empty()) return CUDA_SUCCESS;
  return CopyBetween(call, wire, target, source, shape, asynchronous);
}

// A context that a side names; the null one names none.
bool SideContext(Call& call, CUcontext context, CUmemorytype type, Place* place) {
  if (context == nullptr || type == CU_MEMORYTYPE_ARRAY) return true;
  return NamedContext(call, context, place);
}
bool Contexts(Call&, const CUDA_MEMCPY3D&, Place*, Place*) {
  return true;
}
bool Contexts(Call& call, const CUDA_MEMCPY3D_PEER& copy, Place* target, Place* source) {
  return SideContext(call, copy.dstContext, copy.dstMemoryType, target) &&
         SideContext(call, copy.srcContext, copy.srcMemoryType, source);
}

// CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER name their fields alike.
template <typename Description>
CUresult Copy3D(Call& call, const Description* copy, CUstream stream, bool per_thread,
                bool asynchronous) {
  uint64_t wire = 0;
  Place target, source;
  if (!call.ready() || !call.Out(copy) || !call.Stream(stream, per_thread, &wire)) {
    return call.result();
  }
  if (copy->srcLOD != 0 || copy->dstLOD != 0) return CUDA_ERROR_INVALID_VALUE;
  const Shape shape{copy->WidthInBytes, copy->Height, copy->Depth};
  if (!Resolve(call,
               {copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstPitch,
                copy->dstHeight, copy->dstXInBytes, copy->dstY, copy->dstZ},
               shape, &target) ||
      !Resolve(call,
               {copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcPitch,
                copy->srcHeight, copy->srcXInBytes, copy->srcY, copy->srcZ},
               shape, &source) ||
      !Contexts(call, *copy, &target, &source)) {
    return call.result();
  }
  if (shape.empty()) return CUDA_SUCCESS;
  return CopyBetween(call, wire, target, source, shape, asynchronous);
}

// The copies of a batch have no order among each other, so they may as well have one.
CUresult CopyBatch(Call& call, const CUdeviceptr* targets, const CUdeviceptr* sources,
                   const size_t* sizes, size_t count, const CUmemcpyAttributes* attributes,
                   const size_t* indices, size_t attribute_count, size_t* failed, CUstream stream,
                   bool per_thread) {
  if (failed != nullptr) *failed = SIZE_MAX;
  uint64_t wire = 0;
  if (!call.ready()) return call.result();
  if (targets == nullptr || sources == nullptr || sizes == nullptr || count == 0 ||
      attributes == nullptr || indices == nullptr || attribute_count == 0 ||
      attribute_count > count || indices[0] != 0 || stream == nullptr ||
      stream == CU_STREAM_LEGACY) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!call.Stream(stream, per_thread, &wire)) return call.result();
  bool read_now = false;
  for (size_t i = 0; i < attribute_count; ++i) {
    const CUmemcpySrcAccessOrder order = attributes[i].srcAccessOrder;
    if (order != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && order != CU_MEMCPY_SRC_ACCESS_ORDER_ANY &&
        order != CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i > 0 && (indices[i] <= indices[i - 1] || indices[i] >= count)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    read_now = read_now || order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
  }
  for (size_t i = 0; i < count; ++i) {
    const CUresult result = CopyBetween(call, wire, {targets[i]}, {sources[i]}, {sizes[i]}, true);
    if (result != CUDA_SUCCESS) {
      if (failed != nullptr) *failed = i;
      return result;
    }
  }
  if (!read_now) return CUDA_SUCCESS;
  // Pinned sources are read when the stream gets there.
  commands::CuStreamSynchronize command{};
  command.hStream = wire;
  return call.Invoke(command);
}

}  // namespace

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

CUresult CuMemcpy3D(const CUDA_MEMCPY3D* copy, bool per_thread) {
  Call call(Function::kCuMemcpy3D, Call::kContext);
  return Copy3D(call, copy, nullptr, per_thread, false);
}

CUresult CuMemcpy3DAsync(const CUDA_MEMCPY3D* copy, CUstream stream, bool per_thread) {
  Call call(Function::kCuMemcpy3DAsync, Call::kContext);
  return Copy3D(call, copy, stream, per_thread, true);
}

CUresult CuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* copy, bool per_thread) {
  Call call(Function::kCuMemcpy3DPeer, Call::kContext);
  return Copy3D(call, copy, nullptr, per_thread, false);
}

CUresult CuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* copy, CUstream stream, bool per_thread) {
  Call call(Function::kCuMemcpy3DPeerAsync, Call::kContext);
  return Copy3D(call, copy, stream, per_thread, true);
}

CUresult CuMemcpyBatchAsync(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* indices, size_t attribute_count,
                            size_t* failed, CUstream stream, bool per_thread) {
  Call call(Function::kCuMemcpyBatchAsync, Call::kContext);
  return CopyBatch(call, targets, sources, sizes, count, attributes, indices, attribute_count,
                   failed, stream, per_thread);
}

CUresult CuMemcpyBatchAsync_v2(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes,
                               size_t count, CUmemcpyAttributes* attributes, size_t* indices,
                               size_t attribute_count, CUstream stream, bool per_thread) {
  Call call(Function::kCuMemcpyBatchAsync_v2, Call::kContext);
  return CopyBatch(call, targets, sources, sizes, count, attributes, indices, attribute_count,
                   nullptr, stream, per_thread);
}

}  // namespace penstock::interposer
