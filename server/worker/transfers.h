// Copies between client memory and the device.
//
// A copy touches client memory exactly when its stream reaches it (the *stream gate*): two
// operations go into the program's stream,
//
//   cuStreamWriteValue32(reached, n)      the device says: everything before the copy is done
//   cuStreamWaitValue32(go >= n)          and waits here until the copy is
//
// and when the dispatch loop sees `reached`, the bytes are moved in chunks over an internal copy
// stream that is ordered behind nothing: Get from the client and then to the device, or from the
// device and then Put to the client. The last chunk releases `go`. Price: a poll between reached
// and the first chunk.
//
// Copies of at most kMaxInlineCopyBytes travel in the frames themselves and need no gate: their
// bytes are private to the worker from the start (or leave with the reply), so the copy goes
// straight into the program's stream.
//
// Where NICs reach the device's memory (gpu_direct.h), a large copy needs no chunk: the same pieces
// go straight between the two, under the same gate. If that turns out not to work, the transfer
// begins again with chunks, which nobody notices, because the gate is still closed.
//
// Client memory that this process reaches itself (shared memory) and the driver has pinned needs
// none of it: the copy goes straight into the program's stream, from or to where the bytes are.
//
// Each transfer is a state machine that Step moves on. A chunk is taken only by a transfer whose
// stream has reached it, so transfers never wait for each other in a circle.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "protocol/operations.h"
#include "server/worker/objects.h"
#include "server/worker/outbox.h"
#include "server/worker/pins.h"
#include "transport/transport.h"

namespace penstock::server {

class CallContext;
class Worker;

class Transfers {
 public:
  explicit Transfers(Worker& worker);
  ~Transfers();

  CUresult Upload(CallContext& call, const UploadCommand& command, const VolumeShape& volume,
                  std::span<const std::byte> inlined);
  CUresult Download(CallContext& call, const DownloadCommand& command, const VolumeShape& volume);

  // Moves everything on. True if anything has moved.
  bool Step();
  // A Get or Put of this class has ended; false if the cookie is none of its own.
  bool OnBulkDone(uint64_t cookie, transport::BulkStatus status);
  // The context is going: its transfers end with this error, its gates open.
  void DropContext(const ContextState& context, CUresult error);
  bool empty() const { return transfers_.empty(); }

 private:
  struct Piece;
  struct Transfer;

  CUresult UploadInline(CallContext& call, const UploadCommand& command, const VolumeShape& volume,
                        std::span<const std::byte> bytes);
  CUresult DownloadInline(CallContext& call, const DownloadCommand& command,
                          const VolumeShape& volume);
  CUresult Begin(CallContext& call, Transfer transfer);
  // False if the client's memory cannot be reached.
  bool CopyDirectly(CallContext& call, const Transfer& transfer, CUresult* result);
  bool Advance(Transfer& transfer);
  bool Reached(Transfer& transfer);
  // Starts the next piece; false when there is none or no room for it now.
  bool StartPiece(Transfer& transfer);
  bool StartDirectPiece(Transfer& transfer);
  // Everything is moved: true if it must begin again with chunks.
  bool MustRestart(Transfer& transfer);
  bool MovePiece(Transfer& transfer, Piece& piece);
  // The bounce slot of a piece, if it needs one; false while there is none to move the piece with.
  bool HasBounceSlot(Transfer& transfer, Piece& piece);
  void OnFilled(uint64_t id, uint32_t slot);
  bool IssueMoves(Transfer& transfer, Piece& piece);
  CUresult CopyOnDevice(Transfer& transfer, Piece& piece);
  void FinishPiece(Transfer& transfer, Piece& piece);
  void Fail(Transfer& transfer, CUresult error);
  void OpenGate(Transfer& transfer);
  void SayPulled(Transfer& transfer);
  void SayDone(Transfer& transfer);

  // Pieces of one transfer under way. Each thread on the way of a download (device, worker, socket)
  // may be off its processor for a while; with fewer pieces the others soon had nothing to do.
  static constexpr size_t kDepth = 6;
  static constexpr uint32_t kMostMoves = 256;  // Gets or Puts of one piece under way

  Worker& worker_;
  Pins pins_;
  std::list<Transfer> transfers_;  // in the order of their calls
  uint64_t next_id_ = 1;
};

}  // namespace penstock::server
