// What the fabric consists of. Everything here is guarded by State::mutex, which every call of the
// table takes; functions of State expect it held.
#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

#include "common/clock.h"
#include "common/unique_fd.h"
#include "tests/transport/fake_verbs/host.h"

namespace penstock::transport::rdma::fake {

// Events behind a descriptor that is readable as long as there are any. The owner may make the
// descriptor non-blocking.
template <typename T>
class EventQueue {
 public:
  EventQueue() : fd_(eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC)) {}
  int fd() const { return fd_.get(); }
  bool empty() const { return items_.empty(); }
  void Push(T item) {
    const uint64_t one = 1;
    if (write(fd_.get(), &one, sizeof one) == sizeof one) items_.push_back(std::move(item));
  }
  T Pop() {
    Take();
    T item = std::move(items_.front());
    items_.pop_front();
    return item;
  }
  template <typename Predicate>
  std::vector<T> Remove(Predicate predicate) {
    std::vector<T> removed;
    for (auto it = items_.begin(); it != items_.end();) {
      if (predicate(*it)) {
        Take();
        removed.push_back(std::move(*it));
        it = items_.erase(it);
      } else {
        ++it;
      }
    }
    return removed;
  }

 private:
  void Take() {
    uint64_t one;
    while (read(fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
  UniqueFd fd_;
  std::deque<T> items_;
};

struct FakeContext;
struct FakeQp;
struct FakeCq;
struct FakeId;

struct FakeDevice : ibv_device {
  Host* host = nullptr;
  std::string device_name, address_text;
  sockaddr_storage address{};
  uint32_t most_reads = 0;
  bool port_up = true, removed = false, addressed = true;
  int address_epoch = 0;  // grows when the address goes or comes
  uint32_t mtu = 4096;
  std::list<std::unique_ptr<FakeContext>> contexts;  // the first one is rdma_cm's
};

struct FakeContext : ibv_context {
  FakeDevice* fake_device = nullptr;
  EventQueue<ibv_async_event> async;
  bool closed = false;
};

struct FakePd : ibv_pd {
  Host* host = nullptr;
  int users = 0;
};

struct FakeMr : ibv_mr {
  Host* host = nullptr;
  int access = 0;
  // Of device memory: our own mapping of the file, of which `addr` is only the name.
  std::byte* mapping = nullptr;
  size_t mapping_bytes = 0;
  uint64_t mapping_offset = 0;  // of addr
  struct LateWrite {
    uint64_t offset;  // in the mapping
    std::vector<std::byte> bytes;
  };
  std::deque<LateWrite> late;
  std::byte* Place(uint64_t at) const {
    return mapping + mapping_offset + (at - reinterpret_cast<uint64_t>(addr));
  }
  void Flush() {
    for (const LateWrite& write : late) {
      std::memcpy(mapping + write.offset, write.bytes.data(), write.bytes.size());
    }
    late.clear();
  }
  FakePd* fake_pd() const { return static_cast<FakePd*>(pd); }
  bool Covers(uint64_t at, uint64_t bytes) const {
    const auto start = reinterpret_cast<uint64_t>(addr);
    return at >= start && bytes <= length && at - start <= length - bytes;
  }
};

struct FakeChannel : ibv_comp_channel {
  Host* host = nullptr;
  EventQueue<FakeCq*> events;
  int users = 0;
};

struct Completion {
  ibv_wc wc{};
  FakeQp* qp = nullptr;
  bool send = false, solicited = false, slips = false;
  uint64_t covers = 0;  // queue slots up to this count are free once it has been polled
  int64_t due = 0;
};

struct FakeCq : ibv_cq {
  enum class Armed { kNo, kSolicited, kAll };
  Host* host = nullptr;
  FakeChannel* fake_channel = nullptr;
  std::deque<Completion> ready, held;
  Armed armed = Armed::kNo;
  int64_t unacknowledged = 0;
  int users = 0;
  bool overrun = false;
};

struct SendRequest {
  ibv_send_wr wr{};  // without next and sg_list
  std::vector<ibv_sge> sges;
  std::vector<std::byte> payload;  // inline: from the post on; otherwise from transmission on
  uint64_t count = 0;              // of this queue, from 1
  uint64_t bytes = 0;
  uint64_t digest = 0;  // of the source when it was posted
  bool acknowledged = false, placed = false, held_up = false;
  ibv_wc_status status = IBV_WC_SUCCESS;
  std::vector<uint32_t> pieces;  // READ: still to be fetched
  uint64_t piece_bytes = 0;
  bool reads() const { return wr.opcode == IBV_WR_RDMA_READ; }
  bool is_inline() const { return (wr.send_flags & IBV_SEND_INLINE) != 0; }
};

struct ReceiveRequest {
  uint64_t wr_id = 0, count = 0;
  std::vector<ibv_sge> sges;
};

// A message at the responder that is not wholly in place yet, or waits for those before it.
struct Inbound {
  uint64_t request = 0;  // the sender's count
  std::vector<std::byte> payload;
  std::vector<ibv_sge> targets;  // lkey holds the rkey for a WRITE
  std::vector<uint32_t> pieces;  // still to be placed
  uint64_t piece_bytes = 0;
  bool write = false, receives = false;
  bool late = false;  // its sender knows nothing of it any more
  ReceiveRequest receive;
  Completion completion;
};

struct FakeQp : ibv_qp {
  Host* host = nullptr;
  FakeDevice* device = nullptr;
  FakeId* owner = nullptr;
  ibv_qp_cap cap{};
  bool signal_all = false;
  std::deque<SendRequest> queue, flight;
  uint64_t posted = 0, freed = 0;
  std::deque<ReceiveRequest> receives;
  uint64_t receives_posted = 0, receives_freed = 0;
  std::deque<Inbound> inbound;
  uint32_t peer = 0;  // qp_num
  int address_epoch = 0;
  uint32_t mtu = 4096;  // of the path
  uint8_t timeout = 19, retry_count = 7, rnr_retry = 7, min_rnr_timer = 0;
  uint8_t most_reads = 0, most_peer_reads = 0;
  int access = 0;
  bool refused = false;  // a request has failed: transmit no more
  int64_t stalled_since = 0, not_before = 0;
  int rnr_tries = 0;
  bool active = false;

  FakeCq* send() const { return static_cast<FakeCq*>(send_cq); }
  FakeCq* receive() const { return static_cast<FakeCq*>(recv_cq); }
  FakePd* fake_pd() const { return static_cast<FakePd*>(pd); }
};

struct FakeEvent : rdma_cm_event {
  std::array<std::byte, 256> data{};
  FakeId* owner = nullptr;  // whose DestroyId waits for the acknowledgement
  uint32_t peer_qp = 0;
};

struct FakeEventChannel : rdma_event_channel {
  Host* host = nullptr;
  EventQueue<FakeEvent*> events;
  int users = 0;
};

enum class IdPhase {
  kIdle,
  kBound,
  kAddressResolved,
  kRouteResolved,
  kListening,
  kConnecting,
  kRequested,  // passive, not answered yet
  kAccepted,   // passive, the active side has not confirmed
  kConnected,
  kDisconnected,
};

struct FakeId : rdma_cm_id {
  Host* host = nullptr;
  uint64_t number = 0;
  IdPhase phase = IdPhase::kIdle;
  FakeDevice* device = nullptr;
  uint16_t local_port = 0, target_port = 0;
  sockaddr_storage target{};
  uint64_t peer = 0;  // number of the other end's id
  int unacknowledged = 0;
  bool zombie = false, passive = false;
  uint8_t timeout = 19;
  rdma_conn_param own{}, other{};  // without private data
  std::vector<std::byte> data;     // of the request
  FakeQp* fake_qp() const { return static_cast<FakeQp*>(qp); }
  FakeEventChannel* fake_channel() const { return static_cast<FakeEventChannel*>(channel); }
};

struct State {
  explicit State(const FabricOptions& options) : options(options), random(options.seed) {}
  ~State();

  // fabric.cc
  void Violate(std::string what);
  void At(int64_t when, std::function<void()> action);
  void After(int64_t microseconds, std::function<void()> action) {
    At(NowNanoseconds() + microseconds * 1000, std::move(action));
  }
  bool Roll(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>()(random) < probability;
  }
  uint64_t Below(uint64_t n) { return n == 0 ? 0 : random() % n; }
  void Start();
  void Run();
  bool Reachable(const FakeDevice* a, const FakeDevice* b) const;
  FakeDevice* FindDevice(const std::string& address) const;
  FakeDevice* FindDevice(const sockaddr* address, const Host* of) const;
  void Async(FakeDevice& device, ibv_event_type type, void* element = nullptr);

  // memory.cc
  void Enter(FakeMr& mr, ibv_pd& pd);
  FakeMr* FindMr(uint32_t key, const ibv_pd* pd) const;
  bool LocalAccess(const std::vector<ibv_sge>& sges, const ibv_pd* pd, bool write) const;
  bool RemoteAccess(const FakeQp& qp, uint64_t at, uint64_t bytes, uint32_t rkey, int access) const;
  static uint64_t Total(const std::vector<ibv_sge>& sges);
  // Of an inline request, whose keys mean nothing.
  static void GatherInline(const std::vector<ibv_sge>& sges, std::byte* to, uint64_t n);
  void Gather(const std::vector<ibv_sge>& sges, uint64_t offset, std::byte* to, uint64_t n);
  void Scatter(const std::vector<ibv_sge>& sges, uint64_t offset, const std::byte* from,
               uint64_t n);
  uint64_t Digest(const std::vector<ibv_sge>& sges) const;
  FakeMr* DeviceMr(const ibv_sge& sge) const;  // null for host memory
  bool UsesDevice(const std::vector<ibv_sge>& sges) const;
  void Invalidate(FakeMr& mr);

  // completion.cc
  void Complete(FakeCq& cq, Completion completion);
  void MakeReady(FakeCq& cq, Completion completion);
  void Release(FakeCq& cq);
  void ForgetCompletions(FakeCq& cq, const FakeQp& qp);

  // queue_pair.cc
  void Wake(FakeQp& qp);
  void FailQp(FakeQp& qp, ibv_wc_status status);
  void RemoveQp(FakeQp& qp);
  FakeQp* FindQp(uint32_t number) const;

  // engine.cc
  bool PathUp(const FakeQp& qp) const;
  bool WritesHeld(const FakeQp& responder) const;
  bool Step(FakeQp& qp);
  bool Transmit(FakeQp& qp);
  bool Arrive(FakeQp& qp, FakeQp& peer, SendRequest& request);
  void FetchPiece(FakeQp& qp, const FakeQp& peer, SendRequest& request);
  bool FetchPieces(FakeQp& qp);
  bool PlacePieces(FakeQp& qp);
  void PlaceAll(FakeQp& qp, Inbound& inbound);
  void Place(FakeQp& qp, Inbound& inbound, uint32_t piece);
  void Deliver(FakeQp& qp);
  bool Finish(FakeQp& qp);
  void CompleteSend(FakeQp& qp, const SendRequest& request, ibv_wc_status status);
  void CompleteReceive(FakeQp& qp, const ReceiveRequest& receive, ibv_wc_status status);
  std::vector<uint32_t> Pieces(uint64_t bytes, uint64_t* piece_bytes);
  SendRequest* FindFlight(const FakeQp& responder, uint64_t request) const;
  const RequestFault* TakeFault(const FakeQp& qp, ibv_wr_opcode opcode);

  // cm.cc, cm_connect.cc
  FakeId* FindId(uint64_t number) const;
  FakeId* MakeId(Host& host, FakeEventChannel& channel, void* context);
  FakeEvent* MakeEvent(FakeId& id, rdma_cm_event_type type, int status, size_t data_size);
  void Raise(FakeId& id, FakeEvent* event);
  void RaiseSimple(uint64_t id, rdma_cm_event_type type, int status = 0, size_t data_size = 0);
  void SetDevice(FakeId& id, FakeDevice& device);
  void OnEventRead(FakeEvent& event);
  void RequestArrives(uint64_t id, int64_t give_up);
  void HangUp(FakeId& id);
  void FreeId(FakeId& id);
  void RemoveDevice(FakeDevice& device);

  std::mutex mutex;
  std::condition_variable wake;
  FabricOptions options;
  std::mt19937_64 random;
  std::multimap<int64_t, std::function<void()>> timers;
  std::vector<FakeQp*> active;
  bool stop = false, holds_sends = false, holds_receives = false, holds_writes = false;
  bool holds_late_writes = false;
  int lose = 0, next_host = 0;
  uint64_t next_id = 1, receiver_not_ready = 0, reads_held_up = 0;
  uint64_t device_written = 0, device_read = 0;
  uint32_t next_qp = 100;
  std::vector<std::string> violations;
  std::vector<RequestFault> faults;
  std::set<std::pair<std::string, std::string>> cut;  // links, smaller address first
  std::set<std::string> held_from;                    // whose WRITEs are not placed

  std::vector<Host*> hosts;
  std::set<FakePd*> pds;
  std::set<FakeChannel*> channels;
  std::set<FakeCq*> cqs;
  std::unordered_map<uint32_t, FakeMr*> mrs;  // by lkey and by rkey
  std::map<uint32_t, FakeQp*> qps;
  std::set<FakeEventChannel*> event_channels;
  std::map<uint64_t, FakeId*> ids;
  std::thread thread;
};

// Blocks until the descriptor is readable. False (errno EAGAIN) if it is non-blocking and is not.
bool AwaitReadable(int fd);

}  // namespace penstock::transport::rdma::fake
