#include "tools/penstock-perf/perftest.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include <cmath>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "common/clock.h"
#include "common/env.h"
#include "transport/rdma/rdma.h"

namespace penstock::perf {
namespace {

constexpr const char* kPrograms[] = {"ib_send_lat", "ib_read_bw", "ib_write_bw"};
constexpr int kTries = 50;  // to reach the other half
// A program has done its work and prints no figure when it cannot tell the rate of the cycle
// counter by which it has timed: it estimates that by a regression over 0.2 s, which often is not
// straight enough for it on a virtual machine or a busy one. Latencies it can give in cycles, and
// then we tell the rate ourselves; for a bandwidth it has to run again.
constexpr int kRuns = 8;
#if defined(__x86_64__)
constexpr bool kInCycles = true;
#else
constexpr bool kInCycles = false;
#endif
constexpr int kPort = 18515;  // perftest's own default
constexpr int kRunLimitMs = 120'000;

struct Child {
  pid_t pid = -1;
  UniqueFd output;
};

Result<Child> Start(const std::vector<std::string>& words) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return FailErrno("Cannot make a pipe");
  Child child;
  child.output.reset(ends[0]);
  UniqueFd write_end(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDERR_FILENO);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int error =
      posix_spawnp(&child.pid, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    errno = error;
    return FailErrno("Cannot start (" + words[0] + ")");
  }
  return child;
}

// All that it prints; its exit status in *status. Ends it when it takes too long.
std::string Finish(Child& child, int* status) {
  std::string text;
  const Deadline deadline = Deadline::After(kRunLimitMs);
  fcntl(child.output.get(), F_SETFL, O_NONBLOCK);
  for (;;) {
    char buffer[4096];
    const ssize_t got = read(child.output.get(), buffer, sizeof buffer);
    if (got > 0) {
      text.append(buffer, got);
    } else if (got == 0) {
      break;
    } else if (deadline.expired()) {
      kill(child.pid, SIGKILL);
      break;
    } else {
      usleep(5'000);
    }
  }
  waitpid(child.pid, status, 0);
  return text;
}

double CyclesPerMicrosecond() {
#if defined(__x86_64__)
  static const double rate = [] {
    const int64_t start = NowNanoseconds();
    const uint64_t cycles = __rdtsc();
    usleep(300'000);
    const double passed = static_cast<double>(__rdtsc() - cycles);
    return passed * 1e3 / static_cast<double>(NowNanoseconds() - start);
  }();
  return rate;
#else
  return 1;
#endif
}

std::vector<std::string> Words(const PerftestRun& run) {
  std::vector<std::string> words = {run.program,
                                    "-F",  // a frequency governor is no reason to stop
                                    "-R",  // rdma_cm finds device and GID, as Penstock does
                                    "-s",        std::to_string(run.bytes),
                                    "-n",        std::to_string(run.iterations),
                                    "-p",        std::to_string(kPort)};
  if (run.program.ends_with("_bw")) words.push_back("--report_gbits");
  if (run.sleeps) words.push_back("-e");
  if (run.program.ends_with("_lat") && kInCycles) words.push_back("-C");
  return words;
}

// The last line of numbers. Latencies: bytes, iterations, least, most, typical, average ...;
// bandwidths: bytes, iterations, peak, average, rate.
Result<double> Parse(const PerftestRun& run, const std::string& text) {
  std::istringstream lines(text);
  double result = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::vector<double> numbers;
    for (double number; words >> number;) numbers.push_back(number);
    if (run.program.ends_with("_lat") && numbers.size() >= 6) {
      result = kInCycles ? numbers[4] / CyclesPerMicrosecond() : numbers[4];
    }
    if (run.program.ends_with("_bw") && numbers.size() >= 4) result = numbers[3] / 8;
  }
  if (result > 0 && std::isfinite(result)) return result;
  return Fail(Code::kSystem, run.program + " prints no result: " + text);
}

// *worked: the two halves have met, so that another run may give the figure that this one lacks.
Result<double> RunOnce(Link& link, const PerftestRun& run, bool* worked) {
  RETURN_IF_ERROR(SendMessage(link.arranging.get(), {{"program", run.program},
                                                     {"bytes", run.bytes},
                                                     {"iterations", run.iterations},
                                                     {"sleeps", run.sleeps}}));
  ASSIGN_OR_RETURN(const auto answer, ReceiveMessage(link.arranging.get(),
                                                     Deadline::After(kRunLimitMs + kPatienceMs)));
  const std::string address = answer.value("address", "");
  if (address.empty()) return Fail(Code::kUnavailable, answer.value("error", "No perftest there."));
  std::vector<std::string> words = Words(run);
  words.push_back(address);
  std::string text;
  for (int attempt = 0; attempt < kTries; ++attempt) {  // the other half takes a moment to listen
    usleep(100'000);
    ASSIGN_OR_RETURN(Child child, Start(words));
    int status = 0;
    text = Finish(child, &status);
    // The heading of the figures: they have met.
    if (text.find("#bytes") != std::string::npos) {
      *worked = true;
      return Parse(run, text);
    }
    if (status == 0) break;
  }
  return Fail(Code::kSystem,
              run.program + " does not reach its other half (" + address + "): " + text);
}

}  // namespace

bool HavePerftest(const std::string& program) {
  std::istringstream folders(EnvString("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

Result<double> RunPerftest(Link& link, const PerftestRun& run) {
  Result<double> figure = Fail(Code::kInternal, "Nothing has been run.");
  for (int attempt = 0; attempt < kRuns; ++attempt) {
    bool worked = false;
    figure = RunOnce(link, run, &worked);
    if (figure || !worked) break;
  }
  return figure;
}

void ServePerftest(int arranging) {
  for (;;) {
    const auto request = ReceiveMessage(arranging, Deadline::Never());
    if (!request) return;
    PerftestRun run;
    for (const char* program : kPrograms) {
      if (request->value("program", "") == program) run.program = program;
    }
    run.bytes = request->value("bytes", 0ull);
    run.iterations = request->value("iterations", 0ull);
    run.sleeps = request->value("sleeps", false);
    nlohmann::json answer;
    Result<Child> child = Fail(Code::kUnavailable, "The serving end has no such program.");
    const auto verbs = transport::rdma::LoadVerbs();
    if (!run.program.empty() && HavePerftest(run.program) && verbs) {
      const auto rails = transport::rdma::FindLocalRails(**verbs);
      if (rails && !rails->empty()) {
        answer["address"] = rails->front().address;
        child = Start(Words(run));
      }
    }
    if (!child) answer = {{"error", child.error().message}};
    if (!SendMessage(arranging, answer)) return;
    int status = 0;
    if (child) Finish(*child, &status);
  }
}

}  // namespace penstock::perf
