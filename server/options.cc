#include "server/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "config/toml_reader.h"
#include "protocol/hello.h"

namespace penstock::server {
namespace {

constexpr const char* kAbout =
    "The Penstock daemon: lends this machine's GPUs to programs on other machines.\n\n"
    "Each program gets a process of its own here, under a user of its own, which runs the\n"
    "program's CUDA calls on the driver. The daemon itself never opens the driver.\n";

constexpr const char* kExamples =
    "\nExamples:\n"
    "  penstockd                                  real GPUs, for programs on this machine\n"
    "  penstockd --driver sim                     the simulated GPU: no hardware needed\n"
    "  penstockd --listen 0.0.0.0:14833 --key-file /etc/penstock/key\n"
    "                                             for other machines; they need the same key\n"
    "  penstockd --pool /etc/penstock/pool.toml   as the pool's file says of this host\n"
    "\nConfiguration file (flags win over it):\n"
    "  listen = \"0.0.0.0:14833\"\n"
    "  driver = \"auto\"                # auto, sim or a path of a libcuda.so.1\n"
    "  key-file = \"/etc/penstock/key\"\n"
    "  max-sessions = 64\n"
    "  drain-seconds = 30             # after SIGTERM programs have so long to end\n"
    "  silence-seconds = 30           # a session without a sign of life for so long ends\n"
    "  first-worker-uid = 2000000000  # workers run as users from here on, if started as root\n"
    "  device-gid = 0                 # group that may open /dev/nvidia*, where it is needed\n"
    "  isolate = true\n"
    "  port-file = \"\"\n"
    "  log = \"warning\"\n"
    "  [pool]                         # GPUs in slots; without it every program sees all of them\n"
    "  gpus = [0, 1]                  # offered; default: all\n"
    "  slots-per-gpu = 2              # programs on one GPU; default 1\n"
    "  memory-per-slot = \"16 GiB\"     # all that a program sees and gets of each of its GPUs\n"
    "  [transport]\n"
    "  kind = \"auto\"                # auto: RDMA where both sides can; shm, rdma or tcp: only "
    "that\n"
    "  rdma-addresses = []            # numeric, to offer to clients; none: every device's\n"
    "  rails = 4                      # at most so many devices carry a session\n"
    "  control-traffic-class = 0      # RoCE: the TOS byte; 0 leaves the system's\n"
    "  bulk-traffic-class = 0\n"
    "  timeout = 14                   # a lost packet is repeated after 4.096 us * 2^timeout\n"
    "  retry-count = 6                # so often, then the queue pair is given up\n"
    "  keepalive-ms = 1000\n"
    "  peer-timeout-ms = 10000        # a client that cannot be reached for so long is gone\n"
    "  gpudirect = \"auto\"           # RDMA straight to GPU memory: auto: where it works; off; "
    "on:\n"
    "                                 # sessions without it are refused\n";

constexpr const char* kDefaultListen = "127.0.0.1:14833";

Status ParseAddress(const std::string& text, Options* options) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) {
    return Fail(Code::kInvalidArgument, "Listen address (" + text + ") is not HOST:PORT.");
  }
  std::string host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  const std::string port_text = text.substr(colon + 1);
  char* end = nullptr;
  const unsigned long port = strtoul(port_text.c_str(), &end, 10);
  if (port_text.empty() || *end != '\0' || port > 65535) {
    return Fail(Code::kInvalidArgument,
                "Listen port (" + port_text + ") is no number below 65536.");
  }
  options->listen_host = host;
  options->listen_port = static_cast<uint16_t>(port);
  return {};
}

template <typename T>
Status Between(const char* name, T value, T least, T most) {
  if (value >= least && value <= most) return {};
  return Fail(Code::kInvalidArgument, "Value of transport." + std::string(name) + " (" +
                                          std::to_string(value) + ") is not between " +
                                          std::to_string(least) + " and " + std::to_string(most) +
                                          ".");
}

