#include "transport/rdma/device_events.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/log.h"
#include "transport/sleep.h"

namespace penstock::transport::rdma {
namespace {

struct Hub {
  std::mutex mutex;
  std::vector<DeviceEvents*> watchers;
};
Hub*& TheHub() {  // never destroyed: connections may outlive statics
  static Hub* hub = new Hub;
  return hub;
}

bool IsPortEvent(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_GID_CHANGE:
      return true;
    default:
      return false;
  }
}

const void* ObjectOf(const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_CQ_ERR:
      return event.element.cq;
    case IBV_EVENT_QP_FATAL:
      return event.element.qp;
    default:
      return nullptr;
  }
}

void Log(const char* device, const DeviceEvent& event) {
  switch (event.type) {
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_GID_CHANGE:
      LOG_WARNING("transport", "Port %u of device (%s): %s.", event.port, device,
                  EventName(event.type));
      return;
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_CQ_ERR:
      LOG_WARNING("transport", "Device (%s): %s.", device, EventName(event.type));
      return;
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return;  // part of every connection's life
    default:
      LOG_DEBUG("transport", "Device (%s) reports event %d.", device, static_cast<int>(event.type));
  }
}

}  // namespace

const char* EventName(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_PORT_ERR:
      return "the link is down";
    case IBV_EVENT_PORT_ACTIVE:
      return "the link is up";
    case IBV_EVENT_GID_CHANGE:
      return "its addresses have changed";
    case IBV_EVENT_DEVICE_FATAL:
      return "it has failed and works no more until it is reset";
    case IBV_EVENT_QP_FATAL:
      return "a queue pair has failed";
    case IBV_EVENT_CQ_ERR:
      return "a completion queue has lost completions";
    default:
      return "an unexpected event";
  }
}

bool DeviceEvent::Ends(const QueuePair& queue_pair) const {
  if (queue_pair.id()->verbs != context) return false;
  switch (type) {
    case IBV_EVENT_PORT_ERR:
      return queue_pair.id()->port_num == port;
    case IBV_EVENT_DEVICE_FATAL:
      return true;
    case IBV_EVENT_QP_FATAL:
      return object == queue_pair.qp();
    case IBV_EVENT_CQ_ERR:
      return object == queue_pair.send_cq() || object == queue_pair.receive_cq();
    default:
      return false;
  }
}

DeviceEvents::DeviceEvents(Verbs& verbs, Waker& keeper, int epoll)
    : verbs_(verbs), keeper_(keeper), epoll_(epoll) {
  std::lock_guard lock(TheHub()->mutex);
  TheHub()->watchers.push_back(this);
}

DeviceEvents::~DeviceEvents() {
  std::lock_guard lock(TheHub()->mutex);
  std::erase(TheHub()->watchers, this);
}

void DeviceEvents::Watch(ibv_context* context) {
  std::lock_guard lock(TheHub()->mutex);
  if (std::find(watched_.begin(), watched_.end(), context) != watched_.end()) return;
  watched_.push_back(context);
  // Reading must never wait, since another connection may be faster.
  fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
  WatchReadable(epoll_, context->async_fd);
}

void DeviceEvents::AbandonAfterFork() {
  TheHub() = new Hub;
  for (const ibv_context* context : watched_) {
    close(context->cmd_fd);
    close(context->async_fd);
  }
}

void DeviceEvents::Read(ibv_context* context) {
  ibv_async_event event = {};
  while (verbs_.GetAsyncEvent(context, &event) == 0) {
    DeviceEvent copy;
    copy.context = context;
    copy.type = event.event_type;
    copy.port = IsPortEvent(event.event_type) ? static_cast<uint8_t>(event.element.port_num) : 0;
    copy.object = ObjectOf(event);
    verbs_.AckAsyncEvent(&event);  // whoever destroys the object waits for it
    Log(verbs_.GetDeviceName(context->device), copy);
    for (DeviceEvents* watcher : TheHub()->watchers) {
      const auto& theirs = watcher->watched_;
      if (std::find(theirs.begin(), theirs.end(), context) == theirs.end()) continue;
      watcher->mailbox_.push_back(copy);
      if (watcher != this) watcher->keeper_.Signal();
    }
  }
}

std::vector<DeviceEvent> DeviceEvents::Take() {
  std::lock_guard lock(TheHub()->mutex);
  for (ibv_context* context : watched_) Read(context);
  return std::exchange(mailbox_, {});
}

}  // namespace penstock::transport::rdma
