// The process-wide client: what cuInit builds from the environment, and the one global that the
// exported functions need.
//
//   PENSTOCK_SERVER=HOST:PORT[,...]   the servers; without it a pool file names them (acquire.h)
//   PENSTOCK_CONFIG=FILE        the pool file (config/pool_file.h has the places without it)
//   PENSTOCK_KEY_FILE=FILE      the key, if the servers ask for one
//   PENSTOCK_GPUS=N             how many devices to ask for, or all (default: 1)
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
  // Sessions number i has index i, and all share their Objects. At least one.
  Client(std::vector<std::unique_ptr<Session>> sessions, ClientOptions options);

  // Null before cuInit.
  static Client* Get() { return current_.load(std::memory_order_acquire); }
  // cuInit.
  static CUresult Initialise();
  // Makes it the process's client. The one before leaks.
  static void Install(std::unique_ptr<Client> client);
  // At the end of the process: goodbye and statistics. Calls fail from then on.
  static void Finish();

  Objects& objects() { return *objects_; }
  const std::vector<std::unique_ptr<Session>>& sessions() const { return sessions_; }
  // CUDA_SUCCESS while any session lives.
  CUresult state() const;
  // Where calls go that name no device: the first.
  Session& session() { return *sessions_.front(); }
  const ClientOptions& options() const { return options_; }
  const std::vector<Device>& devices() const { return devices_; }
  // Null for a number that is none.
  const Device* FindDevice(CUdevice ordinal) const;
  // As the program names it; null if there is none. A primary one is found whether it is active or
  // not.
  ContextRecord* FindContext(Handle handle);
  int driver_version() const;  // the least of the servers' and ours

  // The stream that CU_STREAM_PER_THREAD names: made on first use, one-way. Null when handles have
  // run out or the session has ended.
  StreamRecord* PerThreadStream(ThreadState& thread, ContextRecord& context);

  // One of the library's own, one-way; null as above. And gone again.
  StreamRecord* MakeStream(ThreadState& thread, ContextRecord& context, unsigned flags);
  void DropStream(ThreadState& thread, StreamRecord& stream);

  // Guards retains and activity of primary contexts.
  std::mutex& contexts_mutex() { return contexts_mutex_; }
  // Forgets everything that lives in a context which the server has destroyed.
  void DropContext(ContextRecord& context);

 private:
  static void OnThreadExit(ThreadState& thread);

  static std::atomic<Client*> current_;
  const std::vector<std::unique_ptr<Session>> sessions_;
  const std::shared_ptr<Objects> objects_;
  const ClientOptions options_;
  const std::vector<Device> devices_;
  std::mutex contexts_mutex_;
};

}  // namespace penstock::interposer
