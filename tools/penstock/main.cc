// penstock: the command that people use.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <CLI/CLI.hpp>

#include "tools/penstock/run.h"

namespace {

constexpr char kAbout[] =
    "Runs unmodified CUDA programs on GPUs that stand elsewhere.\n"
    "\n"
    "Nothing needs to be recompiled: the program gets Penstock's libcuda.so.1, which sends its "
    "driver\n"
    "calls to a penstockd on a machine with GPUs.";

constexpr char kRunAbout[] = "Runs a CUDA program on the GPUs of a server, or on the simulated GPU";

constexpr char kRunFooter[] =
    "\n"
    "Examples:\n"
    "  penstock run --server gpu7:14833 -- python3 train.py    on the GPUs behind gpu7\n"
    "  penstock run -n 2 --server gpu7:14833 -- ./program      with two of them\n"
    "  penstock run --sim -- ./program                        on the simulated GPU: no hardware\n"
    "\n"
    "Without --server and --sim the variable PENSTOCK_SERVER decides. If it is not set either, "
    "the\n"
    "simulated GPU is used, through a daemon of the program's own, and a line on stderr says so.\n"
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
    return "\nUsage: penstock run [-n GPUS] [--server HOST:PORT] [--key FILE] [--transport KIND] "
           "[--wait] [--sim] -- PROGRAM "
           "ARGS...\n";
  }
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(kAbout, "penstock");
  app.set_version_flag("--version", "penstock " PENSTOCK_VERSION);
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return std::string("penstock: ") + error.what() + ". See: penstock run --help\n";
  });

  penstock::RunOptions options;
  CLI::App* run = app.add_subcommand("run", kRunAbout);
  run->formatter(std::make_shared<RunFormatter>());
  run->footer(kRunFooter);
  run->prefix_command();  // the first word that CLI11 does not know begins the program
  run->add_option("-n,--gpus", options.gpus, "How many GPUs the program sees; default: all offered")
      ->check(CLI::Range(1, 1024).description(""))
      ->envname("PENSTOCK_GPUS")
      ->type_name("GPUS");
  CLI::Option* server =
      run->add_option("--server", options.server, "The penstockd to use")->type_name("HOST:PORT");
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
  run->add_flag("--sim", options.simulate, "Use the simulated GPU")->excludes(server);

  // What stands after the first -- is the program's alone; CLI11 does not see it.
  const auto end = std::find(argv, argv + argc, std::string_view("--"));
  try {
    app.parse(static_cast<int>(end - argv), argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : penstock::kOwnFailure;
  }
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
  if (options.server.empty() && !options.simulate) {
    if (const char* configured = std::getenv("PENSTOCK_SERVER")) options.server = configured;
  }
  return penstock::Run(options);
}
