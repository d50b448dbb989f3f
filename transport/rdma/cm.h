// rdma_cm without its traps: events are copied and acknowledged as they are read, every step has a
// deadline, and an event finds its id by a number that is never used twice.
//
// One event channel serves all ids of a connection. Whoever waits for an event reads the channel
// for everybody and leaves what is not his in the mailbox.
#pragma once

#include <netinet/in.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "common/clock.h"
#include "common/result.h"
#include "transport/rdma/verbs.h"

namespace penstock::transport::rdma {

struct CmEvent {
  uint64_t tag = 0;  // of the id; of the listening id for a connection request
  rdma_cm_event_type type = RDMA_CM_EVENT_ADDR_ERROR;
  int status = 0;
  rdma_cm_id* request = nullptr;  // a connection request's new id, the receiver's to destroy
  uint8_t peer_reads = 0;         // a connection request: how many READs at a time the peer answers
  uint8_t private_bytes = 0;
  std::array<std::byte, 255> private_data{};
};
const char* EventName(rdma_cm_event_type type);

class CmChannel {
 public:
  static Result<std::unique_ptr<CmChannel>> Open(std::shared_ptr<Verbs> verbs);
  ~CmChannel();  // after every id

  int fd() const { return channel_->fd; }
  Verbs& verbs() const { return *verbs_; }

  // A new id. Its tag is `*tag`.
  Result<rdma_cm_id*> MakeId(uint64_t* tag);
  // Gives the id of a connection request a tag of its own.
  uint64_t Adopt(rdma_cm_id* id);

  // Waits for the next event of this tag. kTimeout at the deadline or when *cancel becomes true.
  Result<CmEvent> Wait(uint64_t tag, Deadline deadline, const std::atomic<bool>* cancel = nullptr);
  // Any event that nobody waits for.
  std::optional<CmEvent> TakeAny();
  // Nobody will ask for events of this tag any more.
  void Forget(uint64_t tag);

 private:
  CmChannel(std::shared_ptr<Verbs> verbs, rdma_event_channel* channel)
      : verbs_(std::move(verbs)), channel_(channel) {}
  void Read();  // under mutex_

  const std::shared_ptr<Verbs> verbs_;
  rdma_event_channel* const channel_;
  std::mutex mutex_;
  std::deque<CmEvent> mailbox_;   // under mutex_
  std::deque<uint64_t> awaited_;  // under mutex_: tags that somebody dials
  uint64_t next_tag_ = 1;         // under mutex_
  friend class Dialling;
};

// Marks a tag as somebody's who waits for its events, so that TakeAny leaves them alone.
class Dialling {
 public:
  Dialling(CmChannel& channel, uint64_t tag);
  ~Dialling();

 private:
  CmChannel& channel_;
  const uint64_t tag_;
};

// A numeric IPv4 or IPv6 address, with a port.
Result<sockaddr_storage> ParseAddress(const std::string& text, uint16_t port);
std::string FormatAddress(const sockaddr* address);
// The address of this host from which the system would send to `target`.
std::optional<sockaddr_storage> SourceFor(const sockaddr_storage& target);

}  // namespace penstock::transport::rdma
