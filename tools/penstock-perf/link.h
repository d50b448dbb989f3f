// Two ends of a transport for measuring it, and a socket beside it on which they arrange things.
//
// The serving end listens; the other one dials, says which transport it wants, and both make a
// Connection of it. In one command on one host the serving end is a forked child. There is no key:
// whoever reaches the port can have its bytes moved about, so serve on networks you trust only.
#pragma once

#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "common/result.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"

namespace penstock::perf {

inline constexpr size_t kMostMessageBytes = 64 << 10;
inline constexpr int kPatienceMs = 60'000;  // an emulated machine is slow

struct LinkOptions {
  std::string transport = "rdma";  // or "tcp"
  // rdma: comma-separated addresses of the serving end's rails, none: every device with one; and of
  // this end's, none: the system's choice.
  std::string rails, from;
};

struct Link {
  UniqueFd arranging;
  std::string peer_host;  // as dialled; empty on the serving end
  std::unique_ptr<transport::Connection> connection;
};

Status SendMessage(int fd, const nlohmann::json& message);
Result<nlohmann::json> ReceiveMessage(int fd, Deadline deadline = Deadline::After(kPatienceMs));

Result<Link> Dial(const std::string& host, uint16_t port, const LinkOptions& options);
// Waits for one end to dial and does what it asks for.
Result<Link> Accept(transport::tcp::Listener& listener);

}  // namespace penstock::perf
