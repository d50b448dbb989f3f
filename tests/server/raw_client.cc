#include "tests/server/raw_client.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>

#include "common/clock.h"
#include "transport/inproc/inproc.h"

namespace penstock::server {
namespace {

constexpr std::string_view kHoldPtx = R"(
.version 7.5
.target sm_75
.address_size 64
.visible .entry hold(.param .u64 flag) {
  .reg .u64 %rd<3>;
  .reg .u32 %r<3>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [flag];
again:
  ld.volatile.global.u32 %r1, [%rd1];
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra again;
  ret;
}
)";

}  // namespace

const Driver& RawClient::Sim() {
  static const Driver driver = [] {
    auto loaded = LoadDriver(PENSTOCK_SIMGPU);
    if (!loaded) throw std::runtime_error(loaded.error().message);
    if (loaded->cuInit(0) != CUDA_SUCCESS) throw std::runtime_error("cuInit fails.");
    return *loaded;
  }();
  return driver;
}

RawClient::RawClient(WorkerOptions options) {
  auto [mine, theirs] = transport::inproc::MakePair();
  Start(options, Sim(), std::move(mine), std::move(theirs));
}

RawClient::RawClient(const WorkerOptions& options, const Driver& driver,
                     std::unique_ptr<transport::Connection> mine,
                     std::unique_ptr<transport::Connection> theirs) {
  Start(options, driver, std::move(mine), std::move(theirs));
}

void RawClient::Start(const WorkerOptions& options, const Driver& driver,
                      std::unique_ptr<transport::Connection> mine,
                      std::unique_ptr<transport::Connection> theirs) {
  connection_ = std::move(mine);
  worker_ = std::make_unique<Worker>(options, driver, std::move(theirs));
  thread_ = std::thread([this] { worker_->Run(); });
}

RawClient::~RawClient() {
  worker_->Stop();
  thread_.join();
  connection_->Close(0);
  // In a daemon the process would end here; give the next test a fresh primary context.
  Sim().cuDevicePrimaryCtxReset_v2(0);
}

FrameHeader RawClient::NextHeader(uint32_t function, uint32_t bytes) {
  FrameHeader header = {};
  header.bytes = bytes;
  header.type = FrameType::kCall;
  header.epoch = 1;
  header.function = function;
  header.sequence = next_sequence_++;
  header.acknowledged = received_;
  header.subject = context_.bits;
  return header;
}

void RawClient::SendFrame(std::span<const std::byte> frame) {
  std::byte* slot = nullptr;
  while (connection_->Reserve(static_cast<uint32_t>(frame.size()), &slot) ==
         transport::Outcome::kAgain) {
    Receive(1);
  }
  if (slot == nullptr) return;
  memcpy(slot, frame.data(), frame.size());
  connection_->Commit(static_cast<uint32_t>(frame.size()), transport::kFlush);
}

uint64_t RawClient::Send(uint32_t function, std::span<const std::byte> body, bool wants_reply,
                         uint32_t thread, int32_t cost) {
  const auto bytes = PaddedTo8(static_cast<uint32_t>(sizeof(FrameHeader) + body.size()));
  FrameHeader header = NextHeader(function, bytes);
  header.thread = thread;
  header.result = cost;
  if (wants_reply) header.flags = kNeedsReply;
  std::vector<std::byte> frame(bytes);
  memcpy(frame.data(), &header, sizeof header);
  if (!body.empty()) memcpy(frame.data() + sizeof header, body.data(), body.size());
  SendFrame(frame);
  return header.sequence;
}

void RawClient::Receive(int timeout_ms) {
  connection_->Wait(64, *this, Deadline::After(timeout_ms));
}

