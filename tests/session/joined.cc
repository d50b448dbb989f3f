#include "tests/session/joined.h"

#include <catch2/catch.hpp>
#include <cstdlib>

#include "interposer/core/statistics.h"
#include "server/driver.h"
#include "transport/inproc/inproc.h"

namespace penstock {
namespace {

const server::Driver& Sim() {
  static const server::Driver driver = [] {
    setenv("SIMGPU_GPUDIRECT", "all", 1);
    auto loaded = server::LoadDriver(PENSTOCK_SIMGPU);
    if (!loaded) throw std::runtime_error(loaded.error().message);
    if (loaded->cuInit(0) != CUDA_SUCCESS) throw std::runtime_error("cuInit fails.");
    return *loaded;
  }();
  return driver;
}

}  // namespace

const char* NameOf(Carrier path) {
  switch (path) {
    case Carrier::kPlain:
      return "plain";
    case Carrier::kDear:
      return "dear";
    case Carrier::kRdma:
      return "rdma";
    case Carrier::kDirect:
      return "direct";
  }
  return "?";
}

Joined::Joined(Carrier path) {
  std::unique_ptr<transport::Connection> near, far;
  if (path == Carrier::kRdma || path == Carrier::kDirect) {
    using transport::rdma::fake::DeviceMemory;
    transport::RdmaPairOptions options;
    options.fabric.device_memory =
        path == Carrier::kDirect ? DeviceMemory::kWorks : DeviceMemory::kNone;
    rdma_ = transport::MakeRdmaPair(options);
    near = std::move(rdma_.near);
    far = std::move(rdma_.far);
  } else {
    std::tie(near, far) =
        transport::inproc::MakePair({.registration_is_dear = path == Carrier::kDear});
  }
  worker_ = std::make_unique<server::Worker>(server::WorkerOptions{}, Sim(), std::move(near));
  thread_ = std::thread([this] { worker_->Run(); });

  ParsedWelcome welcome;
  welcome.welcome.epoch = 1;
  welcome.welcome.server.driver_version = 13000;
  welcome.welcome.server.device_count = 1;
  welcome.devices.resize(1);
  welcome.devices[0] = DeviceInfo{};
  interposer::SessionOptions options;
  options.reserve_addresses = false;  // the device's memory lies in this process
  std::vector<std::unique_ptr<interposer::Session>> sessions;
  sessions.push_back(
      std::make_unique<interposer::Session>(std::move(far), std::move(welcome), options));
  interposer::ForgetStatistics();
  interposer::Client::Install(
      std::make_unique<interposer::Client>(std::move(sessions), interposer::ClientOptions{}));
  client_ = interposer::Client::Get();
}

Joined::~Joined() {
  client_->session().End();
  worker_->Stop();
  thread_.join();
  delete client_;  // no thread is left that knows it, and the next test installs another
  // In a daemon the process would end here. The device may still wait at the worker's gates, so its
  // work goes first.
  Sim().cuDevicePrimaryCtxReset_v2(0);
  worker_.reset();
  if (rdma_.fabric == nullptr) return;
  for (const std::string& violation : rdma_.fabric->violations()) FAIL_CHECK(violation);
  for (const std::string& object : rdma_.fabric->objects()) FAIL_CHECK("Leaked: " << object);
}

void Joined::Run(const std::function<void()>& body) {
  std::thread([&] {
    CUcontext context = nullptr;
    if (cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS ||
        cuCtxSetCurrent(context) != CUDA_SUCCESS) {
      FAIL_CHECK("There is no context.");
      return;
    }
    body();
  }).join();
}

CallCounts Joined::CountsOf(Function function) {
  const interposer::FunctionCounters& counters = interposer::CountersOf(function);
  return {counters.calls, counters.round_trips, counters.posted};
}

}  // namespace penstock
