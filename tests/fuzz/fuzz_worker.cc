// A whole session as the worker sees it: any frames a client may send, against the fake driver.
// Covers the frame header, all generated and hand-written decoders and handlers, the tables of
// handles and allocations, and the ways of copies, bounce slots and host functions.
#include <dlfcn.h>
#include <cstdlib>

#include "server/driver.h"
#include "server/worker/worker.h"
#include "tests/fuzz/scripted_connection.h"

using namespace penstock;

namespace {

struct Fake {
  server::Driver driver;
  void (*reset)();
};

const Fake& TheFake() {
  static const Fake fake = [] {
    fuzz::Silence();
    auto driver = server::LoadDriver(PENSTOCK_FUZZ_DRIVER);
    void* library = dlopen(PENSTOCK_FUZZ_DRIVER, RTLD_NOW);
    if (!driver || library == nullptr) abort();
    return Fake{*driver, reinterpret_cast<void (*)()>(dlsym(library, "FuzzDriverReset"))};
  }();
  return fake;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Fake& fake = TheFake();
  {
    fuzz::Input input(data, size);
    const auto switches = input.Take<uint8_t>();
    server::WorkerOptions options;
    options.device_count = 2;
    options.memory_limit = (switches & 2) != 0 ? 1 << 20 : 0;
    server::Worker worker(options, fake.driver,
                          std::make_unique<fuzz::ScriptedConnection>(input, (switches & 1) != 0));
    worker.Run();
  }
  fake.reset();
  return 0;
}
