#include "server/worker/transfers.h"

#include <algorithm>
#include <cstring>

#include "common/clock.h"
#include "common/log.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// Cookies of bulk moves: transfer id and chunk.
constexpr uint64_t kCookieChunks = 1u << 8;
static_assert(kChunks < kCookieChunks);
// Pieces without a chunk are numbered from here, for their cookies.
constexpr uint32_t kDirectPieces = kChunks + 1;
constexpr uint64_t kDirectPieceBytes = 4 << 20;

bool AfterOrAt(uint32_t value, uint32_t wanted) {
  return static_cast<int32_t>(value - wanted) >= 0;
}

transport::MemoryKey KeyOf(const WireMemoryKey& wire) {
  transport::MemoryKey key;
  static_assert(sizeof key == sizeof wire);
  memcpy(static_cast<void*>(&key), &wire, sizeof key);
  return key;
}

// What an honest client sends: no wrap-around, rows that do not overlap.
bool ShapeIsSane(uint64_t width, uint64_t height, uint64_t pitch) {
  constexpr uint64_t kMost = 1ull << 47;
  if (width > kMost || height > kMost || pitch > kMost) return false;
  if (height > 1 && pitch < width) return false;
  return height == 0 || pitch == 0 || (height - 1) <= kMost / pitch;
}

// The same of a volume's slices on one side.
bool VolumeIsSane(const VolumeShape& volume, uint64_t rows, uint64_t width, uint64_t height,
                  uint64_t pitch) {
  constexpr uint64_t kMost = 1ull << 47;
  if (!ShapeIsSane(width, height, pitch)) return false;
  if (volume.depth <= 1) return true;
  return volume.depth <= kMost && rows <= kMost && rows >= height && pitch >= width &&
         (height == 0 || volume.depth <= kMost / height) &&
         (rows == 0 || volume.depth <= kMost / rows) &&
         (pitch == 0 || rows * volume.depth <= kMost / pitch);
}

// A volume between memory that we reach, with slices of that many rows, and the device: one
// operation whatever its depth.
CUresult MoveVolume(const Driver& driver, bool to_device, CUdeviceptr device, uint64_t device_pitch,
                    std::byte* host, uint64_t host_pitch, uint64_t host_rows, uint64_t width,
                    uint64_t height, const VolumeShape& volume, CUstream stream) {
  CUDA_MEMCPY3D copy = {};
  copy.WidthInBytes = width;
  copy.Height = height;
  copy.Depth = volume.depth;
  copy.srcMemoryType = to_device ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  copy.dstMemoryType = to_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  copy.srcHost = copy.dstHost = host;
  copy.srcDevice = copy.dstDevice = device;
  copy.srcPitch = to_device ? host_pitch : device_pitch;
  copy.dstPitch = to_device ? device_pitch : host_pitch;
  copy.srcHeight = to_device ? host_rows : volume.device_rows;
  copy.dstHeight = to_device ? volume.device_rows : host_rows;
  return driver.cuMemcpy3DAsync_v2(&copy, stream);
}

CUDA_MEMCPY2D Rows(uint64_t width, uint64_t height) {
  CUDA_MEMCPY2D copy = {};
  copy.WidthInBytes = width;
  copy.Height = height;
  return copy;
}

CUresult ToDevice(const Driver& driver, CUdeviceptr target, uint64_t target_pitch,
                  const void* source, uint64_t source_pitch, uint64_t width, uint64_t height,
                  CUstream stream) {
  if (height == 1 || (target_pitch == width && source_pitch == width)) {
    return driver.cuMemcpyHtoDAsync_v2(target, source, width * height, stream);
  }
  CUDA_MEMCPY2D copy = Rows(width, height);
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = source;
  copy.srcPitch = source_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = target;
  copy.dstPitch = target_pitch;
  return driver.cuMemcpy2DAsync_v2(&copy, stream);
}

CUresult FromDevice(const Driver& driver, void* target, uint64_t target_pitch, CUdeviceptr source,
                    uint64_t source_pitch, uint64_t width, uint64_t height, CUstream stream) {
  if (height == 1 || (source_pitch == width && target_pitch == width)) {
    return driver.cuMemcpyDtoHAsync_v2(target, source, width * height, stream);
  }
  CUDA_MEMCPY2D copy = Rows(width, height);
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = source;
  copy.srcPitch = source_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = target;
  copy.dstPitch = target_pitch;
  return driver.cuMemcpy2DAsync_v2(&copy, stream);
}

}  // namespace