bool RawClient::OnFrame(std::span<const std::byte> frame) {
  FrameHeader header;
  memcpy(&header, frame.data(), sizeof header);
  const auto body = frame.subspan(sizeof header);
  if (header.sequence != 0) received_ = header.sequence;
  if (header.type == FrameType::kReply) {
    replies_.push_back({header.subject, {true, header.result, {body.begin(), body.end()}}});
  } else if (header.type == FrameType::kHostFunction) {
    turns_.emplace_back(header.subject, header.result);
  } else if (header.type == FrameType::kProgress) {
    for (size_t i = 0; i + sizeof(ProgressEntry) <= body.size(); i += sizeof(ProgressEntry)) {
      ProgressEntry entry;
      memcpy(&entry, body.data() + i, sizeof entry);
      if (entry.kind == ProgressKind::kStagingSlot) {
        if (slot_releases_.size() <= entry.id) slot_releases_.resize(entry.id + 1);
        slot_releases_[entry.id] = entry.value;
      } else {
        progress_.push_back(entry);
      }
    }
  } else if (header.type == FrameType::kBounce) {
    for (size_t i = 0; i + sizeof(BouncePiece) <= body.size(); i += sizeof(BouncePiece)) {
      NamedPiece named{header.subject, {}};
      memcpy(&named.piece, body.data() + i, sizeof named.piece);
      pieces_.push_back(named);
    }
  } else if (header.type == FrameType::kOutput) {
    OutputHeader output;
    memcpy(&output, body.data(), sizeof output);
    output_.append(reinterpret_cast<const char*>(body.data()) + sizeof output, output.bytes);
  } else if (header.type == FrameType::kGoodbye) {
    has_goodbye_ = true;
    goodbye_ = reinterpret_cast<const char*>(body.data());
  }
  return true;
}

uint64_t RawClient::finished(Handle stream) const {
  uint64_t value = 0;
  for (const ProgressEntry& entry : progress_) {
    const bool legacy = stream == kLegacyStream && entry.generation == 0;
    const bool same = entry.id == stream.id() && entry.generation == stream.generation();
    if (legacy || same) value = std::max(value, entry.value);
  }
  return value;
}

Reply RawClient::WaitFor(uint64_t sequence, int timeout_ms) {
  const Deadline deadline = Deadline::After(timeout_ms);
  while (true) {
    for (auto& [subject, reply] : replies_) {
      if (subject == sequence) return reply;
    }
    if (deadline.expired() || has_goodbye_) return {};
    connection_->Wait(64, *this, deadline);
    if (connection_->closed()) {
      connection_->Poll(64, *this);
      for (auto& [subject, reply] : replies_) {
        if (subject == sequence) return reply;
      }
      return {};
    }
  }
}

Reply RawClient::WaitForTurn(uint64_t id, int timeout_ms) {
  const Deadline deadline = Deadline::After(timeout_ms);
  while (true) {
    for (const auto& [turn, result] : turns_) {
      if (turn == id) return {true, result, {}};
    }
    if (deadline.expired() || connection_->Wait(64, *this, deadline) < 0) return {};
  }
}

std::vector<uint64_t> RawClient::turns() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, result] : turns_) ids.push_back(id);
  return ids;
}

bool RawClient::WaitForGoodbye(int timeout_ms) {
  const Deadline deadline = Deadline::After(timeout_ms);
  while (!has_goodbye_ && !deadline.expired()) {
    if (connection_->Wait(64, *this, deadline) < 0) break;
  }
  return has_goodbye_;
}

Handle RawClient::Mint(HandleKind kind) {
  return Handle::Make(kind, 1, next_id_++);
}

uint64_t RawClient::Allocate(uint64_t bytes) {
  const Reply reply = Call(commands::CuMemAlloc{bytes});
  REQUIRE(reply.came);
  REQUIRE(reply.result == CUDA_SUCCESS);
  return reply.As<commands::CuMemAllocReply>().dptr;
}

Handle RawClient::NewStream() {
  const Handle stream = Mint(HandleKind::kStream);
  commands::CuStreamCreateWithPriority command{};
  command.phStream = stream.bits;
  command.flags = CU_STREAM_NON_BLOCKING;
  Post(command);
  return stream;
}

