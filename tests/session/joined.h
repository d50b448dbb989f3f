// A client and a worker of one process, joined over a transport of the test's choice. The test
// calls the CUDA functions that our libcuda exports, and looks at the client's counters.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "functions.gen.h"
#include "interposer/core/client.h"
#include "server/worker/worker.h"
#include "tests/transport/rdma_pair.h"

namespace penstock {

enum class Carrier {
  kPlain,   // inproc, where memory is registered for each copy
  kDear,    // inproc that says registering is dear
  kRdma,    // fake verbs
  kDirect,  // the same, with NICs that reach the device's memory
};
const char* NameOf(Carrier path);

struct CallCounts {
  uint64_t calls, round_trips, posted;
  bool operator==(const CallCounts&) const = default;
};

class Joined {
 public:
  explicit Joined(Carrier path);
  ~Joined();

  // Runs on a thread of its own, in the primary context of device 0.
  void Run(const std::function<void()>& body);
  interposer::SessionCounters& counters() { return client_->session().counters(); }
  // The server is gone from one moment to the next.
  void HangUp() { worker_->Stop(); }
  // Bytes that went between NICs and the device without staging.
  uint64_t moved_directly() { return worker_->gpu_direct().moved().direct; }
  static CallCounts CountsOf(Function function);

 private:
  transport::RdmaPair rdma_;
  std::unique_ptr<server::Worker> worker_;
  std::thread thread_;
  interposer::Client* client_ = nullptr;
};

}  // namespace penstock
