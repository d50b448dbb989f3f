// A server of a few lines behind a real client core, over inproc: it answers what a test tells it
// to, so that a test can hold an answer back, send rubbish or hang up.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "interposer/core/session.h"
#include "transport/inproc/inproc.h"

namespace penstock::interposer {

struct SeenCall {
  FrameHeader header{};
  std::vector<std::byte> body;
  template <typename T>
  T As() const {
    T value{};
    memcpy(static_cast<void*>(&value), body.data(), std::min(sizeof value, body.size()));
    return value;
  }
};

class ScriptedServer : private transport::Handler {
 public:
  // `on_call` runs on the server's thread for each call in order.
  using OnCall = std::function<void(ScriptedServer&, const SeenCall&)>;
  explicit ScriptedServer(OnCall on_call, transport::inproc::InprocOptions options = {})
      : on_call_(std::move(on_call)) {
    auto [client, server] = transport::inproc::MakePair(options);
    client_ = std::move(client);
    connection_ = std::move(server);
  }
  ~ScriptedServer() override {
    stop_ = true;
    connection_->Interrupt();
    if (thread_.joinable()) thread_.join();
  }

  std::unique_ptr<Session> Connect(uint32_t window = 8) {
    ParsedWelcome welcome;
    welcome.welcome.epoch = 1;
    welcome.welcome.server.stream_window = window;
    welcome.welcome.server.driver_version = 13000;
    welcome.welcome.server.device_count = 1;
    welcome.devices.resize(1);
    memset(&welcome.devices[0], 0, sizeof welcome.devices[0]);
    SessionOptions options;
    options.server = "the scripted server";
    options.reserve_addresses = false;
    thread_ = std::thread([this] { Run(); });
    return std::make_unique<Session>(std::move(client_), std::move(welcome), options);
  }

  // From on_call only.
  void Reply(const FrameHeader& call, CUresult result, std::span<const std::byte> body = {}) {
    FrameHeader header = NewHeader(FrameType::kReply, body.size());
    header.sequence = next_sequence_++;
    header.function = call.function;
    header.subject = call.sequence;
    header.result = result;
    SendFrame(header, body);
  }
  void Progress(const std::vector<ProgressEntry>& entries) {
    const auto body = std::as_bytes(std::span(entries));
    SendFrame(NewHeader(FrameType::kProgress, body.size()), body);
  }
  // It is the turn of a host function.
  void Turn(uint64_t id, CUresult status) {
    FrameHeader header = NewHeader(FrameType::kHostFunction, 0);
    header.sequence = next_sequence_++;
    header.subject = id;
    header.result = status;
    SendFrame(header, {});
  }
  FrameHeader NewHeader(FrameType type, size_t body_bytes) {
    FrameHeader header{};
    header.bytes = static_cast<uint32_t>(sizeof header + body_bytes);
    header.type = type;
    header.epoch = 1;
    header.acknowledged = acknowledge_ ? received_ : 0;
    return header;
  }
  void SendFrame(const FrameHeader& header, std::span<const std::byte> body) {
    std::byte* slot = nullptr;
    while (connection_->Reserve(header.bytes, &slot) == transport::Outcome::kAgain) {
      std::this_thread::yield();
    }
    if (slot == nullptr) return;
    memcpy(slot, &header, sizeof header);
    if (!body.empty()) memcpy(slot + sizeof header, body.data(), body.size());
    connection_->Commit(header.bytes, transport::kFlush);
  }
  uint64_t NextSequence() { return next_sequence_++; }
  void HangUp() { connection_->Close(100); }
  void set_acknowledge(bool on) { acknowledge_ = on; }

  std::vector<SeenCall> seen() {
    std::lock_guard lock(mutex_);
    return seen_;
  }
  std::atomic<bool> goodbye{false};
  std::atomic<bool> gap{false};  // a call's sequence did not follow the one before

 private:
  void Run() {
    while (!stop_ && connection_->Wait(16, *this, Deadline::After(1000)) >= 0) {
    }
  }
  bool OnFrame(std::span<const std::byte> frame) override {
    SeenCall call;
    memcpy(&call.header, frame.data(), sizeof call.header);
    if (call.header.type == FrameType::kGoodbye) goodbye = true;
    if (call.header.type != FrameType::kCall) return true;
    if (call.header.sequence != received_ + 1) gap = true;
    received_ = call.header.sequence;
    const auto body = frame.subspan(sizeof call.header);
    call.body.assign(body.begin(), body.end());
    {
      std::lock_guard lock(mutex_);
      seen_.push_back(call);
    }
    on_call_(*this, call);
    return true;
  }
  void OnBulkDone(uint64_t, transport::BulkStatus, uint64_t) override {}

  OnCall on_call_;
  std::unique_ptr<transport::Connection> client_, connection_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  bool acknowledge_ = true;
  uint64_t next_sequence_ = 1, received_ = 0;
  std::mutex mutex_;
  std::vector<SeenCall> seen_;
};

}  // namespace penstock::interposer
