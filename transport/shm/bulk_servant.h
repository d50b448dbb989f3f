// The client's half of moves from and to memory that is not shared: a thread that copies between
// the program's memory and the slots of the shared segment, as the server's descriptors say.
//
// It starts with the first registration: a program that only uses memory made for copies has no
// such thread. Every descriptor is copied before it is checked.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "transport/region_table.h"
#include "transport/shm/link.h"
#include "transport/shm/shared_memory.h"

namespace penstock::transport::shm {

class BulkServant {
 public:
  BulkServant(Link& link, Segment& segment, std::shared_ptr<RegionTable> regions)
      : link_(link), segment_(segment), regions_(std::move(regions)) {}
  ~BulkServant() { Stop(); }

  void EnsureStarted();
  // The link is closed before.
  void Stop();
  void Kick();

  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }

 private:
  void Run();
  bool ServeNext();
  // False: it breaks the protocol, and the link is closed.
  bool Serve(const BulkRequest& request, uint32_t slot, BulkReply* reply);

  Link& link_;
  Segment& segment_;
  const std::shared_ptr<RegionTable> regions_;
  std::mutex start_mutex_;
  bool started_ = false;  // under start_mutex_
  std::thread thread_;
  uint32_t served_ = 0;  // the thread's own
  std::atomic<uint64_t> bytes_sent_{0}, bytes_received_{0};
};

}  // namespace penstock::transport::shm