// Part of a transfer that one chunk holds: whole rows, packed, or a part of one long row.
struct Transfers::Piece {
  enum class State { kFilling, kMoving, kOnDevice, kDone };  // kFilling: by the client, its slot
  uint32_t chunk = kChunks;
  uint32_t slot = BounceSlots::kNone;
  State state = State::kMoving;
  uint64_t row = 0, column = 0;  // of the first byte
  uint64_t rows = 0, width = 0;
  uint64_t stride = 0;        // between rows in the chunk
  uint64_t moves_issued = 0;  // Gets or Puts, `moves` in all
  uint64_t moves_done = 0, moves = 0;
  uint32_t number = 0;  // value of the copy stream's word when it is through the copy stream
  bool direct() const { return chunk >= kDirectPieces; }
};

struct Transfers::Transfer {
  enum class State { kGated, kMoving, kFailed };
  uint64_t id = 0;
  bool upload = false;
  State state = State::kGated;
  ReplyToken token;
  ReplyWhen reply_when = ReplyWhen::kNever;
  std::shared_ptr<ContextState> context;
  std::shared_ptr<StreamState> stream;
  // Rows are numbered through all slices.
  uint64_t device = 0, width = 0, height = 0, device_pitch = 0;
  VolumeShape volume{};
  bool remote = false;  // the other side is client memory, else `bytes`
  bool staged = false, bounced = false;
  uint32_t slot = 0;
  transport::MemoryKey key;
  uint64_t offset = 0, host_pitch = 0;
  std::vector<std::byte> bytes;          // of a small copy that found no slot
  std::shared_ptr<DirectMemory> direct;  // null: through chunks
  bool restart = false;                  // the direct way has failed
  bool gated = false;
  uint32_t gate = 0;  // value of both gate words
  uint64_t next_row = 0, next_column = 0;
  std::vector<Piece> pieces;
  bool all_started = false, pulled = false;
  bool answered_fine = false;
  bool context_lost = false;  // its streams do nothing any more
  CUresult error = CUDA_SUCCESS;
  int64_t since_ns = 0, asked_ns = 0;

  uint64_t rows() const { return height * volume.depth; }
  uint64_t DeviceOffset(uint64_t row) const {
    return (row / height * volume.device_rows + row % height) * device_pitch;
  }
  uint64_t HostOffset(uint64_t row) const {
    return (row / height * volume.host_rows + row % height) * host_pitch;
  }
  uint32_t& copies_issued() const {
    return upload ? context->uploads_issued : context->downloads_issued;
  }
  CUstream copy_stream() const {
    return upload ? context->upload_stream : context->download_stream;
  }
  // Nothing lies between the rows on either side.
  bool packed() const {
    return volume.depth == 1 && (height == 1 || (device_pitch == width && host_pitch == width));
  }
  uint64_t DeviceExtent() const { return DeviceOffset(rows() - 1) + width; }
  uint64_t HostExtent() const { return HostOffset(rows() - 1) + width; }
  bool suits_direct() const {
    return remote && (packed() ? width * height : width) >= kLeastDirectBytes;
  }
};

Transfers::Transfers(Worker& worker) : worker_(worker), pins_(worker) {}
Transfers::~Transfers() = default;

CUresult Transfers::Upload(CallContext& call, const UploadCommand& command,
                           const VolumeShape& volume, std::span<const std::byte> inlined) {
  CUstream stream;
  const bool staged = command.place == HostPlace::kStaged;
  if (staged && command.slot >= kSmallStagingSlots + kLargeStagingSlots) {
    return call.Malformed("An upload names a staging slot that does not exist.");
  }
  if (!VolumeIsSane(volume, volume.device_rows, command.width, command.height,
                    command.target_pitch) ||
      !VolumeIsSane(volume, volume.host_rows, command.width, command.height, command.host_pitch)) {
    return call.Malformed("An upload has an impossible shape.");
  }
  bool fine = call.Stream(command.stream, &stream) &&
              call.DeviceRange3D(command.target, command.target_pitch, volume.device_rows,
                                 command.width, command.height, volume.depth);
  if (!fine || command.width == 0 || command.height == 0 || volume.depth == 0) {
    if (staged) worker_.progress().ReleaseStagingSlot(command.slot);
    return fine ? CUDA_SUCCESS : call.error();
  }
  if (command.place == HostPlace::kInline) return UploadInline(call, command, volume, inlined);
  const bool bounced = command.place == HostPlace::kBounced;
  if (bounced && (!call.token().needed || command.host_pitch != command.width ||
                  volume.host_rows != command.height)) {
    return call.Malformed("An upload through bounce slots is posted, or not packed.");
  }
  Transfer transfer;
  transfer.bounced = bounced;
  transfer.upload = true;
  transfer.device = command.target;
  transfer.width = command.width;
  transfer.height = command.height;
  transfer.volume = volume;
  transfer.device_pitch = command.target_pitch;
  transfer.reply_when = command.reply_when;
  transfer.remote = true;
  transfer.staged = staged;
  transfer.slot = command.slot;
  transfer.key = KeyOf(command.key);
  transfer.offset = command.offset;
  transfer.host_pitch = command.host_pitch;
  return Begin(call, std::move(transfer));
}

