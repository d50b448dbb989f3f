// Copies whose two sides lie at different servers, or elsewhere than their stream.
//
// No server reaches another one's memory, so the data comes here and goes on from here, a piece at
// a time. All of it happens during the call: what the stream still has to do is waited for, then
// the pieces are moved through streams that nothing else uses. That is the order that CUDA
// promises, at the price of a thread that waits even where the copy is asynchronous.
#include "commands.gen.h"
#include "custom_client.gen.h"
#include "interposer/core/call.h"
#include "interposer/core/client.h"
#include "interposer/cuda/copy.h"

namespace penstock::interposer {
namespace {

// What is here of a copy at once.
constexpr uint64_t kPieceBytes = 8 << 20;

// A stream of the context for the time of one copy. It waits for no other one, but, as all streams,
// for synchronous uploads that were only posted.
class Ferry {
 public:
  Ferry(Call& origin, ContextRecord& context)
      : call_(origin, *context.session, &context),
        stream_(call_.ready()
                    ? call_.client().MakeStream(call_.thread(), context, CU_STREAM_NON_BLOCKING)
                    : nullptr) {
    if (stream_ == nullptr) {
      if (call_.ready()) call_.Refuse(CUDA_ERROR_OUT_OF_MEMORY);
      return;
    }
    call_.Stream(reinterpret_cast<CUstream>(stream_->handle.bits), false, &wire_);
  }
  ~Ferry() {
    if (stream_ != nullptr) call_.client().DropStream(call_.thread(), *stream_);
  }

  CUresult Copy(const Place& target, const Place& source, const Shape& shape) {
    return call_.ready() ? CopyBetween(call_, wire_, target, source, shape, false) : call_.result();
  }

 private:
  Call call_;
  StreamRecord* const stream_;
  uint64_t wire_ = 0;
};

// Null for memory of this process.
ContextRecord* OwnerOf(const Call& call, const Place& place) {
  ContextRecord* owner = place.owner;
  if (owner == nullptr) {
    call.objects().plan.DeviceRange(place.address, 1, call.session().index(), &owner);
  }
  return owner;
}

CUresult Synchronize(const Call& call, ContextRecord* context) {
  if (context == nullptr) return CUDA_SUCCESS;
  Call there(call, *context->session, context);
  if (!there.ready()) return there.result();
  return there.Invoke(commands::CuCtxSynchronize_v2{context->wire.bits});
}

uint64_t After(const Place& place, uint64_t slice, uint64_t row, uint64_t column) {
  return place.address + (slice * place.slice_rows + row) * place.pitch + column;
}

// By rows, or parts of one where it is longer than a piece.
CUresult MovePieces(Ferry& from, Ferry& to, const Place& target, const Place& source,
                    const Shape& shape) {
  const uint64_t width = std::min(shape.width, kPieceBytes);
  const uint64_t rows = std::min(shape.height, std::max<uint64_t>(1, kPieceBytes / width));
  std::vector<std::byte> here(width * rows);
  for (uint64_t slice = 0; slice < shape.depth; ++slice) {
    for (uint64_t row = 0; row < shape.height; row += rows) {
      for (uint64_t column = 0; column < shape.width; column += width) {
        Shape piece;
        piece.width = std::min(width, shape.width - column);
        piece.height = std::min(rows, shape.height - row);
        const Place middle{reinterpret_cast<uint64_t>(here.data()), piece.width, piece.height};
        CUresult result = from.Copy(
            middle, {After(source, slice, row, column), source.pitch, piece.height}, piece);
        if (result == CUDA_SUCCESS) {
          result = to.Copy({After(target, slice, row, column), target.pitch, piece.height}, middle,
                           piece);
        }
        if (result != CUDA_SUCCESS) return result;
      }
    }
  }
  return CUDA_SUCCESS;
}

bool PeerContext(Call& call, CUcontext context, Place* place) {
  ContextRecord* const record =
      call.client().FindContext(Handle{reinterpret_cast<uint64_t>(context)});
  if (record == nullptr) return call.Refuse(CUDA_ERROR_INVALID_CONTEXT);
  if (!record->active) return call.Refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED);
  place->owner = record;
  place->context = record->wire.bits;
  return true;
}

CUresult CopyPeer(Call& call, CUdeviceptr target_address, CUcontext target_context,
                  CUdeviceptr source_address, CUcontext source_context, size_t bytes,
                  CUstream stream, bool per_thread, bool asynchronous) {
  Place target{target_address}, source{source_address};
  commands::CuMemcpyPeerAsync command{};
  if (!call.ready() || !PeerContext(call, target_context, &target) ||
      !PeerContext(call, source_context, &source) ||
      !call.Stream(stream, per_thread, &command.hStream)) {
    return call.result();
  }
  if (bytes == 0) return CUDA_SUCCESS;
  if (!AtOneServer(call, target, source)) {
    return CopyAcross(call, command.hStream, target, source, {bytes}, asynchronous);
  }
  if (!call.DeviceRange(target_address, bytes) || !call.DeviceRange(source_address, bytes)) {
    return call.result();
  }
  if (!asynchronous) {
    const CUresult waited = WaitForPeers(call, target, source);
    if (waited != CUDA_SUCCESS) return waited;
  }
  command.dstDevice = target_address;
  command.dstContext = target.context;
  command.srcDevice = source_address;
  command.srcContext = source.context;
  command.ByteCount = bytes;
  const CUresult posted = call.Post(command, {}, 1);
  return posted != CUDA_SUCCESS || asynchronous ? posted
                                                : Synchronize(call, call.stream()->context);
}

}  // namespace

