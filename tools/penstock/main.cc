// penstock: the command that people use.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <CLI/CLI.hpp>

#include "tools/penstock/pool.h"
#include "tools/penstock/run.h"

namespace {

constexpr char kAbout[] =
    "Runs unmodified CUDA programs on GPUs that stand elsewhere.\n"
    "\n"
    "Nothing needs to be recompiled: the program gets Penstock's libcuda.so.1, which sends its "
    "driver\n"
    "calls to a penstockd on a machine with GPUs. Which machines these are stands in a pool file.";

constexpr char kRunAbout[] = "Runs a CUDA program on the GPUs of a server, or on the simulated GPU";

constexpr char kRunFooter[] =
    "\n"
    "Examples:\n"
    "  penstock run -- python3 train.py                        on a GPU of the pool\n"
    "  penstock run -n 4 -- ./program                          with four, of one server or "
    "several\n"
    "  penstock run --server gpu7:14833 -- ./program           on a GPU of this server\n"
    "  penstock run --sim -- ./program                        on the simulated GPU: no hardware\n"
    "\n"
    "Without --server, --config and --sim the variable PENSTOCK_SERVER decides, then the pool "
    "file\n"
    "that PENSTOCK_CONFIG names, ~/.config/penstock/pool.toml or /etc/penstock/pool.toml. If none\n"
    "of them is there, the simulated GPU is used, through a daemon of the program's own, and a "
    "line\n"
    "on stderr says so.\n"
    "\n"
    "The exit status is the program's (128 + n if signal n ended it; 127 or 126 if it cannot be\n"
    "started, 125 if Penstock itself fails, 75 if no GPU is free). Only the program writes to "
    "stdout.\n"
    "\n"
    "More by environment variables of the program:\n"
    "  PENSTOCK_STATS=FILE     writes at exit what went over the wire, as JSON\n"
    "  PENSTOCK_LOG=LEVEL      error, warning, info, debug or trace, to stderr\n"
    "  CUDA_VISIBLE_DEVICES    as always\n"
    "\n"
    "Any program can also be started with no help from this command:\n"
    "  PENSTOCK_SERVER=gpu7:14833 LD_PRELOAD=PREFIX/lib/penstock/libcuda.so.1 ./program";

class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "\nUsage: penstock run [-n GPUS] [--config FILE | --server HOST:PORT[,...] [--key "
           "FILE]] "
           "[--transport KIND] [--wait] [--sim] -- PROGRAM ARGS...\n";
  }
};

constexpr char kConfigFooter[] =
    "\n"
    "A pool file names the servers, in the order in which a program's GPUs are numbered:\n"
    "\n"
    "  key-file = \"key\"                 # for servers that name no other; beside this file\n"
    "  [[server]]\n"
    "  name = \"gpu7\"                    # default: the host of the address\n"
    "  address = \"gpu7:14833\"\n"
    "  transport = \"auto\"               # auto, shm, rdma or tcp\n"
    "  gpus = [0, 1]                    # offered; default: all\n"
    "  slots-per-gpu = 2                # programs on one GPU\n"
    "  memory-per-slot = \"16 GiB\"       # all that a program gets of each of its GPUs\n"
    "\n"
    "The last three are for the daemon: penstockd --pool FILE reads them there.";

