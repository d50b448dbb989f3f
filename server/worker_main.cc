#include "server/worker_main.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cstdlib>
#include <cstring>

#include "common/log.h"
#include "server/driver.h"
#include "server/isolation.h"
#include "server/path.h"
#include "server/process.h"
#include "server/session_parameters.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

Result<SessionParameters> ReadParameters() {
  ASSIGN_OR_RETURN(const std::string bytes,
                   ReadSealedFile(kParametersDescriptor, sizeof(SessionParameters)));
  close(kParametersDescriptor);
  if (bytes.size() != sizeof(SessionParameters)) {
    return Fail(Code::kInternal, "The session's parameters have another size.");
  }
  SessionParameters parameters;
  memcpy(&parameters, bytes.data(), sizeof parameters);
  return parameters;
}

// All workers of a daemon share their simulated devices' memory, as they would a real device's: the
// simulated GPU keeps its accounts in the supervisor's memory file. By its name in /proc, because a
// name is what the simulated GPU takes; and it must stay open, because closing would drop the lock
// that says we live.
void ShareSimulatedMemory() {
  const std::string path = "/proc/self/fd/" + std::to_string(kSimulatedMemoryDescriptor);
  setenv("SIMGPU_SHARED", path.c_str(), 1);
}

// The driver shows this process the slot's GPUs alone.
void ChooseDevices(const SessionParameters& parameters) {
  std::string list;
  for (uint32_t device = 0; device < parameters.device_count; ++device) {
    if (device != 0) list += ',';
    list += parameters.uuids[device];
  }
  setenv("CUDA_VISIBLE_DEVICES", list.c_str(), 1);
}

// A device that has gone since the supervisor looked, or that the driver does not find by its name,
// would leave the others under wrong numbers.
Status CheckDevices(const SessionParameters& parameters, const Driver& driver) {
  int count = 0;
  if (CUresult result = driver.cuDeviceGetCount(&count); result != CUDA_SUCCESS) {
    return Fail(Code::kUnavailable, std::string("The driver does not count its devices: ") +
                                        ErrorName(driver, result) + ".");
  }
  const int wanted = static_cast<int>(parameters.device_count);
  if (parameters.slotted != 0 ? count == wanted : count >= wanted) return {};
  return Fail(Code::kUnavailable, "The driver shows (" + std::to_string(count) +
                                      ") devices of the (" + std::to_string(wanted) +
                                      ") that the session has.");
}

// The library is opened first, because the worker's user may not be able to read it where it lies;
// the system call filter comes last, because a driver may start helper programs. RDMA comes in
// between: path.h has the reasons.
Result<Driver> StartDriver(const SessionParameters& parameters, RdmaPort* port) {
  if (parameters.simulated != 0) ShareSimulatedMemory();
  if (parameters.slotted != 0) ChooseDevices(parameters);
  ASSIGN_OR_RETURN(const Driver driver, OpenDriver(parameters.driver));
  if (parameters.isolate != 0) RETURN_IF_ERROR(Isolate(parameters));
  *port = OpenRdmaPort(parameters);
  const CUresult result = driver.cuInit(0);
  if (result != CUDA_SUCCESS) {
    return Fail(Code::kUnavailable,
                std::string("The driver does not start: ") + ErrorName(driver, result) + ".");
  }
  RETURN_IF_ERROR(CheckDevices(parameters, driver));
  if (parameters.isolate != 0) RETURN_IF_ERROR(ForbidSystemCalls());
  return driver;
}

Status TellSupervisor(const WorkerReady& ready) {
  if (send(kSupervisorDescriptor, &ready, sizeof ready, MSG_NOSIGNAL) != sizeof ready) {
    return FailErrno("Cannot tell the supervisor");
  }
  return {};
}

Status Serve(const SessionParameters& parameters, const Driver& driver, RdmaPort port,
             SessionMeter* meter, bool* good) {
  UniqueFd sockets[2];
  RETURN_IF_ERROR(ReceiveDescriptors(kSupervisorDescriptor, sockets));
  auto connection =
      MakeConnection(parameters, std::move(port), std::move(sockets[0]), std::move(sockets[1]));
  if (!connection) {
    LOG_WARNING("session", "Session %lu ends before it begins: %s", parameters.session,
                connection.error().message.c_str());
    return tl::unexpected<Error>(connection.error());
  }
  WorkerOptions options;
  options.session = parameters.session;
  options.epoch = parameters.epoch;
  options.device_count = parameters.device_count;
  options.memory_limit = parameters.memory_limit;
  std::copy(std::begin(parameters.context_bytes), std::end(parameters.context_bytes),
            options.context_bytes.begin());
  options.silence_ms = int64_t{parameters.silence_seconds} * 1000;
  options.capture_output = true;
  options.gpu_direct = static_cast<GpuDirectMode>(parameters.rdma.gpu_direct);
  ApplyDisabled(&options);
  options.meter = meter;
  if (meter != nullptr) {
    const std::string name = (*connection)->caps().name;
    meter->path = static_cast<uint32_t>(name == "rdma"  ? Path::kRdma
                                        : name == "shm" ? Path::kShm
                                                        : Path::kTcp);
  }
  Worker worker(options, driver, std::move(*connection));
  LOG_DEBUG("session", "Session %lu serves %s (pid %u on %s, from %s).", parameters.session,
            parameters.program, parameters.client_pid, parameters.client_host, parameters.peer);
  *good = worker.Run();
  // Everything that the session held goes with the process, also what still runs on the device.
  _exit(*good ? 0 : 3);
}

}  // namespace

int WorkerMain() {
  SetLogName("penstockd-worker");
  // Descriptors 1 and 2 will carry what kernels print; log lines keep the daemon's stderr.
  if (dup2(2, kLogDescriptor) < 0) return 1;
  SetLogDescriptor(kLogDescriptor);
  prctl(PR_SET_NAME, "penstock-worker");
  prctl(PR_SET_TIMERSLACK, 1000);  // short sleeps are the dispatch loop's daily bread

  WorkerReady ready;
  auto parameters = ReadParameters();
  if (!parameters) {
    LOG_ERROR("session", "%s", parameters.error().message.c_str());
    return 1;
  }
  if (parameters->log[0] != '\0') SetLogSpec(parameters->log);
  SessionMeter* const meter = MapMeter(kMeterDescriptor);
  close(kMeterDescriptor);
  RdmaPort port;
  auto driver = StartDriver(*parameters, &port);
  if (!driver) {
    LOG_ERROR("session", "Session %lu: %s", parameters->session, driver.error().message.c_str());
    CopyText(ready.error, driver.error().message);
    (void)TellSupervisor(ready);
    return 1;
  }
  ready.ok = 1;
  bool good = false;
  auto served = TellSupervisor(ready);
  if (served) served = Serve(*parameters, *driver, std::move(port), meter, &good);
  if (!served) LOG_DEBUG("session", "%s", served.error().message.c_str());
  return good ? 0 : 1;
}

}  // namespace penstock::server
