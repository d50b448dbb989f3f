// What penstockd is told: by its command line, and by a TOML file below it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"
#include "config/pool_file.h"
#include "transport/choice.h"

namespace penstock::server {

// Whether bulk data goes straight between NICs and device memory: where it works, never, or else no
// session.
enum class GpuDirectMode : uint32_t { kAuto, kOff, kOn };

// [transport] in the file. What the numbers mean stands in transport/rdma/rdma.h.
struct TransportSettings {
  transport::Choice choice = transport::Choice::kAuto;
  std::vector<std::string> rdma_addresses;  // offered to clients; empty: every RDMA device's
  uint32_t rails = 4;
  uint32_t control_traffic_class = 0, bulk_traffic_class = 0;
  uint32_t timeout = 14, retry_count = 6;
  uint32_t keepalive_ms = 1000, peer_timeout_ms = 10'000;
  GpuDirectMode gpu_direct = GpuDirectMode::kAuto;
};

struct Options {
  std::string listen_host = "127.0.0.1";
  uint16_t listen_port = 14833;
  std::string driver = "auto";  // auto, sim or a path
  std::string key_file;
  std::string port_file;
  std::string log;  // as PENSTOCK_LOG; "" leaves that in force
  uint32_t max_sessions = 64;
  uint32_t drain_seconds = 30;    // after SIGTERM, for the sessions to end; 0: at once
  uint32_t silence_seconds = 30;  // a session that says nothing for so long is ended
  // Started as root, each worker runs as its own user: this number plus its place among the
  // sessions. The range lies above what distributions give to people and containers.
  uint32_t first_worker_uid = 2'000'000'000;
  // Group that may open the GPU's device files, where they are not open to everybody; 0 for none.
  uint32_t device_gid = 0;
  bool isolate = true;
  TransportSettings transport;
  config::PoolSize pool;  // without it every program sees all GPUs, unlimited
  bool parent_pid_dies = false;
};

// Reads the arguments, then the file that --config names for everything the arguments leave open.
// An error's message is for stderr and complete. For --help: kUnsupported with the text to print.
Result<Options> ParseOptions(int argc, char** argv);

// "sim" and "auto" become what dlopen takes. `executable` is the path of penstockd.
std::string DriverLibrary(const std::string& driver, const std::string& executable);

}  // namespace penstock::server