CUresult Transfers::UploadInline(CallContext& call, const UploadCommand& command,
                                 const VolumeShape& volume, std::span<const std::byte> bytes) {
  if (bytes.size() > kMaxInlineCopyBytes ||
      bytes.size() != command.width * command.height * volume.depth) {
    return call.Malformed("An inline upload has another size than its bytes.");
  }
  const auto context = worker_.current();
  const auto stream = call.stream_state();
  if (CUresult result = worker_.PrepareContext(*context); result != CUDA_SUCCESS) return result;
  const InlineSlot slot = context->arena->TakeSlot(static_cast<uint32_t>(bytes.size()));
  if (slot.address != nullptr) {
    memcpy(slot.address, bytes.data(), bytes.size());
    const CUresult result =
        volume.depth > 1
            ? MoveVolume(worker_.driver(), true, command.target, command.target_pitch, slot.address,
                         command.width, command.height, command.width, command.height, volume,
                         stream->stream)
            : ToDevice(worker_.driver(), command.target, command.target_pitch, slot.address,
                       command.width, command.width, command.height, stream->stream);
    if (result == CUDA_SUCCESS) {
      worker_.progress().HoldSlot(stream, slot);
    } else {
      context->arena->ReturnSlot(slot);
    }
    if (result != CUDA_SUCCESS || command.reply_when != ReplyWhen::kDone) return result;
    return worker_.waits().ForStreams(call, context, {stream});
  }
  // Many small copies are waiting: this one waits outside pinned memory, behind a gate.
  worker_.progress().Mark(stream);
  Transfer transfer;
  transfer.upload = true;
  transfer.device = command.target;
  transfer.width = command.width;
  transfer.height = command.height;
  transfer.volume = {volume.depth, volume.device_rows, command.height};
  transfer.device_pitch = command.target_pitch;
  transfer.host_pitch = command.width;
  transfer.reply_when = command.reply_when;
  transfer.bytes.assign(bytes.begin(), bytes.end());
  return Begin(call, std::move(transfer));
}

CUresult Transfers::Download(CallContext& call, const DownloadCommand& command,
                             const VolumeShape& volume) {
  CUstream stream;
  if (!VolumeIsSane(volume, volume.device_rows, command.width, command.height,
                    command.source_pitch) ||
      !VolumeIsSane(volume, volume.host_rows, command.width, command.height, command.host_pitch)) {
    return call.Malformed("A download has an impossible shape.");
  }
  if (!call.Stream(command.stream, &stream) ||
      !call.DeviceRange3D(command.source, command.source_pitch, volume.device_rows, command.width,
                          command.height, volume.depth)) {
    return call.error();
  }
  if (command.width == 0 || command.height == 0 || volume.depth == 0) return CUDA_SUCCESS;
  if (command.place == HostPlace::kInline) return DownloadInline(call, command, volume);
  const bool bounced = command.place == HostPlace::kBounced;
  if (bounced && (!call.token().needed || command.host_pitch != command.width ||
                  volume.host_rows != command.height)) {
    return call.Malformed("A download through bounce slots is posted, or not packed.");
  }
  Transfer transfer;
  transfer.bounced = bounced;
  transfer.device = command.source;
  transfer.width = command.width;
  transfer.height = command.height;
  transfer.volume = volume;
  transfer.device_pitch = command.source_pitch;
  transfer.reply_when = command.reply_when;
  transfer.remote = true;
  transfer.key = KeyOf(command.key);
  transfer.offset = command.offset;
  transfer.host_pitch = command.host_pitch;
  return Begin(call, std::move(transfer));
}

