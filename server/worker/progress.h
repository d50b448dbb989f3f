// How far each stream has come, so that the client can bound the unfinished operations of a stream
// without asking. After some cost the worker writes a counter into the stream with
// cuStreamWriteValue32; the device writes it to pinned memory when it gets there.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "protocol/frame.h"
#include "server/worker/objects.h"

namespace penstock::server {

class Worker;

class Progress {
 public:
  explicit Progress(Worker& worker) : worker_(worker) {}

  // An operation of this cost has been put into the stream, whose context is current.
  void Charge(const std::shared_ptr<StreamState>& stream, uint32_t cost);
  // Makes everything issued so far visible. The stream's context must be current.
  CUresult Mark(const std::shared_ptr<StreamState>& stream);
  // The stream has been destroyed. Waits and transfers may still hold it; its words are used again
  // once the device is through with it.
  void Destroy(const std::shared_ptr<StreamState>& stream);
  // Words for gates and marks.
  CUresult EnsureWords(StreamState& stream);
  // A slot whose bytes the newest operation of the stream reads.
  void HoldSlot(const std::shared_ptr<StreamState>& stream, InlineSlot slot);
  // What the operation that is being issued frees.
  void HoldCharge(const std::shared_ptr<StreamState>& stream,
                  std::shared_ptr<Quota::Charge> charge);
  // The client counts more than we do (calls that failed before they named a stream).
  void CatchUp(const std::shared_ptr<StreamState>& stream, uint64_t value);
  // The context has failed: nothing will finish any more, and nobody may wait for it.
  void GiveUp(const std::shared_ptr<StreamState>& stream);

  // A staging slot of the client has been read.
  void ReleaseStagingSlot(uint32_t slot);

  // Reads the words. True if a stream has moved.
  bool Step();
  // Tells the client: all news, or only when they are worth a frame.
  bool Tell(bool all);
  // Something may still move.
  bool active() const { return !active_.empty(); }

 private:
  bool Look(StreamState& stream);
  void Retire(StreamState& stream);

  static constexpr uint32_t kMarkEvery = 32;
  static constexpr uint64_t kTellEvery = 96;  // a fraction of kStreamWindow
  static constexpr size_t kTellSlots = 8;

  Worker& worker_;
  std::vector<std::shared_ptr<StreamState>> active_;  // with unseen marks
  std::vector<std::shared_ptr<StreamState>> untold_;  // finished > told
  std::vector<uint32_t> untold_slots_;
  std::vector<uint64_t> slot_releases_;  // by slot
};

}  // namespace penstock::server