Status CheckTransport(const TransportSettings& settings) {
  RETURN_IF_ERROR(
      transport::CheckRailAddresses(settings.rdma_addresses, "Setting transport.rdma-addresses"));
  RETURN_IF_ERROR(Between("rails", settings.rails, 1u, kMaxPathRails));
  RETURN_IF_ERROR(Between("control-traffic-class", settings.control_traffic_class, 0u, 255u));
  RETURN_IF_ERROR(Between("bulk-traffic-class", settings.bulk_traffic_class, 0u, 255u));
  RETURN_IF_ERROR(Between("timeout", settings.timeout, 1u, 21u));
  RETURN_IF_ERROR(Between("retry-count", settings.retry_count, 1u, 6u));  // 7 may mean for ever
  RETURN_IF_ERROR(Between("keepalive-ms", settings.keepalive_ms, 10u, 60'000u));
  return Between("peer-timeout-ms", settings.peer_timeout_ms, 100u, 3'600'000u);
}

Status ParseGpuDirect(const std::string& text, GpuDirectMode* mode) {
  if (text == "auto") {
    *mode = GpuDirectMode::kAuto;
  } else if (text == "off") {
    *mode = GpuDirectMode::kOff;
  } else if (text == "on") {
    *mode = GpuDirectMode::kOn;
  } else {
    return Fail(Code::kInvalidArgument,
                "Value of transport.gpudirect (" + text + ") is none of auto, off and on.");
  }
  return {};
}

Status ReadFile(const std::string& path, const CLI::App& app, std::string* listen,
                std::string* kind, Options* options) {
  ASSIGN_OR_RETURN(const toml::table table, config::ParseTomlFile(path));
  const auto given = [&app](const char* flag) { return app.count(flag) != 0; };
  config::TomlReader reader(path, table, given);
  reader.Take("listen", listen, "--listen");
  reader.Take("driver", &options->driver, "--driver");
  reader.Take("key-file", &options->key_file, "--key-file");
  reader.Take("port-file", &options->port_file, "--port-file");
  reader.Take("log", &options->log, "--log");
  reader.Take("max-sessions", &options->max_sessions, "--max-sessions");
  reader.Take("silence-seconds", &options->silence_seconds);
  reader.Take("drain-seconds", &options->drain_seconds);
  reader.Take("first-worker-uid", &options->first_worker_uid);
  reader.Take("device-gid", &options->device_gid);
  reader.Take("isolate", &options->isolate);
  const toml::table& below = reader.TakeTable("transport");
  const toml::table& shared = reader.TakeTable("pool");
  RETURN_IF_ERROR(reader.Finish());
  config::TomlReader pool(path, shared);
  if (!shared.empty()) options->pool.given = true;
  pool.Take("gpus", &options->pool.gpus);
  pool.Take("slots-per-gpu", &options->pool.slots_per_gpu);
  pool.Take("memory-per-slot", &options->pool.memory_per_slot);
  RETURN_IF_ERROR(pool.Finish());
  config::TomlReader transport(path, below, given);
  TransportSettings& settings = options->transport;
  transport.Take("kind", kind, "--transport");
  transport.Take("rdma-addresses", &settings.rdma_addresses);
  transport.Take("rails", &settings.rails);
  transport.Take("control-traffic-class", &settings.control_traffic_class);
  transport.Take("bulk-traffic-class", &settings.bulk_traffic_class);
  transport.Take("timeout", &settings.timeout);
  transport.Take("retry-count", &settings.retry_count);
  transport.Take("keepalive-ms", &settings.keepalive_ms);
  transport.Take("peer-timeout-ms", &settings.peer_timeout_ms);
  std::string gpu_direct = "auto";
  transport.Take("gpudirect", &gpu_direct);
  RETURN_IF_ERROR(transport.Finish());
  return ParseGpuDirect(gpu_direct, &settings.gpu_direct);
}

// The part of this server in the pool file, for everything that is still open.
Status TakePart(const std::string& path, std::string name, std::string* listen, std::string* kind,
                Options* options) {
  ASSIGN_OR_RETURN(const config::PoolFile file, config::ReadPoolFile(path));
  if (name.empty()) {
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    name = host;
  }
  for (const config::PoolServer& server : file.servers) {
    if (server.name != name && server.name != name.substr(0, name.find('.'))) continue;
    if (listen->empty()) *listen = server.address;
    if (kind->empty()) *kind = server.transport;
    if (options->key_file.empty()) options->key_file = server.key_file;
    if (!options->pool.given) options->pool = server.size;
    return {};
  }
  return Fail(Code::kInvalidArgument, "The pool file (" + path + ") has no server of the name (" +
                                          name + "). Name one of them with --name.");
}

}  // namespace

Result<Options> ParseOptions(int argc, char** argv) {
  Options options;
  CLI::App app(kAbout, "penstockd");
  app.footer(kExamples);
  app.set_version_flag("--version", "penstockd " PENSTOCK_VERSION, "Show the version and exit");
  std::string listen, kind, config, pool, name;
  app.add_option("--listen", listen,
                 "Where to listen; port 0 takes a free one. Without a key only\naddresses of "
                 "this machine alone (loopback) are allowed.\nDefault 127.0.0.1:14833")
      ->type_name("HOST:PORT");
  app.add_option("--driver", options.driver,
                 "auto: this machine's libcuda.so.1; sim: the simulated GPU; or\nthe path of a "
                 "libcuda.so.1. Default auto")
      ->type_name("DRIVER");
  app.add_option("--key-file", options.key_file,
                 "File with the key (16 bytes or more) that every client must\nhold as well")
      ->type_name("FILE");
  app.add_option(
         "--transport", kind,
         "auto: shared memory on this machine, RDMA or tcp from others; shm (shared\nmemory, "
         "same machine) or rdma: clients without it are refused;\ntcp: nothing else. "
         "Default auto")
      ->type_name("KIND");
  app.add_option("--config", config, "TOML file with any of these settings, see below")
      ->type_name("FILE");
  app.add_option("--pool", pool,
                 "The pool file of all servers: this one takes address, key file, GPUs and\nslots "
                 "from its part, as far as nothing else says so")
      ->type_name("FILE");
  app.add_option("--name", name, "The name of this server in the pool file. Default: its host name")
      ->type_name("NAME");
  app.add_option("--port-file", options.port_file, "Written with the port once the daemon is ready")
      ->type_name("FILE");
  app.add_option("--max-sessions", options.max_sessions, "Programs served at once. Default 64")
      ->type_name("NUMBER");
  app.add_option(
         "--log", options.log,
         "level[,area...]: error, warning, info, debug or trace; info says\nwhen the daemon "
         "listens and who comes and goes.\nDefault: PENSTOCK_LOG, else warning")
      ->type_name("LEVEL");
  app.add_flag("--parent-pid-dies", options.parent_pid_dies,
               "End when the parent process ends (for private daemons)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Fail(Code::kUnsupported, app.help());
  } catch (const CLI::CallForVersion&) {
    return Fail(Code::kUnsupported, "penstockd " PENSTOCK_VERSION "\n");
  } catch (const CLI::ParseError& error) {
    return Fail(Code::kInvalidArgument, std::string(error.what()) + ". See: penstockd --help");
  }
  if (!config.empty()) RETURN_IF_ERROR(ReadFile(config, app, &listen, &kind, &options));
  if (!pool.empty()) RETURN_IF_ERROR(TakePart(pool, name, &listen, &kind, &options));
  if (listen.empty()) listen = kDefaultListen;
  if (kind.empty()) kind = "auto";
  RETURN_IF_ERROR(ParseAddress(listen, &options));
  ASSIGN_OR_RETURN(options.transport.choice, transport::ParseChoice(kind, "Transport"));
  RETURN_IF_ERROR(CheckTransport(options.transport));
  if (options.transport.gpu_direct == GpuDirectMode::kOn &&
      options.transport.choice == transport::Choice::kTcp) {
    return Fail(Code::kInvalidArgument,
                "Value of transport.gpudirect (on) asks for RDMA, and the transport is tcp.");
  }
  if (options.parent_pid_dies) options.drain_seconds = 0;  // nobody else's programs are there
  if (options.max_sessions == 0 || options.max_sessions > 4096) {
    return Fail(Code::kInvalidArgument, "Number of sessions (" +
                                            std::to_string(options.max_sessions) +
                                            ") is not between 1 and 4096.");
  }
  if (options.pool.slots_per_gpu == 0 || options.pool.slots_per_gpu > 64) {
    return Fail(Code::kInvalidArgument, "Value of pool.slots-per-gpu (" +
                                            std::to_string(options.pool.slots_per_gpu) +
                                            ") is not between 1 and 64.");
  }
  if (options.silence_seconds == 0) {
    return Fail(Code::kInvalidArgument, "Value of silence-seconds is zero.");
  }
  return options;
}

std::string DriverLibrary(const std::string& driver, const std::string& executable) {
  if (driver == "auto") return "libcuda.so.1";
  if (driver != "sim") return driver;
  const std::string folder = executable.substr(0, executable.rfind('/'));
  return folder + "/../lib/penstock/simgpu/libcuda.so.1";
}

}  // namespace penstock::server