CUresult Transfers::DownloadInline(CallContext& call, const DownloadCommand& command,
                                   const VolumeShape& volume) {
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(command.width, command.height * volume.depth, &bytes) ||
      bytes > kMaxInlineCopyBytes || !call.token().needed) {
    return call.Malformed("An inline download is too large, or nobody waits for it.");
  }
  const auto context = worker_.current();
  const auto stream = call.stream_state();
  if (CUresult result = worker_.PrepareContext(*context); result != CUDA_SUCCESS) return result;
  const InlineSlot slot = context->arena->TakeSlot(static_cast<uint32_t>(bytes));
  if (slot.address == nullptr) {
    Transfer transfer;
    transfer.device = command.source;
    transfer.width = command.width;
    transfer.height = command.height;
    transfer.volume = {volume.depth, volume.device_rows, command.height};
    transfer.device_pitch = command.source_pitch;
    transfer.host_pitch = command.width;
    transfer.reply_when = ReplyWhen::kDone;
    transfer.bytes.resize(bytes);
    return Begin(call, std::move(transfer));
  }
  CUevent event = nullptr;
  CUresult result = worker_.TakeEvent(*context, &event);
  if (result == CUDA_SUCCESS) {
    result = volume.depth > 1
                 ? MoveVolume(worker_.driver(), false, command.source, command.source_pitch,
                              slot.address, command.width, command.height, command.width,
                              command.height, volume, stream->stream)
                 : FromDevice(worker_.driver(), slot.address, command.width, command.source,
                              command.source_pitch, command.width, command.height, stream->stream);
  }
  if (result == CUDA_SUCCESS) {
    result = worker_.driver().cuEventRecord(event, stream->stream);
    // The device may still write to the slot, so it does not come back at once.
    if (result != CUDA_SUCCESS) worker_.progress().HoldSlot(stream, slot);
  } else {
    context->arena->ReturnSlot(slot);
  }
  if (result != CUDA_SUCCESS) {
    if (event != nullptr) worker_.ReturnEvent(*context, event);
    return result;
  }
  Wait wait;
  wait.token = call.token();
  wait.context = context;
  wait.events.push_back(event);
  wait.reveals_output = true;
  wait.finish = [context, slot, bytes](std::vector<std::byte>* body) {
    body->assign(slot.address, slot.address + bytes);
    context->arena->ReturnSlot(slot);
    return CUDA_SUCCESS;
  };
  if (!worker_.options().deferred_waits) worker_.driver().cuEventSynchronize(event);
  worker_.waits().Add(std::move(wait));
  return kDeferred;
}

namespace {

// What a copy in the program's stream needs until it is done, or its context is gone.
struct DirectCopy {
  std::shared_ptr<const void> memory;
  Progress* progress = nullptr;  // of a staged one
  uint32_t slot = 0;
  ~DirectCopy() {
    if (progress != nullptr) progress->ReleaseStagingSlot(slot);
  }
};

}  // namespace

bool Transfers::CopyDirectly(CallContext& call, const Transfer& transfer, CUresult* result) {
  const Driver& driver = worker_.driver();
  const auto context = worker_.current();
  const transport::Access access =
      transfer.upload ? transport::Access::kPeerReads : transport::Access::kPeerWrites;
  transport::ReachedMemory memory;
  if (!worker_.connection().Reach(transfer.key, transfer.offset, transfer.HostExtent(), access,
                                  &memory) ||
      !pins_.Usable(context, memory)) {
    return false;
  }
  CUevent event = nullptr;
  *result = worker_.TakeEvent(*context, &event);
  if (*result != CUDA_SUCCESS) return true;
  auto held = std::make_shared<DirectCopy>();
  held->memory = std::move(memory.keep);
  if (transfer.staged) {
    held->progress = &worker_.progress();
    held->slot = transfer.slot;
  }
  const CUstream stream = call.stream_state()->stream;
  if (transfer.volume.depth > 1) {
    *result = MoveVolume(driver, transfer.upload, transfer.device, transfer.device_pitch,
                         memory.address, transfer.host_pitch, transfer.volume.host_rows,
                         transfer.width, transfer.height, transfer.volume, stream);
  } else {
    *result = transfer.upload
                  ? ToDevice(driver, transfer.device, transfer.device_pitch, memory.address,
                             transfer.host_pitch, transfer.width, transfer.height, stream)
                  : FromDevice(driver, memory.address, transfer.host_pitch, transfer.device,
                               transfer.device_pitch, transfer.width, transfer.height, stream);
  }
  if (*result == CUDA_SUCCESS) *result = driver.cuEventRecord(event, stream);
  if (*result != CUDA_SUCCESS) {
    worker_.ReturnEvent(*context, event);
    return true;
  }
  Wait wait;
  wait.token = call.token();
  wait.context = context;
  wait.events.push_back(event);
  wait.reveals_output = wait.token.needed;
  wait.finish = [held](std::vector<std::byte>*) { return CUDA_SUCCESS; };
  if (!worker_.options().deferred_waits && wait.token.needed) driver.cuEventSynchronize(event);
  worker_.waits().Add(std::move(wait));
  *result = kDeferred;
  return true;
}

