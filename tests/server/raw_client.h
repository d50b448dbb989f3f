// A client that speaks the protocol frame by frame to a Worker in the same process, over inproc and
// on the simulated GPU, so that a test can send what no real client sends.
#pragma once

#include <cuda.h>

#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "commands.gen.h"
#include "protocol/frame.h"
#include "protocol/handle.h"
#include "protocol/operations.h"
#include "server/driver.h"
#include "server/worker/worker.h"
#include "transport/transport.h"

namespace penstock::server {

struct Reply {
  bool came = false;
  int32_t result = -1;
  std::vector<std::byte> body;
  template <typename T>
  T As() const {
    T value{};
    memcpy(static_cast<void*>(&value), body.data(), std::min(sizeof value, body.size()));
    return value;
  }
};

class RawClient : public transport::Handler {
 public:
  explicit RawClient(WorkerOptions options = {});
  // The same over a connected pair, with a driver of one's own making.
  RawClient(const WorkerOptions& options, const Driver& driver,
            std::unique_ptr<transport::Connection> mine,
            std::unique_ptr<transport::Connection> theirs);
  ~RawClient() override;

  // The simulated GPU's driver, loaded and initialised once; the test may call it directly.
  static const Driver& Sim();
  transport::Connection& connection() { return *connection_; }
  Worker& worker() { return *worker_; }

  // Sends a call in the primary context of device 0. Returns its sequence.
  uint64_t Send(uint32_t function, std::span<const std::byte> body, bool wants_reply,
                uint32_t thread = 0, int32_t cost = 0);
  template <typename Command>
  uint64_t Send(uint32_t function, const Command& command, bool wants_reply, uint32_t thread = 0,
                int32_t cost = 0) {
    return Send(function, std::as_bytes(std::span(&command, 1)), wants_reply, thread, cost);
  }
  // Waits for a reply, `came` false if none comes in time.
  Reply WaitFor(uint64_t sequence, int timeout_ms = 5000);
  // Waits for the turn of a host function; `result` is what came with it.
  Reply WaitForTurn(uint64_t id, int timeout_ms = 5000);
  std::vector<uint64_t> turns() const;  // in the order in which they came
  template <typename Command>
  Reply Call(const Command& command, uint32_t thread = 0) {
    return WaitFor(Send(Command::kFunction, command, true, thread));
  }
  template <typename Command>
  void Post(const Command& command, uint32_t thread = 0) {
    Send(Command::kFunction, command, false, thread, 1);
  }
  // A whole frame as it is.
  void SendFrame(std::span<const std::byte> frame);
  FrameHeader NextHeader(uint32_t function, uint32_t bytes);
  void set_context(Handle context) { context_ = context; }

  // The server has said goodbye, with this text.
  bool WaitForGoodbye(int timeout_ms = 5000);
  const std::string& goodbye() const { return goodbye_; }
  uint64_t slot_releases(uint32_t slot) const {
    return slot < slot_releases_.size() ? slot_releases_[slot] : 0;
  }
  uint64_t finished(Handle stream) const;
  void Receive(int timeout_ms);
  const std::string& output() const { return output_; }
  // Bounce pieces that have come, with the call each is for. The taker answers them.
  struct NamedPiece {
    uint64_t call;
    BouncePiece piece;
  };
  std::vector<NamedPiece> TakePieces() { return std::exchange(pieces_, {}); }

  // Conveniences.
  uint64_t Allocate(uint64_t bytes);
  Handle NewStream();
  Handle LoadModule(std::string_view ptx);
  Handle GetFunction(Handle module, std::string_view name, FunctionInfo* info = nullptr);
  void Launch(Handle function, Handle stream, std::span<const uint64_t> parameters,
              uint32_t thread = 0);
  uint64_t Synchronize(Handle stream, uint32_t thread = 0);  // sequence of the call
  Reply UploadInline(uint64_t target, std::span<const std::byte> bytes, Handle stream);
  std::vector<std::byte> DownloadInline(uint64_t source, uint64_t bytes, Handle stream);
  Handle Mint(HandleKind kind);

  // A kernel that spins until a word of device memory is not zero.
  void LaunchHold(Handle stream, uint64_t flag);
  void Release(uint64_t flag);
  Handle hold() const { return hold_; }

  bool OnFrame(std::span<const std::byte> frame) override;
  void OnBulkDone(uint64_t, transport::BulkStatus, uint64_t) override {}

 private:
  void Start(const WorkerOptions& options, const Driver& driver,
             std::unique_ptr<transport::Connection> mine,
             std::unique_ptr<transport::Connection> theirs);

  std::unique_ptr<transport::Connection> connection_;
  std::unique_ptr<Worker> worker_;
  std::thread thread_;
  uint64_t next_sequence_ = 1, received_ = 0;
  uint32_t next_id_ = 1;
  Handle context_ = PrimaryContext(0);
  Handle hold_module_, hold_;
  std::vector<std::pair<uint64_t, Reply>> replies_;
  std::vector<std::pair<uint64_t, int32_t>> turns_;
  std::vector<uint64_t> slot_releases_;
  std::vector<ProgressEntry> progress_;
  std::vector<NamedPiece> pieces_;
  std::string goodbye_, output_;
  bool has_goodbye_ = false;
};

}  // namespace penstock::server
