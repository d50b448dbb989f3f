#include "transport/choice.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

namespace penstock::transport {
namespace {

constexpr const char* kDevices = "/sys/class/infiniband";
constexpr size_t kMostAddresses = 4;

bool IsNumeric(const std::string& text) {
  in6_addr address;
  return inet_pton(AF_INET, text.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

}  // namespace

Result<Choice> ParseChoice(const std::string& text, const std::string& what) {
  for (const Choice choice : {Choice::kAuto, Choice::kShm, Choice::kRdma, Choice::kTcp}) {
    if (text == ChoiceName(choice)) return choice;
  }
  return Fail(Code::kInvalidArgument, what + " (" + text + ") is not auto, shm, rdma or tcp.");
}

const char* ChoiceName(Choice choice) {
  switch (choice) {
    case Choice::kAuto:
      return "auto";
    case Choice::kRdma:
      return "rdma";
    case Choice::kTcp:
      return "tcp";
    case Choice::kShm:
      return "shm";
  }
  return "unknown";
}

std::vector<std::string> RdmaDeviceNames() {
  std::vector<std::string> names;
  DIR* folder = opendir(kDevices);
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

bool PeerIsLoopback(int socket) {
  sockaddr_storage peer = {};
  socklen_t bytes = sizeof peer;
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0) return false;
  if (peer.ss_family == AF_INET) {
    return (ntohl(reinterpret_cast<sockaddr_in*>(&peer)->sin_addr.s_addr) >> 24) == 127;
  }
  if (peer.ss_family != AF_INET6) return false;
  const in6_addr& address = reinterpret_cast<sockaddr_in6*>(&peer)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address) ||
         (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

Status CheckRailAddresses(const std::vector<std::string>& addresses, const std::string& what) {
  if (addresses.size() > kMostAddresses) {
    return Fail(Code::kInvalidArgument,
                what + " names more than 4 addresses (" + std::to_string(addresses.size()) + ").");
  }
  for (const std::string& address : addresses) {
    if (!IsNumeric(address)) {
      return Fail(Code::kInvalidArgument, what + " has an address (" + address +
                                              ") that is not a numeric IPv4 or IPv6 one.");
    }
  }
  return {};
}

Result<std::vector<std::string>> ParseRailAddresses(const std::string& text,
                                                    const std::string& what) {
  std::vector<std::string> addresses;
  for (size_t begin = 0; !text.empty() && begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    addresses.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  RETURN_IF_ERROR(CheckRailAddresses(addresses, what));
  return addresses;
}

}  // namespace penstock::transport