CUresult Transfers::Begin(CallContext& call, Transfer transfer) {
  if (CUresult direct;
      transfer.remote && !transfer.bounced && CopyDirectly(call, transfer, &direct)) {
    return direct;
  }
  const Driver& driver = worker_.driver();
  transfer.id = next_id_++;
  transfer.token = call.token();
  transfer.context = worker_.current();
  transfer.stream = call.stream_state();
  transfer.since_ns = transfer.asked_ns = NowNanoseconds();
  if (transfer.reply_when == ReplyWhen::kNever && transfer.token.needed) {
    transfer.reply_when = ReplyWhen::kDone;
  }
  StreamState& stream = *transfer.stream;
  CUresult result = worker_.PrepareContext(*transfer.context);
  if (result == CUDA_SUCCESS) result = worker_.progress().EnsureWords(stream);
  if (result == CUDA_SUCCESS && worker_.options().gate) {
    Arena& arena = *transfer.context->arena;
    transfer.gate = stream.gates + 1;
    result = driver.cuStreamWriteValue32_v2(
        stream.stream, arena.DeviceAddress(stream.words.reached), transfer.gate, 0);
    if (result == CUDA_SUCCESS) {
      ++stream.gates;
      result = driver.cuStreamWaitValue32_v2(stream.stream, arena.DeviceAddress(stream.words.go),
                                             transfer.gate, CU_STREAM_WAIT_VALUE_GEQ);
      transfer.gated = result == CUDA_SUCCESS;
    }
  } else if (result == CUDA_SUCCESS) {
    transfer.state = Transfer::State::kMoving;
  }
  if (result != CUDA_SUCCESS) {
    // A staging slot is the client's again, whatever happened.
    if (transfer.staged) worker_.progress().ReleaseStagingSlot(transfer.slot);
    return result;
  }
  if (transfer.suits_direct()) {
    transfer.direct =
        worker_.gpu_direct().Find(transfer.context, transfer.device, transfer.DeviceExtent());
  }
  transfers_.push_back(std::move(transfer));
  Advance(transfers_.back());
  return kDeferred;
}

bool Transfers::Reached(Transfer& transfer) {
  StreamState& stream = *transfer.stream;
  if (AfterOrAt(transfer.context->arena->Load(stream.words.reached), transfer.gate)) {
    transfer.state = Transfer::State::kMoving;
    return true;
  }
  constexpr int64_t kAskEveryNs = 50'000'000;
  const int64_t now = NowNanoseconds();
  if (now - transfer.asked_ns > kAskEveryNs) {
    transfer.asked_ns = now;
    // A context that has failed never reaches the copy, but says so.
    const CUresult result = worker_.driver().cuStreamQuery(transfer.copy_stream());
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) {
      Fail(transfer, result);
      transfer.context_lost = true;
      return true;
    }
  }
  return false;
}

bool Transfers::StartPiece(Transfer& transfer) {
  if (transfer.all_started || transfer.pieces.size() >= kDepth) return false;
  if (transfer.direct != nullptr) return StartDirectPiece(transfer);
  Piece piece;
  piece.chunk = transfer.context->arena->TakeChunk();
  if (piece.chunk == kChunks) return false;
  const bool packed = transfer.packed();
  const uint64_t most = transfer.bounced ? kBounceSlotBytes : kChunkBytes;
  piece.row = transfer.next_row;
  piece.column = transfer.next_column;
  if (packed || transfer.width > most) {
    // A part of one row, or of all of them where nothing lies between.
    const uint64_t whole = packed ? transfer.width * transfer.height : transfer.width;
    piece.rows = 1;
    piece.width = std::min(most, whole - piece.column);
    piece.stride = piece.width;
    piece.moves = 1;
    transfer.next_column += piece.width;
    if (transfer.next_column == whole) {
      transfer.next_column = 0;
      transfer.next_row += packed ? transfer.height : 1;
    }
  } else {
    // An upload may read what lies between rows when that saves moves; a download never writes it.
    const bool span = transfer.upload && transfer.host_pitch <= 2 * transfer.width;
    piece.stride = span ? transfer.host_pitch : transfer.width;
    const uint64_t left = transfer.height - piece.row % transfer.height;
    piece.rows = std::clamp<uint64_t>(most / piece.stride, 1, left);
    piece.width = transfer.width;
    piece.moves = span || transfer.host_pitch == transfer.width ? 1 : piece.rows;
    transfer.next_row += piece.rows;
  }
  transfer.all_started = transfer.next_row >= transfer.rows();
  transfer.pieces.push_back(piece);
  return true;
}

// A part of one row, or of all of them where nothing lies between.
bool Transfers::StartDirectPiece(Transfer& transfer) {
  if (transfer.direct->state != DirectMemory::State::kReady) return false;
  const bool packed = transfer.packed();
  const uint64_t whole = packed ? transfer.width * transfer.height : transfer.width;
  const uint64_t most = transfer.bounced ? kBounceSlotBytes : kDirectPieceBytes;
  Piece piece;
  piece.chunk = kDirectPieces;
  const auto taken = [&](const Piece& other) { return other.chunk == piece.chunk; };
  while (std::any_of(transfer.pieces.begin(), transfer.pieces.end(), taken)) ++piece.chunk;
  piece.row = transfer.next_row;
  piece.column = transfer.next_column;
  piece.rows = 1;
  piece.width = std::min(most, whole - piece.column);
  piece.stride = piece.width;
  piece.moves = 1;
  transfer.next_column += piece.width;
  if (transfer.next_column == whole) {
    transfer.next_column = 0;
    transfer.next_row += packed ? transfer.height : 1;
  }
  transfer.all_started = transfer.next_row >= transfer.rows();
  transfer.pieces.push_back(piece);
  return true;
}

