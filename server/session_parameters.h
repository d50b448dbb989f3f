// What the supervisor tells a worker: a flat struct in a sealed memory file. It holds the session's
// secret, which therefore stands neither in the arguments nor in the environment.
#pragma once

#include <cstdint>

#include "protocol/device_name.h"
#include "protocol/hello.h"

namespace penstock::server {

// What penstockd's settings say of RDMA (options.h), and whether this session wants any.
struct RdmaSettings {
  uint32_t asked = 0;  // the client and the settings want it: the two will talk about it
  uint32_t only = 0;   // no session over tcp
  uint32_t most_rails = 4;
  uint32_t keepalive_ms = 1000;
  uint32_t peer_timeout_ms = 10'000;
  uint32_t gpu_direct = 0;  // a GpuDirectMode
  uint8_t timeout = 14;
  uint8_t retry_count = 6;
  uint8_t control_traffic_class = 0;
  uint8_t bulk_traffic_class = 0;
  char addresses[kMaxPathRails][kPathAddressBytes] = {};  // to offer; none: every device's
};

// The same for shared memory.
struct ShmSettings {
  uint32_t asked = 0;
  uint32_t only = 0;
};

struct SessionParameters {
  uint64_t session = 0;
  uint32_t epoch = 1;
  uint32_t device_count = 0;  // ordinals below it are the client's
  uint32_t slotted = 0;  // the devices are those of `uuids`, and no others; else the first ones
  uint32_t silence_seconds = 30;
  uint32_t uid = 0;  // to become; 0 for none
  uint32_t gid = 0;
  uint32_t isolate = 1;
  uint32_t client_pid = 0;
  int32_t supervisor_pid = 0;
  uint32_t simulated = 0;                          // the worker has kSimulatedMemoryDescriptor
  uint64_t memory_limit = 0;                       // of each device, bytes; 0: none
  uint64_t context_bytes[kMaxDevices] = {};        // what a context takes of each device
  char uuids[kMaxDevices][kDeviceNameBytes] = {};  // as CUDA_VISIBLE_DEVICES names them
  Nonce ticket{};
  RdmaSettings rdma;
  ShmSettings shm;
  char client_host[64] = {};
  char program[128] = {};
  char peer[64] = {};
  char driver[1024] = {};
  char log[256] = {};
};

// The worker's only message to the supervisor, before the sockets are handed over.
struct WorkerReady {
  uint32_t ok = 0;
  char error[196] = {};
};

// Descriptors of a worker process.
inline constexpr int kParametersDescriptor = 3;
inline constexpr int kSupervisorDescriptor = 4;
inline constexpr int kMeterDescriptor = 5;
inline constexpr int kSimulatedMemoryDescriptor = 6;
inline constexpr int kLogDescriptor = 7;

}  // namespace penstock::server