Handle RawClient::LoadModule(std::string_view ptx) {
  const Handle module = Mint(HandleKind::kModule);
  LoadModuleCommand command{};
  command.handle = module.bits;
  command.kind = ModuleKind::kModule;
  command.format = ImageFormat::kPtx;
  command.part_count = 1;
  ModulePart part{};
  part.bytes = ptx.size() + 1;
  part.inlined = 1;
  std::vector<std::byte> body(sizeof command + sizeof part + PaddedTo8(ptx.size() + 1));
  memcpy(body.data(), &command, sizeof command);
  memcpy(body.data() + sizeof command, &part, sizeof part);
  memcpy(body.data() + sizeof command + sizeof part, ptx.data(), ptx.size());
  const Reply reply = WaitFor(
      Send(static_cast<uint32_t>(Operation::kLoadModule), std::span<const std::byte>(body), true));
  REQUIRE(reply.came);
  REQUIRE(reply.result == CUDA_SUCCESS);
  return module;
}

Handle RawClient::GetFunction(Handle module, std::string_view name, FunctionInfo* info) {
  const Handle function = Mint(HandleKind::kFunction);
  GetFunctionCommand command{};
  command.handle = function.bits;
  command.owner = module.bits;
  command.name_bytes = static_cast<uint32_t>(name.size());
  std::vector<std::byte> body(sizeof command + PaddedTo8(name.size()));
  memcpy(body.data(), &command, sizeof command);
  memcpy(body.data() + sizeof command, name.data(), name.size());
  const Reply reply = WaitFor(
      Send(static_cast<uint32_t>(Operation::kGetFunction), std::span<const std::byte>(body), true));
  REQUIRE(reply.came);
  REQUIRE(reply.result == CUDA_SUCCESS);
  if (info != nullptr) *info = reply.As<FunctionInfo>();
  return function;
}

void RawClient::Launch(Handle function, Handle stream, std::span<const uint64_t> parameters,
                       uint32_t thread) {
  LaunchCommand command{};
  command.function = function.bits;
  command.stream = stream.bits;
  for (int i = 0; i < 3; ++i) command.grid[i] = command.block[i] = 1;
  command.parameter_bytes = static_cast<uint32_t>(parameters.size_bytes());
  std::vector<std::byte> body(sizeof command + parameters.size_bytes());
  memcpy(body.data(), &command, sizeof command);
  memcpy(body.data() + sizeof command, parameters.data(), parameters.size_bytes());
  Send(static_cast<uint32_t>(Operation::kLaunch), std::span<const std::byte>(body), false, thread,
       1);
}

uint64_t RawClient::Synchronize(Handle stream, uint32_t thread) {
  commands::CuStreamSynchronize command{};
  command.hStream = stream.bits;
  return Send(command.kFunction, command, true, thread);
}

Reply RawClient::UploadInline(uint64_t target, std::span<const std::byte> bytes, Handle stream) {
  UploadCommand command{};
  command.target = target;
  command.stream = stream.bits;
  command.width = command.target_pitch = command.host_pitch = bytes.size();
  command.height = 1;
  command.place = HostPlace::kInline;
  std::vector<std::byte> body(sizeof command + PaddedTo8(bytes.size()));
  memcpy(body.data(), &command, sizeof command);
  memcpy(body.data() + sizeof command, bytes.data(), bytes.size());
  return WaitFor(Send(static_cast<uint32_t>(Operation::kUpload), std::span<const std::byte>(body),
                      true, 0, 1));
}

std::vector<std::byte> RawClient::DownloadInline(uint64_t source, uint64_t bytes, Handle stream) {
  DownloadCommand command{};
  command.source = source;
  command.stream = stream.bits;
  command.width = command.source_pitch = command.host_pitch = bytes;
  command.height = 1;
  command.place = HostPlace::kInline;
  command.reply_when = ReplyWhen::kDone;
  Reply reply = WaitFor(Send(static_cast<uint32_t>(Operation::kDownload), command, true, 0, 1));
  REQUIRE(reply.came);
  REQUIRE(reply.result == CUDA_SUCCESS);
  reply.body.resize(bytes);
  return reply.body;
}

void RawClient::LaunchHold(Handle stream, uint64_t flag) {
  if (hold_.null()) {
    hold_module_ = LoadModule(kHoldPtx);
    hold_ = GetFunction(hold_module_, "hold");
  }
  Launch(hold_, stream, std::span(&flag, 1));
}

void RawClient::Release(uint64_t flag) {
  // Device memory of the simulated GPU is memory of this process.
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(flag)).store(1);
}

}  // namespace penstock::server
