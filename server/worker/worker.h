// One session: executes a client's calls on the driver, in the order in which they come.
//
// One thread, the dispatch thread, receives frames, runs handlers and polls everything that is
// under way: waits, transfers, progress, jobs of the helper threads. It never blocks, neither on
// the peer nor in the driver, so that a call of one application thread that waits never delays
// another's. What may block runs elsewhere: frees on the reaper, module loads and the making and
// destroying of contexts on the executor.
//
//   OnFrame -> context switch -> handler (CallContext) -> driver -> reply, or a pending wait
//
// When nothing happens the thread sleeps: on the connection's descriptor alone if nothing is under
// way, otherwise with short timeouts that grow with the age of what is awaited.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/driver.h"
#include "server/meter.h"
#include "server/worker/allocations.h"
#include "server/worker/bounce.h"
#include "server/worker/call_context.h"
#include "server/worker/executor.h"
#include "server/worker/gpu_direct.h"
#include "server/worker/host_functions.h"
#include "server/worker/objects.h"
#include "server/worker/outbox.h"
#include "server/worker/output.h"
#include "server/worker/progress.h"
#include "server/worker/reaper.h"
#include "server/worker/transfers.h"
#include "server/worker/waits.h"
#include "transport/transport.h"

namespace penstock::server {

struct WorkerOptions {
  uint64_t session = 0;
  uint32_t epoch = 1;
  uint32_t device_count = 1;  // ordinals below it may be named by the client
  int64_t silence_ms = 30'000;
  uint64_t memory_limit = 0;                          // bytes of each device; 0: none
  std::array<uint64_t, kMaxDevices> context_bytes{};  // what a context takes of each
  bool capture_output = false;  // the process's stdout and stderr belong to the client's program
  GpuDirectMode gpu_direct = GpuDirectMode::kAuto;
  SessionMeter* meter = nullptr;  // null: nobody wants to know
  // Switches of single mechanisms (PENSTOCK_DISABLE), for tests that show what they are good for.
  bool gate = true;
  bool deferred_waits = true;
  bool thread_errors = true;  // off: a posted failure goes to whichever thread asks next
};
// Reads PENSTOCK_DISABLE.
void ApplyDisabled(WorkerOptions* options);

class Worker : public transport::Handler {
 public:
  Worker(const WorkerOptions& options, const Driver& driver,
         std::unique_ptr<transport::Connection> connection);
  ~Worker() override;

  // Serves until the session ends. True if the client ended it, false if it was malformed, silent
  // or broken; one log line has been written.
  bool Run();
  // Makes Run return. From any thread.
  void Stop();

  // transport::Handler
  bool OnFrame(std::span<const std::byte> frame) override;
  void OnBulkDone(uint64_t cookie, transport::BulkStatus status, uint64_t bytes) override;

  const WorkerOptions& options() const { return options_; }
  const Driver& driver() const { return driver_; }
  transport::Connection& connection() { return *connection_; }
  Objects& objects() { return objects_; }
  Allocations& allocations() { return allocations_; }
  const std::shared_ptr<Quota>& quota() { return quota_; }
  // Of images that are being loaded; see exec/module.cc.
  const std::shared_ptr<std::atomic<uint64_t>>& loading_bytes() { return loading_bytes_; }
  ContextCharges& context_charges() { return context_charges_; }
  // Memory of the device that streams have not come to free yet.
  std::vector<std::pair<std::shared_ptr<StreamState>, std::shared_ptr<Quota::Charge>>> Freeing(
      uint32_t device);
  Outbox& outbox() { return outbox_; }
  BounceSlots& bounce() { return bounce_; }
  Progress& progress() { return progress_; }
  Waits& waits() { return waits_; }
  Transfers& transfers() { return transfers_; }
  GpuDirect& gpu_direct() { return gpu_direct_; }
  HostFunctions& host_functions() { return host_functions_; }
  Reaper& reaper() { return reaper_; }
  Executor& executor() { return executor_; }

  // Answers a call: output and progress first, so that a program sees them when it goes on. The
  // failure of a posted one is kept for its thread.
  void Answer(const ReplyToken& token, CUresult result, std::span<const std::byte> body = {});
  // What the kernels have printed by now goes to the client.
  void ForwardOutput();

