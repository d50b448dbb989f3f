#include "server/options.h"

#include <unistd.h>

#include <toml++/toml.h>
#include <CLI/CLI.hpp>

#include <set>

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
    "\nConfiguration file (flags win over it):\n"
    "  listen = \"0.0.0.0:14833\"\n"
    "  driver = \"auto\"                # auto, sim or a path of a libcuda.so.1\n"
    "  key-file = \"/etc/penstock/key\"\n"
    "  max-sessions = 64\n"
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

std::string Place(const std::string& path, const toml::source_region& source) {
  return path + ":" + std::to_string(source.begin.line) + ": ";
}

// "256MiB", "8 GiB"; without a unit bytes.
bool ParseSize(std::string text, uint64_t* bytes) {
  try {
    const bool fine = CLI::AsSizeValue(/*kb_is_1000=*/false)(text).empty();  // makes a number of it
    *bytes = fine ? std::stoull(text) : 0;
  } catch (const std::exception&) {
    return false;
  }
  return *bytes != 0;
}

// Takes one value of the file unless the command line gave it.
class FileReader {
 public:
  // Refers to the table: a copy would not know its place in the file any more.
  FileReader(const std::string& path, const toml::table& table, const CLI::App& app)
      : path_(path), table_(table), app_(app) {}

  template <typename T>
  void Take(const char* name, const char* flag, T* target) {
    known_.insert(name);
    const toml::node* node = table_.get(name);
    if (node == nullptr || (flag != nullptr && app_.count(flag) != 0) || !error_.empty()) return;
    if constexpr (std::is_same_v<T, std::string>) {
      if (auto value = node->value_exact<std::string>())
        *target = *value;
      else
        Wrong(name, *node, "text");
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      const toml::array* array = node->as_array();
      if (array == nullptr) return Wrong(name, *node, "a list of texts");
      target->clear();
      for (const toml::node& each : *array) {
        auto value = each.value_exact<std::string>();
        if (!value) return Wrong(name, each, "a list of texts");
        target->push_back(*value);
      }
    } else if constexpr (std::is_same_v<T, std::vector<uint32_t>>) {
      const toml::array* array = node->as_array();
      if (array == nullptr) return Wrong(name, *node, "a list of numbers");
      target->clear();
      for (const toml::node& each : *array) {
        auto value = each.value_exact<int64_t>();
        if (!value || *value < 0 || *value > UINT32_MAX) {
          return Wrong(name, each, "a list of numbers");
        }
        target->push_back(static_cast<uint32_t>(*value));
      }
    } else if constexpr (std::is_same_v<T, uint64_t>) {
      auto text = node->value_exact<std::string>();
      if (!text || !ParseSize(*text, target)) {
        Wrong(name, *node, "a size such as \"512 MiB\" or \"8 GiB\"");
      }
    } else if constexpr (std::is_same_v<T, bool>) {
      if (auto value = node->value_exact<bool>())
        *target = *value;
      else
        Wrong(name, *node, "true or false");
    } else {
      auto value = node->value_exact<int64_t>();
      if (value && *value >= 0 && *value <= UINT32_MAX)
        *target = static_cast<uint32_t>(*value);
      else
        Wrong(name, *node, "a number from 0 to 4294967295");
    }
  }

  // Empty if the file has no such section.
  Result<const toml::table*> TakeTable(const char* name) {
    static const toml::table kEmpty;
    known_.insert(name);
    const toml::node* node = table_.get(name);
    if (node == nullptr) return &kEmpty;
    if (node->as_table() != nullptr) return node->as_table();
    return Fail(Code::kInvalidArgument,
                Place(path_, node->source()) + "Value of " + name + " is not a section.");
  }

  Status Finish() {
    for (auto&& [key, node] : table_) {
      if (error_.empty() && !known_.contains(std::string(key.str()))) {
        error_ = Place(path_, key.source()) + "Key (" + std::string(key.str()) + ") is not known.";
      }
    }
    if (!error_.empty()) return Fail(Code::kInvalidArgument, error_);
    return {};
  }

