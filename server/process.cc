#include "server/process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <csignal>
#include <cstring>

#include <vector>

extern char** environ;

namespace penstock::server {
namespace {

constexpr int kFirstDescriptor = 3;
constexpr size_t kMaxDescriptors = 8;
constexpr int kParking = 100;  // descriptors are moved up here before they get their numbers

// Between fork and exec only calls that are safe after a fork are made.
[[noreturn]] void BecomeChild(pid_t parent, const char* executable, char* const* arguments,
                              char* const* environment, std::span<const int> descriptors) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(126);  // it died before the line above
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  int parked[kMaxDescriptors];
  for (size_t i = 0; i < descriptors.size(); ++i) {
    parked[i] = fcntl(descriptors[i], F_DUPFD, kParking);
    if (parked[i] < 0) _exit(126);
  }
  const int null = open("/dev/null", O_RDWR);
  if (null < 0) _exit(126);
  dup2(null, 0);
  for (size_t i = 0; i < descriptors.size(); ++i) {
    dup2(parked[i], kFirstDescriptor + static_cast<int>(i));
  }
  syscall(SYS_close_range, kFirstDescriptor + static_cast<unsigned>(descriptors.size()), ~0u, 0u);
  execve(executable, arguments, environment);
  _exit(127);
}

}  // namespace

std::string ExecutablePath() {
  char path[4096];
  const ssize_t bytes = readlink("/proc/self/exe", path, sizeof path);
  return bytes <= 0 ? std::string("penstockd") : std::string(path, bytes);
}

Result<Child> SpawnSelf(const char* argument, std::span<const int> descriptors) {
  if (descriptors.size() > kMaxDescriptors) {
    return Fail(Code::kInternal, "A child process cannot get so many descriptors.");
  }
  char* arguments[] = {const_cast<char*>("penstockd"), const_cast<char*>(argument), nullptr};
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (strncmp(*entry, "LD_PRELOAD=", 11) != 0) environment.push_back(*entry);
  }
  environment.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return FailErrno("Cannot fork");
  if (pid == 0) {
    BecomeChild(parent, "/proc/self/exe", arguments, environment.data(), descriptors);
  }
  Child child;
  child.pid = pid;
  child.pidfd = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!child.pidfd.valid()) {
    auto error = FailErrno("Cannot watch the new process");
    kill(pid, SIGKILL);
    return error;
  }
  return child;
}

Result<UniqueFd> SealedFile(const char* name, std::span<const std::byte> bytes) {
  UniqueFd file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) return FailErrno("Cannot make a memory file");
  if (write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    return FailErrno("Cannot write a memory file");
  }
  constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
  if (fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) return FailErrno("Cannot seal a memory file");
  return file;
}

Result<std::string> ReadSealedFile(int fd, size_t max_bytes) {
  struct stat status;
  if (fstat(fd, &status) != 0) return FailErrno("Cannot look at the memory file");
  if (static_cast<size_t>(status.st_size) > max_bytes) {
    return Fail(Code::kInternal, "Memory file is too large.");
  }
  std::string bytes(status.st_size, '\0');
  if (pread(fd, bytes.data(), bytes.size(), 0) != status.st_size) {
    return FailErrno("Cannot read the memory file");
  }
  return bytes;
}

Status SendDescriptors(int socket, std::span<const int> descriptors) {
  char byte = 1;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
  memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != 1) {
    return FailErrno("Cannot hand descriptors over");
  }
  return {};
}

Status ReceiveDescriptors(int socket, std::span<UniqueFd> descriptors) {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return FailErrno("Cannot receive descriptors");
  if (got == 0) return Fail(Code::kUnavailable, "The supervisor gave this session up.");
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS ||
      header->cmsg_len != CMSG_LEN(sizeof(int) * descriptors.size())) {
    return Fail(Code::kInternal, "The supervisor's message has not the expected descriptors.");
  }
  for (size_t i = 0; i < descriptors.size(); ++i) {
    int fd;
    memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
    descriptors[i] = UniqueFd(fd);
  }
  return {};
}

}  // namespace penstock::server