bool Transfers::MustRestart(Transfer& transfer) {
  if (transfer.direct == nullptr || transfer.state != Transfer::State::kMoving) return false;
  if (!transfer.restart && transfer.upload) {
    const CUresult current = worker_.MakeCurrent(transfer.context);
    transfer.restart = current != CUDA_SUCCESS || !worker_.gpu_direct().Flush(*transfer.context);
  }
  if (!transfer.restart) return false;
  transfer.direct.reset();
  transfer.restart = transfer.all_started = false;
  transfer.next_row = transfer.next_column = 0;
  return true;
}

CUresult Transfers::CopyOnDevice(Transfer& transfer, Piece& piece) {
  const Driver& driver = worker_.driver();
  Arena& arena = *transfer.context->arena;
  if (CUresult result = worker_.MakeCurrent(transfer.context); result != CUDA_SUCCESS) {
    return result;
  }
  const CUdeviceptr device = transfer.device + transfer.DeviceOffset(piece.row) + piece.column;
  const CUstream stream = transfer.copy_stream();
  const CUresult copied =
      transfer.upload ? ToDevice(driver, device, transfer.device_pitch, arena.chunk(piece.chunk),
                                 piece.stride, piece.width, piece.rows, stream)
                      : FromDevice(driver, arena.chunk(piece.chunk), piece.width, device,
                                   transfer.device_pitch, piece.width, piece.rows, stream);
  if (copied != CUDA_SUCCESS) return copied;
  piece.number = ++transfer.copies_issued();
  const WordIndex word =
      transfer.upload ? transfer.context->upload_word : transfer.context->download_word;
  return driver.cuStreamWriteValue32_v2(stream, arena.DeviceAddress(word), piece.number, 0);
}

bool Transfers::HasBounceSlot(Transfer& transfer, Piece& piece) {
  if (!transfer.bounced || piece.slot != BounceSlots::kNone) return true;
  piece.slot = worker_.bounce().Take();
  if (piece.slot == BounceSlots::kNone) return false;
  if (!transfer.upload) return true;
  piece.state = Piece::State::kFilling;
  worker_.bounce().Lend(piece.slot, transfer.token.sequence,
                        piece.row * transfer.width + piece.column, piece.rows * piece.width,
                        [this, id = transfer.id, slot = piece.slot] { OnFilled(id, slot); });
  return false;
}

// The client has put a piece into its slot.
void Transfers::OnFilled(uint64_t id, uint32_t slot) {
  for (Transfer& transfer : transfers_) {
    if (transfer.id != id || transfer.state != Transfer::State::kMoving) continue;
    for (Piece& piece : transfer.pieces) {
      if (piece.slot == slot && piece.state == Piece::State::kFilling) {
        piece.state = Piece::State::kMoving;
        return;
      }
    }
  }
  worker_.bounce().Return(slot);  // the copy has failed meanwhile
}

// Gets or Puts, as many as fit now. True if any was issued.
bool Transfers::IssueMoves(Transfer& transfer, Piece& piece) {
  Arena& arena = *transfer.context->arena;
  bool any = false;
  while (piece.moves_issued < piece.moves && piece.moves_issued - piece.moves_done < kMostMoves) {
    const uint64_t index = piece.moves_issued;
    transport::MemoryRegion& region = piece.direct() ? *transfer.direct->region : arena.region();
    const uint64_t local = piece.direct() ? transfer.device - transfer.direct->begin +
                                                transfer.DeviceOffset(piece.row) + piece.column
                                          : arena.ChunkOffset(piece.chunk) + index * piece.stride;
    const uint64_t remote =
        transfer.bounced ? worker_.bounce().Offset(piece.slot)
                         : transfer.offset + transfer.HostOffset(piece.row + index) + piece.column;
    const uint64_t bytes =
        piece.moves == 1 ? (piece.rows - 1) * piece.stride + piece.width : piece.width;
    const uint64_t cookie = transfer.id * kCookieChunks + piece.chunk;
    transport::Connection& connection = worker_.connection();
    const transport::Outcome outcome =
        transfer.upload ? connection.Get(region, local, transfer.key, remote, bytes, cookie)
                        : connection.Put(region, local, transfer.key, remote, bytes, cookie);
    if (outcome == transport::Outcome::kAgain) break;
    ++piece.moves_issued;
    any = true;
    GpuDirect::Moved& moved = worker_.gpu_direct().moved();
    (piece.direct() ? moved.direct : moved.staged) += bytes;
    if (outcome == transport::Outcome::kClosed) {
      // The session ends anyway; nothing will be reported for this one.
      ++piece.moves_done;
      Fail(transfer, CUDA_ERROR_UNKNOWN);
      break;
    }
  }
  return any;
}