 private:
  void Wrong(const char* name, const toml::node& node, const char* wanted) {
    error_ = Place(path_, node.source()) + "Value of " + name + " is not " + wanted + ".";
  }
  const std::string path_;
  const toml::table& table_;
  const CLI::App& app_;
  std::set<std::string> known_;
  std::string error_;
};

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
  if (access(path.c_str(), R_OK) != 0) return FailErrno("Cannot read settings (" + path + ")");
  toml::table table;
  try {
    table = toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    return Fail(Code::kInvalidArgument,
                Place(path, error.source()) + std::string(error.description()));
  }
  FileReader reader(path, table, app);
  reader.Take("listen", "--listen", listen);
  reader.Take("driver", "--driver", &options->driver);
  reader.Take("key-file", "--key-file", &options->key_file);
  reader.Take("port-file", "--port-file", &options->port_file);
  reader.Take("log", "--log", &options->log);
  reader.Take("max-sessions", "--max-sessions", &options->max_sessions);
  reader.Take("silence-seconds", nullptr, &options->silence_seconds);
  reader.Take("first-worker-uid", nullptr, &options->first_worker_uid);
  reader.Take("device-gid", nullptr, &options->device_gid);
  reader.Take("isolate", nullptr, &options->isolate);
  ASSIGN_OR_RETURN(const toml::table* below, reader.TakeTable("transport"));
  ASSIGN_OR_RETURN(const toml::table* shared, reader.TakeTable("pool"));
  RETURN_IF_ERROR(reader.Finish());
  FileReader pool(path, *shared, app);
  options->pool.given = !shared->empty();
  pool.Take("gpus", nullptr, &options->pool.gpus);
  pool.Take("slots-per-gpu", nullptr, &options->pool.slots_per_gpu);
  pool.Take("memory-per-slot", nullptr, &options->pool.memory_per_slot);
  RETURN_IF_ERROR(pool.Finish());
  FileReader transport(path, *below, app);
  TransportSettings& settings = options->transport;
  transport.Take("kind", "--transport", kind);
  transport.Take("rdma-addresses", nullptr, &settings.rdma_addresses);
  transport.Take("rails", nullptr, &settings.rails);
  transport.Take("control-traffic-class", nullptr, &settings.control_traffic_class);
  transport.Take("bulk-traffic-class", nullptr, &settings.bulk_traffic_class);
  transport.Take("timeout", nullptr, &settings.timeout);
  transport.Take("retry-count", nullptr, &settings.retry_count);
  transport.Take("keepalive-ms", nullptr, &settings.keepalive_ms);
  transport.Take("peer-timeout-ms", nullptr, &settings.peer_timeout_ms);
  std::string gpu_direct = "auto";
  transport.Take("gpudirect", nullptr, &gpu_direct);
  RETURN_IF_ERROR(transport.Finish());
  return ParseGpuDirect(gpu_direct, &settings.gpu_direct);
}

}  // namespace

Result<Options> ParseOptions(int argc, char** argv) {
  Options options;
  CLI::App app(kAbout, "penstockd");
  app.footer(kExamples);
  app.set_version_flag("--version", "penstockd " PENSTOCK_VERSION, "Show the version and exit");
  std::string listen = "127.0.0.1:14833", kind = "auto", config;
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
  RETURN_IF_ERROR(ParseAddress(listen, &options));
  ASSIGN_OR_RETURN(options.transport.choice, transport::ParseChoice(kind, "Transport"));
  RETURN_IF_ERROR(CheckTransport(options.transport));
  if (options.transport.gpu_direct == GpuDirectMode::kOn &&
      options.transport.choice == transport::Choice::kTcp) {
    return Fail(Code::kInvalidArgument,
                "Value of transport.gpudirect (on) asks for RDMA, and the transport is tcp.");
  }
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
