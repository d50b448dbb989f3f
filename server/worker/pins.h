// Client memory that this process maps (Connection::Reach) and that the driver has pinned, so that
// copies between it and the device need nothing in between.
//
// Pinning a large range takes milliseconds and runs on the executor; until it is done, and where it
// cannot be done, copies take the ordinary way. The client takes memory back without a word to the
// dispatch thread: an entry that nobody but this class holds any more is unpinned soon after. A
// copy under way holds its memory, so it is never unpinned below the device.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <list>
#include <memory>

#include "transport/transport.h"

namespace penstock::server {

struct ContextState;
class Worker;

class Pins {
 public:
  explicit Pins(Worker& worker) : worker_(worker) {}

  // True if the driver has the memory pinned. If not, it soon may: ask again with the next copy.
  bool Usable(const std::shared_ptr<ContextState>& context, const transport::ReachedMemory& memory);
  // Lets go of what the client has taken back.
  void Sweep();
  // The driver forgets what was pinned in a context when that goes.
  void DropContext(const ContextState& context);

 private:
  enum class State { kPinning, kPinned, kRefused };
  struct Pin {
    std::byte* base = nullptr;
    size_t bytes = 0;
    std::shared_ptr<const void> keep;
    std::weak_ptr<ContextState> context;  // in which it is pinned
    State state = State::kPinning;
  };
  using Place = std::shared_ptr<Pin>;

  void Begin(const std::shared_ptr<ContextState>& context, const Place& pin);
  void End(const Place& pin);

  Worker& worker_;
  std::list<Place> pins_;
  int64_t swept_ns_ = 0;
};

}  // namespace penstock::server
