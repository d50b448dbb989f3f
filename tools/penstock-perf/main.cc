// penstock-perf: what Penstock costs here, beside what the machine can do.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include <CLI/CLI.hpp>

#include "common/clock.h"
#include "tools/penstock-perf/device.h"
#include "tools/penstock-perf/link.h"
#include "tools/penstock-perf/moves.h"
#include "tools/penstock-perf/perftest.h"
#include "tools/penstock-perf/plot.h"
#include "tools/penstock-perf/rows.h"

namespace penstock::perf {
namespace {

constexpr char kAbout[] =
    "Measures what Penstock costs on these machines, beside what they can do without it.\n"
    "\n"
    "  rdma, tcp   the transport alone: round trips, messages and bulk moves between two "
    "processes\n"
    "  device      the driver calls of a program, through the libcuda.so.1 that it gets\n"
    "  compare     results of `device` side by side";

constexpr char kLinkFooter[] =
    "\n"
    "Examples:\n"
    "  penstock-perf rdma                           both ends on this machine\n"
    "  penstock-perf rdma --serve 18600             on one machine, and on another one:\n"
    "  penstock-perf rdma --connect gpu7:18600\n"
    "\n"
    "`rdma` also runs ib_send_lat, ib_read_bw and ib_write_bw (package perftest) between the same\n"
    "ends where both have them. They report half a round trip, so the baseline of ours is twice\n"
    "that; with -e they sleep between messages, which is what ours must be compared with where\n"
    "processors are few (PENSTOCK_RDMA_SPIN_US). With --meanwhile the baseline is what was\n"
    "measured before: how a rail that went and came back carries again. With --connects nothing\n"
    "but the connections is measured, and afterwards `rdma resource show` should look as it did\n"
    "before.\n"
    "The serving end asks for no key: use it on networks that you trust, and end it after.";

constexpr char kDeviceFooter[] =
    "\n"
    "Example: what a program pays for a remote GPU, on a machine that has the driver itself:\n"
    "  penstock-perf device -o json > native.json\n"
    "  penstock run --server gpu7:14833 -- penstock-perf device -o json > remote.json\n"
    "  penstock-perf compare native.json remote.json";

struct Output {
  std::string format = "table";
  std::string plot;  // a file; empty: none
};

struct Options {
  std::string transport, serve, connect, rails, from, meanwhile;
  Output output;
  uint64_t connects = 0;
  uint64_t least = 64 << 10, most = 64ull << 20;
  std::vector<std::string> only;
  uint64_t perftest_bytes = 512 << 10;
  double seconds = 0.5;
  bool no_perftest = false;
};

int Report(const Error& error) {
  fprintf(stderr, "penstock-perf: %s\n", error.message.c_str());
  return 1;
}

// To stdout and into the picture. The exit status.
int Show(const std::vector<Row>& rows, const Output& output) {
  fputs((output.format == "json" ? AsJson(rows) : AsTable(rows)).c_str(), stdout);
  if (output.plot.empty()) return 0;
  const Status drawn = Plot(rows, output.plot);
  return drawn ? 0 : Report(drawn.error());
}

// HOST:PORT, [HOST]:PORT or PORT.
bool ParseAddress(const std::string& text, std::string* host, uint16_t* port) {
  const size_t colon = text.rfind(':');
  *host = colon == std::string::npos ? "" : text.substr(0, colon);
  if (host->size() > 2 && host->front() == '[') *host = host->substr(1, host->size() - 2);
  const std::string digits = colon == std::string::npos ? text : text.substr(colon + 1);
  char* end = nullptr;
  const unsigned long number = strtoul(digits.c_str(), &end, 10);
  *port = static_cast<uint16_t>(number);
  return !digits.empty() && *end == '\0' && number <= 65535;
}

// One dialling end after the other.
[[noreturn]] void Serve(transport::tcp::Listener& listener) {
  for (;;) {
    auto link = Accept(listener);
    if (!link) {
      Report(link.error());
      continue;
    }
    std::thread perftest([&] { ServePerftest(link->arranging.get()); });
    const Status served = ServeMoves(*link->connection);
    if (!served) {
      Report(served.error());
      link->connection.reset();  // so that the dialling end does not wait for an answer
      shutdown(link->arranging.get(), SHUT_RDWR);
    }
    perftest.join();
  }
}

Result<double> Baseline(Link& link, const Options& options, const PerftestRun& run) {
  if (link.connection->caps().name != std::string("rdma") || options.no_perftest) return 0.0;
  if (!HavePerftest(run.program)) {
    static bool said = false;
    if (!said) {
      fprintf(stderr, "penstock-perf: (%s) is not on PATH (package perftest): no baselines.\n",
              run.program.c_str());
    }
    said = true;
    return 0.0;
  }
  return RunPerftest(link, run);
}

Result<std::vector<Row>> MeasureLink(Link& link, const Options& options) {
  ASSIGN_OR_RETURN(auto mover, Mover::Create(*link.connection, options.most, options.seconds));
  std::vector<Row> rows;
  const auto wanted = [&](const std::string& name) { return IsWanted(name, options.only); };
  for (const uint32_t bytes : {96u, 1024u, 3072u}) {
    Row row = {"round trip of a message", bytes, 0, "us", 0, "2 x ib_send_lat"};
    if (!wanted(row.name)) break;
    ASSIGN_OR_RETURN(row.value, mover->RoundTripMicroseconds(bytes));
    ASSIGN_OR_RETURN(row.baseline, Baseline(link, options, {"ib_send_lat", bytes, 1000}));
    row.baseline *= 2;
    rows.push_back(row);
    if (bytes > 96 || row.baseline == 0) continue;
    row.against += " -e";
    ASSIGN_OR_RETURN(row.baseline, Baseline(link, options, {"ib_send_lat", bytes, 1000, true}));
    row.baseline *= 2;
    rows.push_back(row);
  }
  if (Row rate = {"messages, one way", 96, 0, "M/s", 0, ""}; wanted(rate.name)) {
    ASSIGN_OR_RETURN(rate.value, mover->MessagesPerMicrosecond(96));
    rows.push_back(rate);
  }
  for (uint64_t bytes = options.least; bytes <= options.most; bytes *= 4) {
    for (const bool to_server : {true, false}) {
      const std::string program = to_server ? "ib_read_bw" : "ib_write_bw";
      const uint64_t message = std::min(bytes, options.perftest_bytes);
      Row row = {to_server ? "bulk, to the server" : "bulk, from the server",
                 bytes,
                 0,
                 "GB/s",
                 0,
                 program + " of " + BytesAsText(message)};
      if (!wanted(row.name)) continue;
      ASSIGN_OR_RETURN(row.value, mover->GigabytesPerSecond(to_server, bytes));
      const uint64_t iterations =
          std::max<uint64_t>(5, std::max<uint64_t>(bytes, 16 << 20) / message);
      ASSIGN_OR_RETURN(row.baseline, Baseline(link, options, {program, message, iterations}));
      rows.push_back(row);
    }
  }
  for (Row& row : rows) {
    if (row.baseline == 0) row.against.clear();
  }
  return rows;
}

// The largest moves each way; then again, when `command` has ended, with moves all the while.
Result<std::vector<Row>> MeasureMeanwhile(Link& link, const Options& options) {
  ASSIGN_OR_RETURN(auto mover, Mover::Create(*link.connection, options.most, options.seconds));
  std::vector<Row> rows = {{"bulk, to the server", options.most, 0, "GB/s", 0, "before"},
                           {"bulk, from the server", options.most, 0, "GB/s", 0, "before"}};
  const auto measure = [&](double Row::*where) -> Status {
    for (Row& row : rows) {
      ASSIGN_OR_RETURN(row.*where, mover->GigabytesPerSecond(&row == &rows[0], options.most));
    }
    return {};
  };
  RETURN_IF_ERROR(measure(&Row::baseline));
  std::atomic<int> status = -1;
  std::thread command([&] { status = system(options.meanwhile.c_str()); });
  Status moved;
  while (status == -1 && moved) {
    moved = mover->MoveOnce(true, options.most);
    if (moved) moved = mover->MoveOnce(false, options.most);
  }
  command.join();
  RETURN_IF_ERROR(moved);
  if (status != 0) {
    return Fail(Code::kSystem, "The command (" + options.meanwhile + ") ends with status (" +
                                   std::to_string(status) + ").");
  }
  RETURN_IF_ERROR(measure(&Row::value));
  return rows;
}

// One connection after the other, each with a message and bulk moves both ways.
Result<std::vector<Row>> MeasureConnects(const std::string& host, uint16_t port,
                                         const Options& options) {
  constexpr uint64_t kTraffic = 256 << 10;
  std::vector<double> times;
  for (uint64_t i = 1; i <= options.connects; ++i) {
    const int64_t start = NowNanoseconds();
    ASSIGN_OR_RETURN(Link link, Dial(host, port, {options.transport, options.rails, options.from}));
    {
      ASSIGN_OR_RETURN(auto mover, Mover::Create(*link.connection, kTraffic, 0));
      RETURN_IF_ERROR(mover->RoundTripMicroseconds(96));
      RETURN_IF_ERROR(mover->MoveOnce(true, kTraffic));
      RETURN_IF_ERROR(mover->MoveOnce(false, kTraffic));
    }
    link.connection->Close(1000);
    times.push_back(static_cast<double>(NowNanoseconds() - start) / 1e6);
    if (i % 100 == 0) fprintf(stderr, "penstock-perf: %zu connections are over.\n", times.size());
  }
  return std::vector<Row>{{"connect, move, close", kTraffic, Median(times), "ms", 0, ""}};
}

Result<std::vector<Row>> Dialled(const std::string& host, uint16_t port, const Options& options) {
  if (options.connects > 0) return MeasureConnects(host, port, options);
  ASSIGN_OR_RETURN(Link link, Dial(host, port, {options.transport, options.rails, options.from}));
  auto rows =
      options.meanwhile.empty() ? MeasureLink(link, options) : MeasureMeanwhile(link, options);
  link.connection->Close(1000);
  return rows;
}

int RunLink(const Options& options) {
  std::string host = "127.0.0.1";
  uint16_t port = 0;
  const std::string& address = options.serve.empty() ? options.connect : options.serve;
  if (!address.empty() && !ParseAddress(address, &host, &port)) {
    return Report({Code::kInvalidArgument, "The address (" + address + ") is no HOST:PORT."});
  }
  pid_t child = -1;
  if (options.connect.empty()) {
    auto listener = transport::tcp::Listener::Bind(host, port);
    if (!listener) return Report(listener.error());
    if (!options.serve.empty()) {
      fprintf(stderr, "penstock-perf: serving at port %u; end it with Ctrl-C.\n", listener->port());
      Serve(*listener);
    }
    port = listener->port();
    child = fork();
    if (child < 0) return Report(FailErrno("Cannot fork").value());
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      Serve(*listener);
    }
  }
  const auto rows = Dialled(host, port, options);
  const int status = rows ? Show(*rows, options.output) : Report(rows.error());
  if (child > 0) {
    kill(child, SIGTERM);
    waitpid(child, nullptr, 0);
  }
  return status;
}

int RunDevice(const DeviceOptions& options, const Output& output) {
  const auto rows = MeasureDevice(options);
  if (!rows) return Report(rows.error());
  return Show(*rows, output);
}

int Compare(const std::string& baseline, const std::string& measured, const Output& output) {
  const auto before = ReadRows(baseline);
  if (!before) return Report(before.error());
  const auto after = ReadRows(measured);
  if (!after) return Report(after.error());
  return Show(Against(*after, *before, baseline.substr(baseline.rfind('/') + 1)), output);
}

CLI::App* AddLink(CLI::App& app, const char* name, const char* about, Options& options) {
  CLI::App* link = app.add_subcommand(name, about);
  link->footer(kLinkFooter);
  CLI::Option* serve = link->add_option("--serve", options.serve,
                                        "Be the serving end, at [HOST:]PORT, until interrupted");
  link->add_option("--connect", options.connect, "The serving end, HOST:PORT")->excludes(serve);
  link->add_option("--most", options.most, "Bytes of the largest move. Default 64 MiB")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(uint64_t{64} << 10, kMostMoveBytes).description(""));
  link->add_option("--least", options.least, "Bytes of the smallest move. Default 64 KiB")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(uint64_t{4096}, kMostMoveBytes).description(""));
  link->add_option("--only", options.only,
                   "A part of the names of the rows wanted; may be repeated");
  link->add_option("--seconds", options.seconds, "Least time of each row. Default 0.5");
  link->add_option("--connects", options.connects,
                   "Connect and close so many times, with traffic, and nothing else");
  link->add_option("--meanwhile", options.meanwhile,
                   "Measure the largest moves before and after this shell command, over one\n"
                   "connection that moves all the while")
      ->type_name("COMMAND");
  return link;
}

