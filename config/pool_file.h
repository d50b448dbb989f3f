// The pool file: which servers a program's GPUs come from, in the order in which it numbers them,
// and how each server shares its GPUs. One file does for every machine: programs and tools read
// where the servers are, and each penstockd reads its own part (penstockd --pool FILE --name NAME).
//
//   key-file = "key"                 # for every server that names no other; beside this file
//
//   [[server]]
//   name = "gpu7"                    # default: the host of the address
//   address = "gpu7:14833"
//   key-file = "/etc/penstock/key"
//   transport = "auto"               # auto, shm, rdma or tcp
//   gpus = [0, 1]                    # offered; default: all
//   slots-per-gpu = 2                # programs on one GPU
//   memory-per-slot = "16 GiB"       # all that a program sees and gets of each of its GPUs
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"

namespace penstock::config {

// How a server shares its GPUs.
struct PoolSize {
  bool given = false;          // any of the following is
  std::vector<uint32_t> gpus;  // offered; empty: all
  uint32_t slots_per_gpu = 1;
  uint64_t memory_per_slot = 0;  // bytes; 0: no limit
};

struct PoolServer {
  std::string name;
  std::string address;    // HOST:PORT
  std::string key_file;   // empty: none
  std::string transport;  // empty: nothing is said
  PoolSize size;
};

struct PoolFile {
  std::string path;
  std::vector<PoolServer> servers;  // at least one, of distinct names and addresses
};

// Errors name file and line.
Result<PoolFile> ReadPoolFile(const std::string& path);

// Where the file is looked for if none is named: PENSTOCK_CONFIG, then
// ~/.config/penstock/pool.toml (XDG_CONFIG_HOME), then /etc/penstock/pool.toml. Empty if there is
// none; what PENSTOCK_CONFIG names is returned whether it is there or not.
std::string FindPoolFile();

struct Endpoint {
  std::string host;
  uint16_t port = 0;
};
// "host:port", "192.0.2.1:4711", "[2001:db8::1]:4711".
Result<Endpoint> ParseEndpoint(const std::string& text);

}  // namespace penstock::config
