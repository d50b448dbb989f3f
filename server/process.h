// Starting penstockd again in another role, with exactly the descriptors that role may have.
#pragma once

#include <sys/types.h>

#include <span>
#include <string>

#include "common/result.h"
#include "common/unique_fd.h"

namespace penstock::server {

struct Child {
  pid_t pid = -1;
  UniqueFd pidfd;  // readable when the process has ended
};

// Path of this executable, as the kernel knows it.
std::string ExecutablePath();

// Runs this executable with the one argument. The child's descriptors 3, 4, ... are the given ones
// in order; 0 is /dev/null; 1 and 2 are inherited; nothing else is open. It dies with this process,
// and LD_PRELOAD is taken out of its environment.
Result<Child> SpawnSelf(const char* argument, std::span<const int> descriptors);

// A sealed memory file with these bytes, and its content again. The receiver can trust that what it
// has read stays what it was.
Result<UniqueFd> SealedFile(const char* name, std::span<const std::byte> bytes);
Result<std::string> ReadSealedFile(int fd, size_t max_bytes);

// One message of bytes and descriptors over a unix socket.
Status SendDescriptors(int socket, std::span<const int> descriptors);
// Waits for one; exactly `count` descriptors.
Status ReceiveDescriptors(int socket, std::span<UniqueFd> descriptors);

}  // namespace penstock::server