  // The context that calls run in now; null if none.
  const std::shared_ptr<ContextState>& current() const { return current_; }
  // Makes a context current for internal work on the dispatch thread.
  CUresult MakeCurrent(const std::shared_ptr<ContextState>& context);
  // A wire handle's context; retains a primary context on first use. On failure *error says why,
  // and *minted tells whether an honest client can have sent it.
  std::shared_ptr<ContextState> FindContext(Handle handle, CUresult* error, bool* minted);
  CUresult RetainPrimary(CUdevice device);
  // Enters a context that the driver made; forgets one, with everything that belongs to it.
  std::shared_ptr<ContextState> NewContext(Handle handle, CUcontext context, CUdevice device);
  void ForgetContext(const std::shared_ptr<ContextState>& context);
  // The driver has destroyed one that was forgotten.
  void ContextIsGone(ContextState& context);
  // While a primary context is being reset, frames that need it wait.
  void SetPrimaryBusy(CUdevice device, bool busy);
  bool primary_busy(CUdevice device) const { return primary_busy_[device]; }
  // Arena and copy streams of the context, which must be current.
  CUresult PrepareContext(ContextState& context);

  // One without timing, made where none rests. The error is the driver's, so that a context which a
  // kernel has broken says so.
  CUresult TakeEvent(ContextState& context, CUevent* event);
  void ReturnEvent(ContextState& context, CUevent event);

  // A Get outside of Transfers: the cookie for it, and what to do when it is done.
  uint64_t AddPull(std::function<void(transport::BulkStatus)> done);
  void DropPull(uint64_t cookie);

  // Ends the session: what no honest peer sends, or trouble of ours.
  void End(const std::string& reason, bool malformed);
  bool ended() const { return ended_; }
  // A posted call was answered with its context's error and may have left an object unmade, so a
  // handle that looks never minted may be an honest one.
  bool creations_skipped() const { return creations_skipped_; }

 private:
  class DispatchedCall;

  void Dispatch(std::span<const std::byte> frame);
  bool MustHold(const FrameHeader& header) const;
  void TakeFrame(std::span<const std::byte> frame);
  bool Step();
  // Returns what the connection handled meanwhile, as Poll does.
  int Sleep();
  void Measure();  // for the meter
  void CheckSilence();
  const HandlerEntry* FindHandler(uint32_t function) const;

  const WorkerOptions options_;
  const Driver driver_;
  std::unique_ptr<transport::Connection> connection_;
  Objects objects_;
  Allocations allocations_;
  const std::shared_ptr<Quota> quota_ = std::make_shared<Quota>(options_.memory_limit);
  const std::shared_ptr<std::atomic<uint64_t>> loading_bytes_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  ContextCharges context_charges_{quota_, options_.context_bytes};
  Outbox outbox_;
  BounceSlots bounce_;
  Output output_;
  Reaper reaper_;
  Executor executor_;
  Progress progress_;
  Waits waits_;
  Transfers transfers_;
  GpuDirect gpu_direct_;
  HostFunctions host_functions_;

  static constexpr uint64_t kPullCookies = 1ull << 63;
  uint64_t next_pull_ = 1;
  std::unordered_map<uint64_t, std::function<void(transport::BulkStatus)>> pulls_;

  std::vector<HandlerEntry> handlers_;  // sorted by id
  std::shared_ptr<ContextState> current_;
  bool primary_busy_[kMaxDevices] = {};
  std::deque<std::vector<std::byte>> held_;  // frames behind one that must wait
  uint64_t received_ = 0;                    // newest sequence
  struct PendingError {
    CUresult error;
    uint64_t context;  // current when the call was issued
  };
  std::unordered_map<uint32_t, PendingError> pending_errors_;  // by thread
  std::unique_ptr<std::byte[]> reply_space_;
  int64_t heard_ns_ = 0, said_ns_ = 0;
  bool client_beats_ = false;  // it has sent a heartbeat, so its silence means something
  std::atomic<bool> stop_{false};
  bool ended_ = false, good_end_ = false;
  bool creations_skipped_ = false;
  uint32_t idle_rounds_ = 0, rounds_ = 0;
  int64_t idle_since_ns_ = 0;
};

}  // namespace penstock::server