// One piece a step further. True if it has moved.
bool Transfers::MovePiece(Transfer& transfer, Piece& piece) {
  const ContextState& context = *transfer.context;
  if (piece.state == Piece::State::kMoving && transfer.state == Transfer::State::kMoving) {
    if (transfer.remote) {
      const bool given_up = transfer.restart && piece.moves_issued == piece.moves_done;
      if (!given_up && !HasBounceSlot(transfer, piece)) return piece.slot != BounceSlots::kNone;
      if (given_up) piece.moves_done = piece.moves;
      bool moved = given_up || IssueMoves(transfer, piece);
      if (piece.moves_done < piece.moves) return moved;
      if (piece.slot != BounceSlots::kNone) {
        if (transfer.upload || given_up) {
          worker_.bounce().Return(piece.slot);
        } else {
          worker_.bounce().Lend(piece.slot, transfer.token.sequence,
                                piece.row * transfer.width + piece.column,
                                piece.rows * piece.width);
        }
        piece.slot = BounceSlots::kNone;
      }
    } else if (transfer.upload) {
      memcpy(context.arena->chunk(piece.chunk),
             transfer.bytes.data() + piece.column + piece.row * transfer.width,
             piece.rows * piece.width);
    } else {
      memcpy(transfer.bytes.data() + piece.column + piece.row * transfer.width,
             context.arena->chunk(piece.chunk), piece.rows * piece.width);
    }
    if (!transfer.upload || piece.direct()) {
      piece.state = Piece::State::kDone;
      return true;
    }
    piece.state = Piece::State::kOnDevice;
    if (CUresult result = CopyOnDevice(transfer, piece); result != CUDA_SUCCESS) {
      Fail(transfer, result);
      transfer.context_lost = true;
    }
    return true;
  }
  if (piece.state == Piece::State::kOnDevice) {
    const WordIndex word = transfer.upload ? context.upload_word : context.download_word;
    if (!AfterOrAt(context.arena->Load(word), piece.number)) return false;
    piece.state = transfer.upload ? Piece::State::kDone : Piece::State::kMoving;
    return true;
  }
  return false;
}

bool Transfers::Advance(Transfer& transfer) {
  if (transfer.state == Transfer::State::kGated && !Reached(transfer)) return false;
  bool moved = false;
  if (transfer.direct != nullptr && transfer.direct->state == DirectMemory::State::kStaged &&
      transfer.state == Transfer::State::kMoving && !transfer.restart) {
    transfer.restart = transfer.all_started = moved = true;
  }
  while (transfer.state == Transfer::State::kMoving && StartPiece(transfer)) {
    moved = true;
    Piece& piece = transfer.pieces.back();
    if (transfer.upload || piece.direct()) {
      MovePiece(transfer, piece);
    } else {
      piece.state = Piece::State::kOnDevice;
      if (CUresult result = CopyOnDevice(transfer, piece); result != CUDA_SUCCESS) {
        Fail(transfer, result);
        transfer.context_lost = true;
      }
    }
  }
  for (Piece& piece : transfer.pieces) moved = MovePiece(transfer, piece) || moved;
  const int64_t now = NowNanoseconds();
  if (!moved && now - transfer.asked_ns > 50'000'000 &&
      transfer.state == Transfer::State::kMoving) {
    transfer.asked_ns = now;
    const CUresult result = worker_.driver().cuStreamQuery(transfer.copy_stream());
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) {
      Fail(transfer, result);
      transfer.context_lost = true;
    }
  }
  // A chunk of a failed transfer comes back when nothing touches it any more: no move, and not the
  // device, unless its context has failed.
  const auto over = [&transfer](const Piece& piece) {
    if (piece.state == Piece::State::kDone) return true;
    if (transfer.state != Transfer::State::kFailed) return false;
    if (piece.state == Piece::State::kFilling) return true;
    return piece.state == Piece::State::kMoving ? piece.moves_issued == piece.moves_done
                                                : transfer.context_lost;
  };
  std::erase_if(transfer.pieces, [&](const Piece& piece) {
    if (!over(piece)) return false;
    if (!piece.direct()) transfer.context->arena->ReturnChunk(piece.chunk);
    // (A slot that the client fills comes back by its answer.)
    if (piece.slot != BounceSlots::kNone && piece.state != Piece::State::kFilling) {
      worker_.bounce().Return(piece.slot);
    }
    return true;
  });
  // Directly moved bytes may have to be pulled once more, until all is well.
  if (transfer.upload && transfer.direct == nullptr && transfer.all_started && !transfer.pulled &&
      std::all_of(transfer.pieces.begin(), transfer.pieces.end(),
                  [](const Piece& piece) { return piece.state > Piece::State::kMoving; })) {
    SayPulled(transfer);
    moved = true;
  }
  return moved;
}

