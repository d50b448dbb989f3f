// With a server this process becomes the program: nothing of ours stays between the two, and
// signals and exit status need no care. With the simulated GPU there is a private daemon to end
// afterwards, so the program runs as a child in our process group. Then three things must look as
// if we were not there: its exit status, its standard streams (inherited; we write to stderr only),
// and signals. A signal that the terminal sends reaches the whole process group, so it is passed on
// only if a process sent it to us.
#include "tools/penstock/run.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/env.h"
#include "tools/penstock/layout.h"
#include "tools/penstock/path_list.h"
#include "tools/penstock/private_daemon.h"

namespace penstock {
namespace {

constexpr int kNotExecutable = 126;
constexpr int kNotFound = 127;

constexpr int kForwarded[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};

int Complain(const Error& error) {
  fprintf(stderr, "penstock: %s\n", error.message.c_str());
  return kOwnFailure;
}

void SetEnvironment(const Layout& layout, const std::string& server, const std::string& key_file,
                    const std::string& gpus, const std::string& transport, bool wait) {
  setenv("LD_PRELOAD", WithEntryFirst(EnvString("LD_PRELOAD"), layout.interposer).c_str(), 1);
  setenv("LD_LIBRARY_PATH",
         WithEntryFirst(EnvString("LD_LIBRARY_PATH"), layout.library_folder).c_str(), 1);
  if (!server.empty()) setenv("PENSTOCK_SERVER", server.c_str(), 1);
  if (!key_file.empty()) setenv("PENSTOCK_KEY_FILE", key_file.c_str(), 1);
  if (!transport.empty()) setenv("PENSTOCK_TRANSPORT", transport.c_str(), 1);
  setenv("PENSTOCK_WHEN_FULL", wait ? "wait" : "exit", 1);
  if (!gpus.empty()) setenv("PENSTOCK_GPUS", gpus.c_str(), 1);
}

// Returns only if the program cannot be started.
int Exec(const std::vector<std::string>& program) {
  std::vector<char*> arguments;
  for (const std::string& argument : program) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  const int reason = errno;
  fprintf(stderr, "penstock: Cannot run the program (%s): %s.\n", arguments[0], strerror(reason));
  return reason == ENOENT ? kNotFound : kNotExecutable;
}

// Waits for the program and passes signals on. `signals` are blocked.
int Attend(pid_t program, PrivateDaemon& daemon, const sigset_t& signals) {
  for (;;) {
    siginfo_t info;
    const int signal = sigwaitinfo(&signals, &info);
    if (signal > 0 && signal != SIGCHLD && info.si_code <= 0) kill(program, signal);
    int status;
    if (daemon.pid() > 0 && waitpid(daemon.pid(), &status, WNOHANG) == daemon.pid()) {
      daemon.Forget();
      fprintf(stderr, "penstock: The private daemon ends before the program does.\n");
    }
    if (waitpid(program, &status, WNOHANG) == program) {
      return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
  }
}

int RunOnSimulator(const Layout& layout, const RunOptions& options) {
  // Blocked from before the first fork, so that no signal is lost and none ends us before the
  // daemon.
  sigset_t signals, before;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  for (const int signal : kForwarded) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, &before);

  auto daemon = PrivateDaemon::Start(layout, atoi(options.gpus.c_str()));
  if (!daemon) return Complain(daemon.error());

  const pid_t program = fork();
  if (program < 0) return Complain(Error{Code::kSystem, "Cannot fork."});
  if (program == 0) {
    sigprocmask(SIG_SETMASK, &before, nullptr);
    SetEnvironment(layout, daemon->address(), daemon->key_file(),
                   options.gpus.empty() ? "all" : options.gpus, options.transport, options.wait);
    _exit(Exec(options.program));
  }
  return Attend(program, *daemon, signals);
}

}  // namespace

int Run(const RunOptions& options) {
  const auto layout = FindLayout();
  if (!layout) return Complain(layout.error());
  if (options.simulate) return RunOnSimulator(*layout, options);
  if (options.server.empty() && options.config.empty()) {
    fprintf(stderr,
            "penstock: No server is named (--server, PENSTOCK_SERVER), and there is no pool file; "
            "the program uses the simulated GPU.\n");
    return RunOnSimulator(*layout, options);
  }
  if (options.server.empty()) {
    unsetenv("PENSTOCK_SERVER");
    setenv("PENSTOCK_CONFIG", options.config.c_str(), 1);
  }
  SetEnvironment(*layout, options.server, options.key_file, options.gpus, options.transport,
                 options.wait);
  return Exec(options.program);
}

}  // namespace penstock