CUresult WaitForPeers(Call& call, const Place& target, const Place& source) {
  CUresult waited = Synchronize(call, target.owner);
  if (waited == CUDA_SUCCESS && source.owner != target.owner) {
    waited = Synchronize(call, source.owner);
  }
  return waited;
}

bool NamedContext(Call& call, CUcontext context, Place* place) {
  return context == nullptr || PeerContext(call, context, place);
}

bool AtOneServer(const Call& call, const Place& target, const Place& source) {
  if (call.client().sessions().size() == 1) return true;
  for (const Place* const place : {&target, &source}) {
    const ContextRecord* const owner = OwnerOf(call, *place);
    if (owner != nullptr && owner->session != &call.session()) return false;
  }
  return true;
}

CUresult CopyAcross(Call& call, uint64_t stream, const Place& target, const Place& source,
                    const Shape& shape, bool asynchronous) {
  if (shape.empty()) return CUDA_SUCCESS;
  ContextRecord* const to = OwnerOf(call, target);
  ContextRecord* const from = OwnerOf(call, source);
  commands::CuStreamSynchronize before{};
  before.hStream = stream;
  CUresult waited = call.Invoke(before);
  if (!asynchronous) {
    // As CopyPeer does.
    if (waited == CUDA_SUCCESS) waited = Synchronize(call, to);
    if (waited == CUDA_SUCCESS && from != to) waited = Synchronize(call, from);
  }
  if (waited != CUDA_SUCCESS) return waited;
  if (to == nullptr || from == nullptr || to->session == from->session) {
    ContextRecord* const there = to != nullptr ? to : from;
    if (there == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return Ferry(call, *there).Copy(target, source, shape);
  }
  Ferry ferry_from(call, *from), ferry_to(call, *to);
  return MovePieces(ferry_from, ferry_to, target, source, shape);
}

CUresult CuMemcpyPeer(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                      CUcontext source_context, size_t bytes, bool per_thread) {
  Call call(Function::kCuMemcpyPeer, Call::kContext);
  return CopyPeer(call, target, target_context, source, source_context, bytes, nullptr, per_thread,
                  false);
}

CUresult CuMemcpyPeerAsync(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                           CUcontext source_context, size_t bytes, CUstream stream,
                           bool per_thread) {
  Call call(Function::kCuMemcpyPeerAsync, Call::kContext);
  return CopyPeer(call, target, target_context, source, source_context, bytes, stream, per_thread,
                  true);
}

}  // namespace penstock::interposer
