// What a worker can still do after it has given up everything: each attempt is made in a process of
// its own that isolates itself exactly as a worker does, and tells what came of it.
#include <linux/capability.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "server/isolation.h"

namespace penstock::server {
namespace {

// Runs `body` in an isolated process; what it returns is the exit status (below 200).
int Isolated(const std::function<int()>& body) {
  const pid_t supervisor = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    for (const int number : {SIGABRT, SIGUSR1}) signal(number, SIG_DFL);  // Catch has its own
    SessionParameters parameters;
    parameters.supervisor_pid = supervisor;
    if (geteuid() == 0) parameters.uid = parameters.gid = 2'000'000'123;
    if (!Isolate(parameters)) _exit(200);
    if (!ForbidSystemCalls()) _exit(201);
    _exit(body());
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// The errno of a call that returned `result`, 0 if it worked.
int Error(long result) {
  return result < 0 ? errno : 0;
}

std::map<std::string, std::string> OwnStatus() {
  std::map<std::string, std::string> fields;
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    const size_t text = line.find_first_not_of(" \t", colon + 1);
    if (text != std::string::npos) fields[line.substr(0, colon)] = line.substr(text);
  }
  return fields;
}

}  // namespace

TEST_CASE("an isolated worker has no way to other processes", "[server][isolation]") {
  static const pid_t other = getpid();
  CHECK(Isolated([] { return Error(kill(other, 0)); }) == EPERM);
  CHECK(Isolated([] { return Error(kill(-1, SIGKILL)); }) == EPERM);
  CHECK(Isolated([] { return Error(syscall(SYS_tgkill, other, other, 0)); }) == EPERM);
  CHECK(Isolated([] { return Error(syscall(SYS_tkill, other, 0)); }) == EPERM);
  CHECK(Isolated([] { return Error(syscall(SYS_pidfd_open, other, 0)); }) == EPERM);
  CHECK(Isolated([] { return Error(ptrace(PTRACE_ATTACH, other, nullptr, nullptr)); }) == EPERM);
  CHECK(Isolated([] {
          char byte = 0;
          iovec mine = {&byte, 1}, theirs = {&byte, 1};
          return Error(process_vm_readv(other, &mine, 1, &theirs, 1, 0));
        }) == EPERM);
  CHECK(Isolated([] {
          rlimit limit = {};
          return Error(syscall(SYS_prlimit64, other, RLIMIT_CPU, nullptr, &limit));
        }) == EPERM);
}

TEST_CASE("an isolated worker makes threads, but neither processes nor namespaces",
          "[server][isolation]") {
  CHECK(Isolated([] {
          int value = 0;
          std::thread thread([&value] { value = 42; });
          thread.join();
          return value;
        }) == 42);
  const auto forked = [](long pid) {
    if (pid == 0) _exit(0);
    return Error(pid);
  };
  CHECK(Isolated([&] { return forked(fork()); }) == EPERM);
  CHECK(Isolated([&] { return forked(syscall(SYS_vfork)); }) == EPERM);
  CHECK(Isolated([&] {
          return forked(syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, nullptr, nullptr, nullptr, 0));
        }) == EPERM);
  CHECK(Isolated([] { return Error(syscall(SYS_clone3, nullptr, 0)); }) == ENOSYS);
  CHECK(Isolated([] { return Error(unshare(CLONE_NEWUSER)); }) == EPERM);
  CHECK(Isolated([] {
          char* arguments[] = {const_cast<char*>("true"), nullptr};
          return Error(execv("/bin/true", arguments));
        }) == EPERM);
}

TEST_CASE("an isolated worker has no way to the kernel, the network or the terminal",
          "[server][isolation]") {
  CHECK(Isolated([] { return Error(socket(AF_INET, SOCK_STREAM, 0)); }) == EPERM);
  CHECK(Isolated([] { return Error(socket(AF_NETLINK, SOCK_RAW, 0)); }) == EPERM);
  CHECK(Isolated([] { return Error(socket(AF_UNIX, SOCK_STREAM, 0)); }) == 0);
  CHECK(Isolated([] { return Error(mount("none", "/", "tmpfs", 0, nullptr)); }) == EPERM);
  for (const long call :
       {SYS_bpf, SYS_perf_event_open, SYS_init_module, SYS_kexec_load, SYS_keyctl, SYS_add_key,
        SYS_io_uring_setup, SYS_userfaultfd, SYS_setns, SYS_open_by_handle_at}) {
    CAPTURE(call);
    CHECK(Isolated([call] { return Error(syscall(call, 0, 0, 0, 0, 0)); }) == EPERM);
  }
  CHECK(Isolated([] { return Error(ioctl(0, TIOCSTI, "x")); }) == EPERM);
  CHECK(Isolated([] {
          return Error(syscall(SYS_ioctl, 0, uint64_t{TIOCSTI} | (uint64_t{1} << 40), "x"));
        }) == EPERM);
}

TEST_CASE("an isolated worker has no privileges and leaves no core", "[server][isolation]") {
  CHECK(Isolated([] {
          auto status = OwnStatus();
          for (const char* set : {"CapInh", "CapPrm", "CapEff", "CapAmb"}) {
            if (status[set] != "0000000000000000") return 1;
          }
          if (status["NoNewPrivs"] != "1") return 2;
          if (status["Seccomp"] != "2") return 3;
          if (prctl(PR_GET_DUMPABLE) != 0) return 4;
          rlimit core = {1, 1};
          getrlimit(RLIMIT_CORE, &core);
          if (core.rlim_max != 0) return 5;
          if (geteuid() == 0) return 6;
          return 0;
        }) == 0);
  if (geteuid() == 0) {
    CHECK(Isolated([] { return OwnStatus()["CapBnd"] == "0000000000000000" ? 0 : 1; }) == 0);
    CHECK(Isolated([] { return Error(setuid(0)); }) == EPERM);
  }
}

// A driver ends its process by signals to itself (abort).
TEST_CASE("an isolated worker can still signal itself", "[server][isolation]") {
  CHECK(Isolated([] { return raise(SIGUSR1); }) == 1000 + SIGUSR1);
  CHECK(Isolated([]() -> int { abort(); }) == 1000 + SIGABRT);
}

}  // namespace penstock::server
