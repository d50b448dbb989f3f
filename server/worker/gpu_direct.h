// GPUDirect: bulk moves between a NIC and device memory, without staging memory in between.
//
// The device's memory is registered with the NICs through a dma-buf, always a whole allocation: a
// dma-buf begins at a page, and an offset that is wrong by one sends bytes into somebody else's
// memory. The first large copy of an allocation registers it, the free ends that before it frees.
// Memory from pools and variables of modules have no dma-buf and go through staging.
//
// Nothing is believed before it is seen. Attributes and registrations succeed on machines where
// PCIe access control or an IOMMU then drops the NIC's accesses, or where they arrive as other
// bytes. So the first use of a device is preceded by a test of every NIC of the session, in both
// directions, on scratch memory; if it fails, the device stays with staging ("demoted"), with one
// line in the log. The same happens when a NIC later reports that it cannot reach the memory: the
// copy begins again, through staging.
//
// What a NIC has written may be on its way still when the NIC reports it. Where the device does not
// order such writes by itself, Flush is called before anything can depend on them.
//
// Registering and testing take milliseconds and call the driver, so they run on a thread of their
// own; a copy waits for them as it waits for its stream. Everything else is the dispatch thread's.
// Price: 2 MiB of each device for the test's scratch memory, kept because freeing waits for the
// kernels of the program, whom a copy behind the test may have to release.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/result.h"
#include "protocol/handle.h"
#include "server/options.h"
#include "server/worker/executor.h"
#include "transport/transport.h"

namespace penstock::server {

struct ContextState;
struct ReapJob;
class Worker;

// Copies below this gain nothing from it. Rows that lie apart count one by one.
inline constexpr uint64_t kLeastDirectBytes = 64 * 1024;

// An allocation as the NICs know it. Whoever holds it may start moves; the memory is freed only
// when nobody does.
struct DirectMemory {
  enum class State : uint8_t {
    kPending,  // ask again
    kReady,
    kStaged,  // not reachable: use staging
  };
  State state = State::kPending;  // dispatch thread
  uint64_t begin = 0, bytes = 0;
  std::shared_ptr<ContextState> context;
  std::unique_ptr<transport::MemoryRegion> region;  // once it is ready
};

class GpuDirect {
 public:
  explicit GpuDirect(Worker& worker);
  ~GpuDirect();

  // kOn demands what the connection and every device of the session must then have.
  Status CheckDemand();

  // The allocation of the context in which these bytes lie, if moves may go there directly, now or
  // soon. Null for staging. Dispatch thread, as all of these.
  std::shared_ptr<DirectMemory> Find(const std::shared_ptr<ContextState>& context, uint64_t address,
                                     uint64_t bytes);
  // What NICs have written to the context's device so far is seen by its work from now on. The
  // context must be current. False, and the device demoted, if the driver cannot promise it.
  bool Flush(const ContextState& context);
  // Staging for this device from now on.
  void Demote(CUdevice device, const Error& reason);

  // The allocation that begins here is about to be freed: forgotten, and to be held by the job that
  // frees it. Null if it was never used.
  std::shared_ptr<DirectMemory> Forget(uint64_t begin);
  // The context is about to be destroyed: gives what its end must wait for to the reaper.
  void DropContext(const std::shared_ptr<ContextState>& context);

  bool Step() { return registrar_ != nullptr && registrar_->Finish(); }
  bool idle() const { return registrar_ == nullptr || registrar_->idle(); }

  // Bytes of copies between device and client memory. Written by the dispatch thread.
  struct Moved {
    std::atomic<uint64_t> direct{0}, staged{0};
  };
  Moved& moved() { return moved_; }

 private:
  enum class Verdict : uint8_t {
    kPassed,
    kFailed,
    kLater,  // no memory for it, or the program has wrecked the context
  };
  struct TestResult {  // the registrar's thread, until it is done
    Verdict verdict = Verdict::kLater;
    Error reason;  // kFailed
  };
  struct Device {
    enum class State : uint8_t { kUnknown, kTesting, kUsed, kStaged };
    State state = State::kUnknown;
    bool flushes = false;              // NICs' writes need it
    bool failure_told = false;         // of a registration
    std::shared_ptr<TestResult> test;  // while it runs
    std::shared_ptr<ContextState> tested_in;
  };

  Device& DeviceOf(CUdevice ordinal);
  // Reads the attributes; why the device cannot, or nothing.
  Status Probe(CUdevice ordinal, Device* device);
  void RunTest(const ContextState& context, bool flushes, TestResult* result) const;
  void StartTest(const std::shared_ptr<ContextState>& context, Device& device);
  void StartRegistration(const std::shared_ptr<DirectMemory>& memory, Device& device);
  void OnRegistered(const std::shared_ptr<DirectMemory>& memory, const Status& registered);
  CUflushGPUDirectRDMAWritesScope scope() const;

  Worker& worker_;
  std::map<CUdevice, Device> devices_;
  std::map<uint64_t, std::shared_ptr<DirectMemory>> memories_;  // by begin
  Moved moved_;
  std::unique_ptr<Executor> registrar_;  // where there can be anything to do
};

}  // namespace penstock::server
