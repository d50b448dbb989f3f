// What devices say of themselves: ports that go down and come back, addresses that change, queue
// pairs and whole devices that fail.
//
// rdma_cm opens a device once per process, so its events belong to all connections of the process,
// and each can be read only once. Whoever is woken first reads all there are, acknowledges them,
// and leaves a copy for every connection that watches the device. What is left of an event is plain
// data: `object` is to be compared, never followed.
//
// Nothing depends on these events: a link that dies elsewhere in the fabric raises none, and a
// failed request tells of most troubles, too. They tell sooner.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "transport/rdma/queue_pair.h"
#include "transport/rdma/verbs.h"
#include "transport/waker.h"

namespace penstock::transport::rdma {

struct DeviceEvent {
  const ibv_context* context = nullptr;
  ibv_event_type type = IBV_EVENT_DEVICE_FATAL;
  uint8_t port = 0;              // events of a port
  const void* object = nullptr;  // events of a queue pair or completion queue

  // Whether this queue pair is no good any more.
  bool Ends(const QueuePair& queue_pair) const;
  // Whether what could not be connected before may be worth a try.
  bool GivesHope() const { return type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_GID_CHANGE; }
};
const char* EventName(ibv_event_type type);

class DeviceEvents {
 public:
  // `epoll` is woken by the devices, `keeper` when another connection has read something for us.
  DeviceEvents(Verbs& verbs, Waker& keeper, int epoll);
  ~DeviceEvents();

  void Watch(ibv_context* context);
  // What has happened on the watched devices since the last call. One line of the log for each
  // event that means anything.
  std::vector<DeviceEvent> Take();
  // In a forked child: the devices' descriptors go. A thread of the parent may have held the lock.
  void AbandonAfterFork();

 private:
  void Read(ibv_context* context);  // under the mutex of all

  Verbs& verbs_;
  Waker& keeper_;
  const int epoll_;
  // Under the mutex of all:
  std::vector<ibv_context*> watched_;
  std::vector<DeviceEvent> mailbox_;
};

}  // namespace penstock::transport::rdma
