// penstockd. Without a role argument it is the supervisor; --probe and --worker are the processes
// that it starts itself, see probe.h and worker_main.h.
#include <fcntl.h>
#include <sys/prctl.h>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "common/log.h"
#include "server/listener.h"
#include "server/options.h"
#include "server/probe.h"
#include "server/worker_main.h"

namespace penstock::server {
namespace {

// A reader sees the whole file or none.
Status WritePortFile(const std::string& path, uint16_t port) {
  const std::string temporary = path + ".new";
  FILE* file = fopen(temporary.c_str(), "we");
  if (file == nullptr) return FailErrno("Cannot write port file (" + temporary + ")");
  fprintf(file, "%u\n", port);
  if (fclose(file) != 0 || rename(temporary.c_str(), path.c_str()) != 0) {
    return FailErrno("Cannot write port file (" + path + ")");
  }
  return {};
}

int SupervisorMain(int argc, char** argv) {
  auto options = ParseOptions(argc, argv);
  if (!options && options.error().code == Code::kUnsupported) {
    fputs(options.error().message.c_str(), stdout);
    return 0;
  }
  if (!options) {
    fprintf(stderr, "penstockd: %s\n", options.error().message.c_str());
    return 2;
  }
  if (options->parent_pid_dies) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
  }
  if (!options->log.empty()) SetLogSpec(options->log.c_str());
  auto supervisor = Supervisor::Start(*options);
  if (!supervisor) {
    fprintf(stderr, "penstockd: %s\n", supervisor.error().message.c_str());
    return 1;
  }
  if (!options->port_file.empty()) {
    if (auto written = WritePortFile(options->port_file, (*supervisor)->port()); !written) {
      fprintf(stderr, "penstockd: %s\n", written.error().message.c_str());
      return 1;
    }
  }
  LOG_INFO("daemon", "Listening on %s, port %u.", options->listen_host.c_str(),
           (*supervisor)->port());
  auto ended = (*supervisor)->Run();
  if (!ended) {
    fprintf(stderr, "penstockd: %s\n", ended.error().message.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace penstock::server

int main(int argc, char** argv) {
  penstock::SetLogName("penstockd");
  if (argc == 2 && strcmp(argv[1], "--probe") == 0) return penstock::server::ProbeMain();
  if (argc == 2 && strcmp(argv[1], "--worker") == 0) return penstock::server::WorkerMain();
  return penstock::server::SupervisorMain(argc, argv);
}
