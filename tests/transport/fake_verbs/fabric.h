// An adversarial RDMA fabric inside one process.
//
// Soft-RoCE moves bytes in order, never reports a full send queue and completes a WRITE only when
// its bytes are in place: code that relies on any of it passes there and corrupts data on a real
// NIC. This provider does the opposite wherever the specification lets it:
//
//   - a WRITE's payload is placed in pieces of one MTU in random order; WRITEs overtake each other
//     and earlier READs; a WRITE may complete at its sender before its bytes are visible at the
//     peer. Only a receive completion promises the WRITEs of its queue pair that were posted before
//     it;
//   - a send slot is free again only when a completion that covers it has been polled, and a full
//     queue is ENOMEM; a completion queue that overflows is lost;
//   - completions are delayed per queue, so the peer's answer may be seen before one's own
//     completion; some appear between the last poll and the request for an event, which then never
//     comes;
//   - a failed completion has nothing but wr_id, status and qp_num;
//   - memory is touched only under the fabric's lock and only through a registration that is valid
//     at that moment, so a thread sanitizer reports every access that no completion allows.
//
// Misuse that real verbs answer with a hang or a crash (an event that was never acknowledged, a
// buffer changed before its completion, objects freed in the wrong order) is noted: a test ends
// with CHECK(fabric.violations().empty()), and objects() names what was leaked.
//
// A Host is one process: its own devices, contexts, ids. All randomness comes from the seed, but
// the fabric moves data on a thread of its own, so a seed fixes the odds, not the schedule.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/rdma/verbs.h"

namespace penstock::transport::rdma::fake {

// What becomes of device memory: registered by dma-buf, for which any memory file will do.
enum class DeviceMemory {
  kNone,  // cannot be registered, as on soft-RoCE
  kWorks,
  kLate,         // what a device writes there is seen only after FlushDeviceWrites or a READ of it
  kWrongWrites,  // one bit of each piece that is written there is turned
  kWrongReads,   // the same of what is read
  kFaults,       // accesses end in a local protection error
  kStuck,        // accesses never end
};

struct FabricOptions {
  uint64_t seed = 1;
  DeviceMemory device_memory = DeviceMemory::kNone;
  double time_scale = 0.1;  // of the retry timeouts (4.096 us * 2^timeout * (retries + 1))
  uint32_t mtu = 4096;
  uint32_t most_inline = 512;  // more is refused by CreateQp
  uint32_t most_reads = 16;    // outstanding READs of one queue pair
  bool reorder = true;
  double early_completion = 0.5;  // of a WRITE, before its bytes are in place
  double delay = 0.15;            // a completion is held up to delay_us
  int delay_us = 300;
  double slip = 0.1;  // a completion is held until its queue is armed, and slips in just before
  double lose_notification = 0;
  int unreachable_ms = 300;  // until an unanswered connection request fails
  // In order, at once, as soft-RoCE.
  static FabricOptions Calm();
};

// Calls that can fail by script. Frees, acknowledgements and event reads are not among them.
enum class Call {
  kGetDeviceList,
  kOpenDevice,
  kQueryDevice,
  kQueryPort,
  kQueryGid,
  kAllocPd,
  kRegMr,
  kRegDmabufMr,
  kCreateCompChannel,
  kCreateCq,
  kPollCq,
  kReqNotifyCq,
  kPostSend,
  kPostRecv,
  kModifyQp,
  kQueryQp,
  kCreateEventChannel,
  kCreateId,
  kBindAddr,
  kResolveAddr,
  kResolveRoute,
  kCreateQp,
  kListen,
  kConnect,
  kAccept,
  kReject,
  kDisconnect,
  kSetOption,
};
const char* CallName(Call call);

class Host;
struct State;

// The nth work request (from 1, counted from now) that `host` transmits with this opcode.
struct RequestFault {
  Host* host = nullptr;  // any
  ibv_wr_opcode opcode = IBV_WR_SEND;
  int nth = 1;
  ibv_wc_status status = IBV_WC_RETRY_EXC_ERR;
  bool arrives = false;  // carried out at the peer before it fails at the sender
};

struct DeviceSpec {
  std::string name, address;  // "fake0", "10.99.0.1"
  uint32_t most_reads = 0;    // as the option of the fabric, which holds where this is 0
  uint32_t mtu = 4096;        // a packet beyond it is refused
};

class Fabric {
 public:
  explicit Fabric(FabricOptions options = {});
  ~Fabric();  // hosts may live on
  // Every address is reachable from every other one.
  std::shared_ptr<Host> AddHost(const std::vector<DeviceSpec>& devices);

  // Packets between two addresses pass or are dropped, unnoticed by whoever is idle.
  void SetLink(const std::string& a, const std::string& b, bool up);
  // The same for everything from and to this address; its owner gets PORT_ERR or PORT_ACTIVE.
  void SetPort(const std::string& address, bool up);
  void RemoveDevice(const std::string& address);
  // The address is taken from the device, or given to it again. Queue pairs that were connected
  // before stay mute: the entry of the GID table that they use is gone for good.
  void SetAddress(const std::string& address, bool present);
  // The process of this host ends. `announced`: its kernel still says goodbye.
  void Kill(Host& host, bool announced);

  void Fail(const RequestFault& fault);
  // The nth use of a call from now fails with this errno; PostSend and PostRecv count work requests
  // instead, so that a list can fail in its middle.
  void FailCall(Host& host, Call call, int nth, int error);
  // The nth request of this kind, whoever posts it.
  void FailPost(Host& host, ibv_wr_opcode opcode, int nth, int error);
  // The nth of all fallible calls of this host from now.
  void FailAnyCall(Host& host, int nth, int error);
  std::vector<Call> calls(Host& host);  // that it has made so far

  // While held: no send completion (or receive completion) of anyone becomes visible.
  void HoldSendCompletions(bool hold);
  void HoldReceiveCompletions(bool hold);
  // While held, a WRITE that has arrived (from this address, or from any) is not placed.
  void HoldWrites(bool hold);
  // While held, a WRITE that has arrived when its sender's queue pair breaks stays in the fabric:
  // it is placed later, unless the queue pair that it goes to has broken by then.
  void HoldLateWrites(bool hold);
  // With DeviceMemory::kLate: what has been written becomes visible, as by a flush of the GPU.
  void FlushDeviceWrites();
  uint64_t device_bytes_written();  // by devices into device memory, since the fabric was made
  uint64_t device_bytes_read();
  void HoldWritesFrom(const std::string& address, bool hold);
  // Waits until every posted request has been carried out and its completion is there, up to ten
  // seconds. False if something is still under way, or held.
  bool AwaitQuiet();
  // The next n completion events never come.
  void LoseNotifications(int n);
  // Sets the adversity of what happens from now on.
  void SetOptions(const FabricOptions& options);
  // An asynchronous event out of nowhere; IBV_EVENT_QP_FATAL for each queue pair of the device.
  void RaiseAsync(const std::string& address, ibv_event_type type);

  std::vector<std::string> violations();
  std::vector<std::string> TakeViolations();  // and forgets them
  std::vector<std::string> objects();         // that live, one line each
  uint64_t receiver_not_ready();              // how often a SEND found no receive
  uint64_t reads_held_up();  // how many READs waited in a send queue for earlier ones to end
  size_t ids_at(const std::string& address);  // rdma_cm ids that the owner holds on a device

 private:
  std::shared_ptr<State> state_;
};

}  // namespace penstock::transport::rdma::fake