void Transfers::SayPulled(Transfer& transfer) {
  if (transfer.pulled) return;
  transfer.pulled = true;
  if (transfer.staged) worker_.progress().ReleaseStagingSlot(transfer.slot);
  if (transfer.reply_when == ReplyWhen::kPulled) {
    transfer.answered_fine = transfer.error == CUDA_SUCCESS;
    worker_.Answer(transfer.token, transfer.error);
  }
}

void Transfers::OpenGate(Transfer& transfer) {
  if (!transfer.gated) return;
  Arena& arena = *transfer.context->arena;
  const WordIndex go = transfer.stream->words.go;
  // Transfers of one stream pass its gate in order, so the word only grows.
  if (go != 0 && !AfterOrAt(arena.Load(go), transfer.gate)) arena.Store(go, transfer.gate);
  transfer.gated = false;
}

void Transfers::SayDone(Transfer& transfer) {
  transfer.direct.reset();  // behind the gate there may be a free
  OpenGate(transfer);
  if (transfer.upload) SayPulled(transfer);
  if (transfer.reply_when == ReplyWhen::kDone || transfer.reply_when == ReplyWhen::kNever) {
    worker_.ForwardOutput();
    std::span<const std::byte> body;
    if (!transfer.upload && !transfer.remote && transfer.error == CUDA_SUCCESS) {
      body = transfer.bytes;
    }
    worker_.Answer(transfer.token, transfer.error, body);
  } else if (transfer.error != CUDA_SUCCESS && transfer.answered_fine) {
    transfer.token.needed = false;  // as for a posted call
    worker_.Answer(transfer.token, transfer.error);
  }
}

void Transfers::Fail(Transfer& transfer, CUresult error) {
  if (transfer.state == Transfer::State::kFailed) return;
  LOG_DEBUG("transfer", "A copy fails with %s.", ErrorName(worker_.driver(), error));
  transfer.state = Transfer::State::kFailed;
  transfer.error = error;
  transfer.all_started = true;
}

bool Transfers::OnBulkDone(uint64_t cookie, transport::BulkStatus status) {
  const uint64_t id = cookie / kCookieChunks;
  for (Transfer& transfer : transfers_) {
    if (transfer.id != id) continue;
    for (Piece& piece : transfer.pieces) {
      if (piece.chunk != cookie % kCookieChunks) continue;
      ++piece.moves_done;
      if (status == transport::BulkStatus::kRefused) {
        LOG_WARNING("transfer", "The client refuses a bulk move: its memory is not registered.");
        Fail(transfer, CUDA_ERROR_INVALID_VALUE);
      } else if (status == transport::BulkStatus::kUnreachable && piece.direct()) {
        transfer.direct->state = DirectMemory::State::kStaged;
        worker_.gpu_direct().Demote(
            transfer.context->device,
            {Code::kUnavailable, "A NIC does not reach the device's memory any more."});
      } else if (status != transport::BulkStatus::kOk) {
        Fail(transfer, CUDA_ERROR_UNKNOWN);
      }
      return true;
    }
  }
  return false;
}

bool Transfers::Step() {
  pins_.Sweep();
  bool moved = false;
  for (auto transfer = transfers_.begin(); transfer != transfers_.end();) {
    moved = Advance(*transfer) || moved;
    if (transfer->all_started && transfer->pieces.empty() && MustRestart(*transfer)) {
      moved = true;
    } else if (transfer->all_started && transfer->pieces.empty()) {
      SayDone(*transfer);
      transfer = transfers_.erase(transfer);
      moved = true;
    } else {
      ++transfer;
    }
  }
  return moved;
}

void Transfers::DropContext(const ContextState& context, CUresult error) {
  pins_.DropContext(context);
  for (Transfer& transfer : transfers_) {
    if (transfer.context.get() != &context) continue;
    Fail(transfer, error);
    // Of a copy that nobody waits for nothing is left to say: its failure would meet the thread in
    // the context's next life.
    if (!transfer.token.needed || transfer.answered_fine) transfer.error = CUDA_SUCCESS;
    transfer.context_lost = true;
    OpenGate(transfer);
  }
}

}  // namespace penstock::server
