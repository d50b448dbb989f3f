#include "tools/penstock/private_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "common/clock.h"
#include "common/env.h"
#include "common/unique_fd.h"
#include "tools/penstock/path_list.h"

namespace penstock {
namespace {

constexpr int64_t kStartLimitMs = 20'000;  // a loaded machine may take seconds to start a process
constexpr int64_t kEndLimitMs = 5'000;
constexpr useconds_t kPollIntervalUs = 2'000;
constexpr size_t kKeyBytes = 32;

// The loopback address is open to every user of the machine, so even a private daemon asks for a
// key.
Status WriteKey(const std::string& path) {
  unsigned char key[kKeyBytes];
  if (getrandom(key, sizeof(key), 0) != sizeof(key)) return FailErrno("Cannot get random bytes");
  std::string text;
  char digits[3];
  for (const unsigned char byte : key) {
    snprintf(digits, sizeof(digits), "%02x", byte);
    text += digits;
  }
  text += '\n';
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid() || write(file.get(), text.data(), text.size()) != ssize_t(text.size())) {
    return FailErrno("Cannot write the key file (" + path + ")");
  }
  return {};
}

// In the child: the daemon gets no terminal input, no stdout, none of our signals' fate (its own
// session) and nothing of the environment that is meant for the program alone: a choice of devices
// would be made twice, and its numbers mean another thing the second time.
[[noreturn]] void ExecDaemon(const Layout& layout, const std::string& port_file,
                             const std::string& key_file, int gpus) {
  setsid();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int null = open("/dev/null", O_RDWR);
  dup2(null, STDIN_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  setenv("LD_PRELOAD", WithoutEntry(EnvString("LD_PRELOAD"), layout.interposer).c_str(), 1);
  setenv("LD_LIBRARY_PATH",
         WithoutEntry(EnvString("LD_LIBRARY_PATH"), layout.library_folder).c_str(), 1);
  unsetenv("CUDA_VISIBLE_DEVICES");
  if (gpus > 0) setenv("SIMGPU_DEVICES", std::to_string(gpus).c_str(), 1);
  execl(layout.daemon.c_str(), layout.daemon.c_str(), "--listen", "127.0.0.1:0", "--driver", "sim",
        "--port-file", port_file.c_str(), "--key-file", key_file.c_str(), "--parent-pid-dies",
        nullptr);
  fprintf(stderr, "penstock: Cannot start the daemon (%s): %s.\n", layout.daemon.c_str(),
          strerror(errno));
  _exit(127);
}

}  // namespace

Result<PrivateDaemon> PrivateDaemon::Start(const Layout& layout, int gpus) {
  PrivateDaemon daemon;
  std::string folder = EnvString("TMPDIR", "/tmp") + "/penstock-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    return FailErrno("Cannot make a temporary folder (" + folder + ")");
  }
  daemon.folder_ = folder;
  daemon.key_file_ = folder + "/key";
  const std::string port_file = folder + "/port";
  RETURN_IF_ERROR(WriteKey(daemon.key_file_));

  daemon.pid_ = fork();
  if (daemon.pid_ < 0) return FailErrno("Cannot fork");
  if (daemon.pid_ == 0) ExecDaemon(layout, port_file, daemon.key_file_, gpus);
  RETURN_IF_ERROR(daemon.WaitForPort(port_file));
  return daemon;
}

Status PrivateDaemon::WaitForPort(const std::string& port_file) {
  const Deadline deadline = Deadline::After(kStartLimitMs);
  for (;;) {
    int port = 0;
    if (FILE* file = fopen(port_file.c_str(), "re")) {
      const bool read = fscanf(file, "%d", &port) == 1;
      fclose(file);
      if (read && port > 0) {
        address_ = "127.0.0.1:" + std::to_string(port);
        return {};
      }
    }
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      Forget();
      return Fail(Code::kUnavailable, "The private daemon ends before it accepts connections.");
    }
    if (deadline.expired()) {
      return Fail(Code::kTimeout, "The private daemon does not accept connections within (" +
                                      std::to_string(kStartLimitMs / 1000) + ") seconds.");
    }
    usleep(kPollIntervalUs);
  }
}

PrivateDaemon::PrivateDaemon(PrivateDaemon&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      folder_(std::exchange(other.folder_, "")),
      address_(std::move(other.address_)),
      key_file_(std::move(other.key_file_)) {}

PrivateDaemon::~PrivateDaemon() {
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    const Deadline deadline = Deadline::After(kEndLimitMs);
    while (waitpid(pid_, nullptr, WNOHANG) == 0) {
      if (deadline.expired()) {
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        break;
      }
      usleep(kPollIntervalUs);
    }
  }
  if (!folder_.empty()) {
    unlink((folder_ + "/key").c_str());
    unlink((folder_ + "/port").c_str());
    rmdir(folder_.c_str());
  }
}

}  // namespace penstock
