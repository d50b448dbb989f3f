// Which transport a side is told to use, and whether this host has what RDMA needs.
//
//   auto   shared memory if the server's address is a loopback one, RDMA where both hosts have an
//          RDMA device, tcp elsewhere; trouble with the first two ends in tcp
//   shm    shared memory or an error
//   rdma   RDMA or an error
//   tcp    nothing else
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"

namespace penstock::transport {

enum class Choice : uint32_t { kAuto = 0, kRdma = 1, kTcp = 2, kShm = 3 };

// "auto", "shm", "rdma" or "tcp". `what` names the setting for the error: "Transport
// (--transport)".
Result<Choice> ParseChoice(const std::string& text, const std::string& what);
const char* ChoiceName(Choice choice);

// The kernel's RDMA devices, by a look into sysfs that opens none: "mlx5_0", "rxe0".
std::vector<std::string> RdmaDeviceNames();

// True for numeric addresses that are this host's own for sure: 127/8 and ::1. Takes a connected
// socket.
bool PeerIsLoopback(int socket);

// "a,b" to {"a", "b"}; each must be a numeric IPv4 or IPv6 address, at most four.
Result<std::vector<std::string>> ParseRailAddresses(const std::string& text,
                                                    const std::string& what);
Status CheckRailAddresses(const std::vector<std::string>& addresses, const std::string& what);

}  // namespace penstock::transport
