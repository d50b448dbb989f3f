// The process-wide client: what cuInit builds from the environment, and the one global that the
// exported functions need.
//
//   PENSTOCK_SERVER=HOST:PORT   the server; without it there is no device
//   PENSTOCK_KEY_FILE=FILE      the key, if the server asks for one
//   PENSTOCK_GPUS=N             how many devices to ask for; 0 for all (default: all)
//   PENSTOCK_TRANSPORT=auto|shm|rdma|tcp   transport/choice.h; default auto
//   PENSTOCK_RDMA_RAILS=LOCAL[,LOCAL...]   local addresses of the rails; default: the routes decide
//   PENSTOCK_RDMA_TIMEOUT=MS    how long an RDMA connection may take to make; default 5000
//   PENSTOCK_RDMA_SPIN_US=US    how long to look for an answer before sleeping; default 20, or 0 on
//                               a host with fewer than four processors
//   PENSTOCK_RDMA_PEER_TIMEOUT=MS   how long the server may be out of reach; default 10000
//   PENSTOCK_SYNC=1             every call waits for its result
//   PENSTOCK_STATS=FILE         counts, as JSON, when the program ends (statistics.h)
//   PENSTOCK_DISABLE=a,b        switches optimisations off: post, inline, staging, reserve,
//                               window (a program can then fill the driver's launch queue)
//   CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, CUDA_LAUNCH_BLOCKING, CUDA_MODULE_LOADING
//                               as NVIDIA documents them for its driver
//
// The client is never destroyed: NVIDIA's runtime calls the driver from exit handlers. A destructor
// of the library, which runs after those, says goodbye and writes the statistics. The child of a
// fork has no client until it calls cuInit itself; then it has its own session.
#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "interposer/core/devices.h"
#include "interposer/core/session.h"
#include "interposer/core/thread_state.h"

namespace penstock::interposer {

// The version that this library's functions are those of.
inline constexpr int kDriverVersion = 13000;

struct ClientOptions {
  std::string statistics_file;
  std::optional<std::string> visible_devices;
  std::string device_order;
  bool launch_blocking = false;
  bool lazy_loading = true;
};

class Client {
 public:
  Client(std::unique_ptr<Session> session, ClientOptions options);

  // Null before cuInit.
  static Client* Get() { return current_.load(std::memory_order_acquire); }
  // cuInit.
  static CUresult Initialise();
  // Makes it the process's client. The one before leaks.
  static void Install(std::unique_ptr<Client> client);
  // At the end of the process: goodbye and statistics. Calls fail from then on.
  static void Finish();

  Session& session() { return *session_; }
  const ClientOptions& options() const { return options_; }
  const std::vector<Device>& devices() const { return devices_; }
  // Null for a number that is none.
  const Device* FindDevice(CUdevice ordinal) const;
  // By the number at the server. Contexts are only made on visible devices.
  CUdevice OrdinalOf(uint32_t wire) const;
  int driver_version() const;

  // The stream that CU_STREAM_PER_THREAD names: made on first use, one-way. Null when handles have
  // run out or the session has ended.
  StreamRecord* PerThreadStream(ThreadState& thread, ContextRecord& context);

  // Guards retains and activity of primary contexts.
  std::mutex& contexts_mutex() { return contexts_mutex_; }
  // Forgets everything that lives in a context which the server has destroyed.
  void DropContext(ContextRecord& context);

 private:
  static void OnThreadExit(ThreadState& thread);

  static std::atomic<Client*> current_;
  const std::unique_ptr<Session> session_;
  const ClientOptions options_;
  const std::vector<Device> devices_;
  std::mutex contexts_mutex_;
};

}  // namespace penstock::interposer