// The flags that the commands about the pool share.
void AddPoolFlags(CLI::App* command, penstock::PoolFlags* flags) {
  CLI::Option* config = command
                            ->add_option("--config", flags->config,
                                         "The pool file; default: see penstock config --help")
                            ->type_name("FILE");
  command->add_option("--server", flags->server, "These servers instead of a pool file's")
      ->type_name("HOST:PORT[,...]")
      ->excludes(config);
  command->add_option("--key", flags->key_file, "The file with the key that the servers demand")
      ->check(CLI::ExistingFile.description(""))
      ->type_name("FILE");
  command
      ->add_option_function<std::string>(
          "-o,--output", [flags](const std::string& kind) { flags->json = kind == "json"; },
          "table (default) or json")
      ->check(CLI::IsMember({"table", "json"}).description(""))
      ->type_name("KIND");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(kAbout, "penstock");
  app.set_version_flag("--version", "penstock " PENSTOCK_VERSION);
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return std::string("penstock: ") + error.what() + ". See: penstock --help\n";
  });

  penstock::RunOptions options;
  CLI::App* run = app.add_subcommand("run", kRunAbout);
  run->formatter(std::make_shared<RunFormatter>());
  run->footer(kRunFooter);
  run->prefix_command();  // the first word that CLI11 does not know begins the program
  run->add_option("-n,--gpus", options.gpus, "How many GPUs the program sees, or all; default: 1")
      ->check(CLI::Validator(
          [](std::string& text) {
            const bool number = !text.empty() && text.size() <= 4 && text != "0" &&
                                text.find_first_not_of("0123456789") == std::string::npos;
            return text == "all" || number
                       ? std::string()
                       : "The number of GPUs (" + text + ") is neither a number nor \"all\"";
          },
          ""))
      ->envname("PENSTOCK_GPUS")
      ->type_name("GPUS");
  CLI::Option* config =
      run->add_option("--config", options.config, "The pool file")->type_name("FILE");
  CLI::Option* server = run->add_option("--server", options.server, "The penstockd to use")
                            ->type_name("HOST:PORT")
                            ->excludes(config);
  run->add_option("--key", options.key_file, "The file with the key that the server demands")
      ->check(CLI::ExistingFile.description(""))
      ->envname("PENSTOCK_KEY_FILE")
      ->type_name("FILE");
  run->add_option("--transport", options.transport,
                  "auto: shared memory on one machine, RDMA where both hosts can, else tcp "
                  "(default); shm (shared memory, same "
                  "machine) or "
                  "rdma: that or an error; tcp")
      ->check(CLI::IsMember({"auto", "shm", "rdma", "tcp"}).description(""))
      ->envname("PENSTOCK_TRANSPORT")
      ->type_name("KIND");
  run->add_flag("--wait", options.wait,
                "Wait for a GPU where all slots of the server are taken, instead of\nending with "
                "status 75");
  run->add_flag("--sim", options.simulate, "Use the simulated GPU")
      ->excludes(server)
      ->excludes(config);

  penstock::PoolFlags flags;
  CLI::App* ls = app.add_subcommand("ls", "Lists the pool: servers, GPUs, slots, who is there");
  CLI::App* status = app.add_subcommand("status", "Lists the programs that use the pool");
  CLI::App* env =
      app.add_subcommand("env", "Prints what to export for programs started without this command");
  CLI::App* settings = app.add_subcommand("config", "Says what a pool file says");
  CLI::App* drain =
      app.add_subcommand("drain", "Lets a server take no new programs; those there go on");
  CLI::App* resume = app.add_subcommand("resume", "Lets a drained server take programs again");
  settings->require_subcommand(1);
  settings->footer(kConfigFooter);
  CLI::App* check = settings->add_subcommand("check", "Checks a pool file and shows it");
  check->footer(kConfigFooter);
  for (CLI::App* command : {ls, status, env, check, drain, resume}) AddPoolFlags(command, &flags);
  env->footer("\nExample:\n  eval \"$(penstock env -n 2)\"; python3 train.py");
  std::string file, gpus, name;
  check->add_option("FILE", file, "The pool file; default: the one that programs use");
  env->add_option("-n,--gpus", gpus, "How many GPUs programs see, or all; default: 1")
      ->type_name("GPUS");
  for (CLI::App* command : {drain, resume}) {
    command->add_option("SERVER", name, "Its name or address in the pool")->required();
  }

  // What stands after the first -- is the program's alone; CLI11 does not see it.
  const auto end = std::find(argv, argv + argc, std::string_view("--"));
  try {
    app.parse(static_cast<int>(end - argv), argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : penstock::kOwnFailure;
  }
  if (*ls) return penstock::ListGpus(flags);
  if (*status) return penstock::ShowSessions(flags);
  if (*env) return penstock::PrintEnvironment(flags, gpus);
  if (*check) return penstock::CheckConfig(flags, file);
  if (*drain) return penstock::Drain(flags, name);
  if (*resume) return penstock::Resume(flags, name);
  options.program = run->remaining();
  const bool began = !options.program.empty();  // the -- is then an argument of the program
  if (began && options.program[0][0] == '-') {
    std::fprintf(stderr, "penstock: The option (%s) is unknown. See: penstock run --help\n",
                 options.program[0].c_str());
    return penstock::kOwnFailure;
  }
  options.program.insert(options.program.end(), end == argv + argc || began ? end : end + 1,
                         argv + argc);
  if (options.program.empty()) {
    std::fputs("penstock: No program is given. See: penstock run --help\n", stderr);
    return penstock::kOwnFailure;
  }
  if (options.server.empty() && options.config.empty() && !options.simulate) {
    if (const char* configured = std::getenv("PENSTOCK_SERVER")) options.server = configured;
    if (options.server.empty()) options.config = penstock::config::FindPoolFile();
  }
  return penstock::Run(options);
}