int Main(int argc, char** argv) {
  CLI::App app(kAbout, "penstock-perf");
  app.set_version_flag("--version", "penstock-perf " PENSTOCK_VERSION);
  app.require_subcommand(1);
  Options options;
  DeviceOptions device_options;
  std::string baseline, measured;
  std::function<int()> work;

  CLI::App* rdma = AddLink(app, "rdma", "Penstock's transport over RDMA verbs", options);
  rdma->add_option("--rails", options.rails,
                   "Addresses of the serving end's rails, comma-separated");
  rdma->add_option(
          "--perftest-message", options.perftest_bytes,
          "Bytes of one message of ib_read_bw and ib_write_bw. Default 512 KiB: Penstock's "
          "own chunk")
      ->transform(CLI::AsSizeValue(false));
  rdma->add_option("--from", options.from,
                   "Addresses of this end's rails, in the order of the serving end's");
  rdma->add_flag("--no-perftest", options.no_perftest, "Leave the baselines out");
  CLI::App* tcp = AddLink(app, "tcp", "Penstock's transport over tcp", options);
  CLI::App* device = app.add_subcommand("device", "Driver calls and copies of a program");
  device->footer(kDeviceFooter);
  device
      ->add_option("--most", device_options.most_bytes,
                   "Bytes of the largest copy. Default 256 MiB")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(uint64_t{4096}, uint64_t{1} << 32).description(""));
  device->add_option("--least", device_options.least_bytes, "Bytes of the smallest copy. Default 4")
      ->transform(CLI::AsSizeValue(false));
  device->add_option("--only", device_options.only,
                     "A part of the names of the rows wanted; may be repeated");
  device->add_option("--seconds", device_options.seconds, "Least time of each row. Default 0.3");
  CLI::App* compare = app.add_subcommand("compare", "Two results of `device -o json`");
  compare->add_option("BASELINE", baseline)->required()->check(CLI::ExistingFile.description(""));
  compare->add_option("MEASURED", measured)->required()->check(CLI::ExistingFile.description(""));
  for (CLI::App* command : {rdma, tcp, device, compare}) {
    command->add_option("-o", options.output.format, "table (default) or json")
        ->check(CLI::IsMember({"table", "json"}).description(""));
    command
        ->add_option("--plot", options.output.plot,
                     "Draw the speed of moves over their size as well; takes gnuplot")
        ->type_name("FILE.png");
  }
  rdma->callback([&] {
    work = [&] {
      options.transport = "rdma";
      return RunLink(options);
    };
  });
  tcp->callback([&] {
    work = [&] {
      options.transport = "tcp";
      return RunLink(options);
    };
  });
  device->callback([&] { work = [&] { return RunDevice(device_options, options.output); }; });
  compare->callback([&] { work = [&] { return Compare(baseline, measured, options.output); }; });
  CLI11_PARSE(app, argc, argv);
  return work();
}

}  // namespace
}  // namespace penstock::perf

int main(int argc, char** argv) {
  return penstock::perf::Main(argc, argv);
}
