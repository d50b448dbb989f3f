// The session, the call stream and the receiver, against a scripted server.
#include <fcntl.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include "tests/interposer/scripted_server.h"

using namespace penstock;
using namespace penstock::interposer;

namespace {

constexpr uint32_t kWait = static_cast<uint32_t>(Operation::kWaitStreamProgress);

void AnswerAll(ScriptedServer& server, const SeenCall& call) {
  if (call.header.flags & kNeedsReply) server.Reply(call.header, CUDA_SUCCESS);
}

OutgoingCall MakeCall(uint32_t function, const uint64_t& payload) {
  OutgoingCall call;
  call.function = function;
  call.command = &payload;
  call.command_bytes = sizeof payload;
  return call;
}

CUresult Ask(Session& session, uint32_t function, uint64_t payload, uint64_t* answer = nullptr) {
  ReplyWaiter waiter;
  if (answer != nullptr) waiter.fixed = std::as_writable_bytes(std::span(answer, 1));
  return session.Invoke(MakeCall(function, payload), &waiter);
}

CUresult Tell(Session& session, uint32_t function, uint64_t payload) {
  OutgoingCall call = MakeCall(function, payload);
  return session.Post(call, nullptr);
}

StreamRecord* NewStream(Session& session) {
  return session.objects().streams.Mint(
      [&](StreamRecord& record, Handle) { record.context = &session.primary_contexts[0]; });
}

}  // namespace

TEST_CASE("calls of many threads get their own answers", "[interposer][session]") {
  ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
    const uint64_t answer = call.As<uint64_t>() * 3;
    self.Reply(call.header, CUDA_SUCCESS, std::as_bytes(std::span(&answer, 1)));
  });
  auto session = server.Connect();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 300; ++i) {
        uint64_t answer = 0;
        if (Ask(*session, 7, t * 1000 + i, &answer) != CUDA_SUCCESS ||
            answer != (t * 1000 + i) * 3) {
          ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK_FALSE(server.gap);
  CHECK(server.seen().size() == 1800);
}

TEST_CASE("answers may come in another order than the questions", "[interposer][session]") {
  std::vector<FrameHeader> held;
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    held.push_back(call.header);
    if (held.size() < 4) return;
    for (auto one = held.rbegin(); one != held.rend(); ++one) {
      self.Reply(*one, static_cast<CUresult>(one->function));
    }
  });
  auto session = server.Connect();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] { wrong += Ask(*session, t, 0) != static_cast<CUresult>(t); });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("posted calls arrive in order, before a call that follows", "[interposer][session]") {
  ScriptedServer server(AnswerAll);
  auto session = server.Connect();
  for (uint64_t i = 0; i < 1000; ++i) REQUIRE(Tell(*session, 5, i) == CUDA_SUCCESS);
  REQUIRE(Ask(*session, 6, 0) == CUDA_SUCCESS);
  const auto seen = server.seen();
  REQUIRE(seen.size() == 1001);
  for (uint64_t i = 0; i < 1000; ++i) REQUIRE(seen[i].As<uint64_t>() == i);
}

TEST_CASE("a sender without room goes on when there is some", "[interposer][session]") {
  SECTION("in the ring") {
    ScriptedServer server(
        [](ScriptedServer& self, const SeenCall& call) {
          if (call.header.sequence % 64 == 0) std::this_thread::yield();
          AnswerAll(self, call);
        },
        {.ring_bytes = 8192, .max_frame = 1024});
    auto session = server.Connect();
    for (uint64_t i = 0; i < 5000; ++i) REQUIRE(Tell(*session, 5, i) == CUDA_SUCCESS);
    REQUIRE(Ask(*session, 6, 0) == CUDA_SUCCESS);
    CHECK_FALSE(server.gap);
    CHECK(server.seen().size() == 5001);
  }
  SECTION("among the retained frames") {
    // The server says only now and then what it has received: more frames than are kept.
    ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
      self.set_acknowledge(true);
      if (call.header.sequence % 1024 == 0) {
        self.SendFrame(self.NewHeader(FrameType::kAcknowledge, 0), {});
      }
      AnswerAll(self, call);
    });
    auto session = server.Connect();
    for (uint64_t i = 0; i < 50'000; ++i) REQUIRE(Tell(*session, 5, i) == CUDA_SUCCESS);
    REQUIRE(Ask(*session, 6, 0) == CUDA_SUCCESS);
    CHECK_FALSE(server.gap);
  }
}

TEST_CASE("a stream's window holds the sender back until work has finished",
          "[interposer][session]") {
  std::vector<uint64_t> waited_for;
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function == kWait) {
      waited_for.push_back(call.As<WaitStreamProgressCommand>().value);
    }
    AnswerAll(self, call);
  });
  auto session = server.Connect(8);
  StreamRecord* const stream = NewStream(*session);
  const uint64_t payload = 0;
  for (int i = 0; i < 20; ++i) {
    OutgoingCall call = MakeCall(5, payload);
    call.cost = 1;
    REQUIRE(session->Post(call, stream) == CUDA_SUCCESS);
    CHECK(call.issued == static_cast<uint64_t>(i) + 1);
  }
  REQUIRE(Ask(*session, 6, 0) == CUDA_SUCCESS);
  // The ninth needs the first to be finished, and so on.
  REQUIRE(waited_for.size() == 12);
  for (size_t i = 0; i < waited_for.size(); ++i) CHECK(waited_for[i] == i + 1);
  CHECK(session->counters().window_waits == 12);
}

TEST_CASE("progress that has arrived makes waiting needless", "[interposer][session]") {
  Handle handle;
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function == 5) {
      self.Progress(
          {{ProgressKind::kStream, handle.generation(), handle.id(), call.header.sequence}});
    }
    AnswerAll(self, call);
  });
  auto session = server.Connect(8);
  StreamRecord* const stream = NewStream(*session);
  handle = stream->handle;
  const uint64_t payload = 0;
  for (int i = 0; i < 8; ++i) {
    OutgoingCall call = MakeCall(5, payload);
    call.cost = 1;
    REQUIRE(session->Post(call, stream) == CUDA_SUCCESS);
  }
  REQUIRE(Ask(*session, 6, 0) == CUDA_SUCCESS);
  CHECK(stream->finished == 8);
  for (int i = 0; i < 8; ++i) {
    OutgoingCall call = MakeCall(9, payload);
    call.cost = 1;
    REQUIRE(session->Post(call, stream) == CUDA_SUCCESS);
  }
  CHECK(session->counters().window_waits == 0);
}

TEST_CASE("the legacy stream's progress is named by its context", "[interposer][session]") {
  ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
    self.Progress({{ProgressKind::kStream, 0, PrimaryContext(0).bits << 8 >> 8, 41}});
    AnswerAll(self, call);
  });
  auto session = server.Connect();
  REQUIRE(Ask(*session, 6, 0) == CUDA_SUCCESS);
  CHECK(session->primary_contexts[0].legacy.finished == 41);
}

TEST_CASE("staging slots come back when the server says so", "[interposer][session]") {
  std::vector<uint64_t> times(kSmallStagingSlots, 0);
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    const uint64_t slot = call.As<uint64_t>();
    if (call.header.function == 5) {
      self.Progress({{ProgressKind::kStagingSlot, 0, slot, ++times[slot]}});
    }
    AnswerAll(self, call);
  });
  auto session = server.Connect();
  StagingSlot slot;
  std::vector<uint32_t> taken;
  for (uint32_t i = 0; i < kSmallStagingSlots; ++i) {
    REQUIRE(session->TakeStaging(100, &slot));
    taken.push_back(slot.index);
  }
  std::sort(taken.begin(), taken.end());
  CHECK(std::unique(taken.begin(), taken.end()) == taken.end());
  // Large copies have slots of their own.
  REQUIRE(session->TakeStaging(kSmallStagingBytes + 1, &slot));
  CHECK(slot.index >= kSmallStagingSlots);
  CHECK(slot.memory.size() == kLargeStagingBytes);
  // All small ones are taken: this one waits for the release of slot 17.
  REQUIRE(Tell(*session, 5, 17) == CUDA_SUCCESS);
  REQUIRE(session->TakeStaging(100, &slot));
  CHECK(slot.index == 17);
  CHECK(session->counters().staging_waits == 1);
  // The same news again releases nothing.
  times[17] = 0;
  REQUIRE(Tell(*session, 5, 17) == CUDA_SUCCESS);
  REQUIRE(Ask(*session, 6, 0) == CUDA_SUCCESS);
  REQUIRE(Tell(*session, 5, 3) == CUDA_SUCCESS);
  REQUIRE(session->TakeStaging(100, &slot));
  CHECK(slot.index == 3);
}

TEST_CASE("a server that hangs up ends every wait and every later call", "[interposer][session]") {
  ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function == 66) self.HangUp();
  });
  auto session = server.Connect();
  std::vector<std::thread> threads;
  std::atomic<int> unavailable{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back(
        [&] { unavailable += Ask(*session, 1, 0) == CUDA_ERROR_DEVICE_UNAVAILABLE; });
  }
  Tell(*session, 66, 0);
  for (auto& thread : threads) thread.join();
  CHECK(unavailable == 4);
  CHECK(Ask(*session, 1, 0) == CUDA_ERROR_DEVICE_UNAVAILABLE);
  CHECK(Tell(*session, 1, 0) == CUDA_ERROR_DEVICE_UNAVAILABLE);
  StagingSlot slot;
  CHECK_FALSE(session->TakeStaging(1, &slot));
}

TEST_CASE("what no honest server sends ends the session", "[interposer][session]") {
  enum Kind {
    kGap,
    kShortReply,
    kUnknownWaiter,
    kForeignSlot,
    kForeignFunction,
    kGoodbye,
    kCallFromServer
  };
  const Kind kind = GENERATE(kGap, kShortReply, kUnknownWaiter, kForeignSlot, kForeignFunction,
                             kGoodbye, kCallFromServer);
  CAPTURE(kind);
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    switch (kind) {
      case kGap:
        self.NextSequence();
        self.Reply(call.header, CUDA_SUCCESS);
        break;
      case kShortReply: {
        const uint32_t half = 1;
        self.Reply(call.header, CUDA_SUCCESS, std::as_bytes(std::span(&half, 1)));
        break;
      }
      case kUnknownWaiter: {
        FrameHeader other = call.header;
        other.sequence += 100;
        self.Reply(other, CUDA_SUCCESS);
        break;
      }
      case kForeignSlot:
        self.Progress({{ProgressKind::kStagingSlot, 0, 5, 1}});
        break;
      case kForeignFunction:
        self.Turn(1, CUDA_SUCCESS);
        break;
      case kGoodbye: {
        const char text[] = "It is late.";
        self.SendFrame(self.NewHeader(FrameType::kGoodbye, sizeof text),
                       std::as_bytes(std::span(text)));
        break;
      }
      case kCallFromServer:
        self.SendFrame(self.NewHeader(FrameType::kCall, 0), {});
        break;
    }
  });
  auto session = server.Connect();
  uint64_t answer = 77;
  CHECK(Ask(*session, 1, 0, &answer) == CUDA_ERROR_DEVICE_UNAVAILABLE);
  CHECK(answer == 77);
}

TEST_CASE("a bounce piece outside of its copy, or for no copy, ends the session",
          "[interposer][session][bounce]") {
  enum Kind { kHonest, kLate, kLong, kForeignSlot, kMany, kNoCopy, kTooLarge };
  const Kind kind = GENERATE(kHonest, kLate, kLong, kForeignSlot, kMany, kNoCopy, kTooLarge);
  CAPTURE(kind);
  constexpr uint64_t kBytes = kBounceSlotBytes + 10;
  struct Bytes final : BouncedBytes {
    explicit Bytes(Session& session) : BouncedBytes(session, 0, true, kBytes) {}
    void Move(uint64_t offset, std::span<std::byte> slot) override {
      memset(slot.data(), static_cast<int>(offset / kBounceSlotBytes) + 1, slot.size());
      moved += slot.size();
    }
    uint64_t moved = 0;
  };
  FrameHeader asked{};
  uint32_t answers = 0;
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    const auto name = [&](uint64_t number, BouncePiece piece) {
      FrameHeader header = self.NewHeader(FrameType::kBounce, sizeof piece);
      header.sequence = self.NextSequence();
      header.subject = number;
      self.SendFrame(header, std::as_bytes(std::span(&piece, 1)));
    };
    const uint64_t number = call.header.sequence;
    if (call.header.function == static_cast<uint32_t>(Operation::kBounceDone)) {
      if (call.As<BounceDoneCommand>().call == asked.sequence && ++answers == 2) {
        self.Reply(asked, CUDA_SUCCESS);
      }
      return;
    }
    asked = call.header;
    switch (kind) {
      case kHonest:
        name(number, {0, kBounceSlotBytes, 15});
        name(number, {kBounceSlotBytes, 10, 2});
        break;
      case kLate:
        name(number, {kBytes + 1, 0, 0});
        break;
      case kLong:
        name(number, {kBytes - 10, 11, 0});
        break;
      case kForeignSlot:
        name(number, {0, 10, kBounceSlots});
        break;
      case kMany:  // in one frame, so that none is answered before
      {
        std::vector<BouncePiece> pieces(kBounceSlots + 1);
        FrameHeader header =
            self.NewHeader(FrameType::kBounce, pieces.size() * sizeof(BouncePiece));
        header.sequence = self.NextSequence();
        header.subject = number;
        self.SendFrame(header, std::as_bytes(std::span(pieces)));
        break;
      }
      case kNoCopy:
        name(number + 1, {0, 10, 0});
        break;
      case kTooLarge:
        name(number, {0, kBounceSlotBytes + 1, 0});
        break;
    }
  });
  auto session = server.Connect();
  transport::MemoryKey key;
  REQUIRE(session->bounce().Key(&key));
  Bytes bytes(*session);
  ReplyWaiter waiter;
  waiter.pieces = &bytes;
  const uint64_t payload = 0;
  const CUresult result = session->Invoke(MakeCall(1, payload), &waiter);
  if (kind == kHonest) {
    CHECK(result == CUDA_SUCCESS);
    CHECK(bytes.moved == kBytes);
    CHECK(session->bounce().slot(15)[kBounceSlotBytes - 1] == std::byte{1});
    CHECK(session->bounce().slot(2)[9] == std::byte{2});
    CHECK(session->counters().bulk_copies == kBytes);
  } else {
    CHECK(result == CUDA_ERROR_DEVICE_UNAVAILABLE);
    CHECK(bytes.moved == 0);
  }
}

TEST_CASE("a server that hangs up while a bounce piece is copied ends the copy",
          "[interposer][session][bounce]") {
  ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function == static_cast<uint32_t>(Operation::kBounceDone)) {
      self.HangUp();
      return;
    }
    const BouncePiece piece{0, 100, 0};
    FrameHeader header = self.NewHeader(FrameType::kBounce, sizeof piece);
    header.sequence = self.NextSequence();
    header.subject = call.header.sequence;
    self.SendFrame(header, std::as_bytes(std::span(&piece, 1)));
  });
  auto session = server.Connect();
  transport::MemoryKey key;
  REQUIRE(session->bounce().Key(&key));
  struct Bytes final : BouncedBytes {
    using BouncedBytes::BouncedBytes;
    void Move(uint64_t, std::span<std::byte>) override {}
  } bytes(*session, 0, false, 1000);
  ReplyWaiter waiter;
  waiter.pieces = &bytes;
  const uint64_t payload = 0;
  CHECK(session->Invoke(MakeCall(1, payload), &waiter) == CUDA_ERROR_DEVICE_UNAVAILABLE);
}

TEST_CASE("a frame that was seen already is dropped", "[interposer][session]") {
  ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
    FrameHeader old = self.NewHeader(FrameType::kReply, 0);
    old.sequence = call.header.sequence - 1;  // of the reply before
    old.subject = call.header.sequence;
    old.result = CUDA_ERROR_UNKNOWN;
    if (old.sequence != 0) self.SendFrame(old, {});
    self.Reply(call.header, CUDA_SUCCESS);
  });
  auto session = server.Connect();
  for (int i = 0; i < 5; ++i) CHECK(Ask(*session, 1, 0) == CUDA_SUCCESS);
}

TEST_CASE("a kernel's output comes before the reply that follows it", "[interposer][session]") {
  int pipes[2];
  REQUIRE(pipe2(pipes, O_CLOEXEC) == 0);
  const int real = dup(STDOUT_FILENO);
  fflush(stdout);
  ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
    struct {
      OutputHeader header{STDOUT_FILENO, 6};
      char text[8] = "Hello\n";
    } body;
    FrameHeader header = self.NewHeader(FrameType::kOutput, sizeof body);
    header.sequence = self.NextSequence();
    self.SendFrame(header, std::as_bytes(std::span(&body, 1)));
    self.Reply(call.header, CUDA_SUCCESS);
  });
  auto session = server.Connect();
  dup2(pipes[1], STDOUT_FILENO);
  const CUresult result = Ask(*session, 1, 0);
  fflush(stdout);  // it comes through the program's own stream
  dup2(real, STDOUT_FILENO);
  char text[16] = {};
  const ssize_t got = read(pipes[0], text, sizeof text - 1);
  close(real);
  close(pipes[0]);
  close(pipes[1]);
  CHECK(result == CUDA_SUCCESS);
  CHECK(got == 6);
  CHECK(std::string(text) == "Hello\n");
}

TEST_CASE("an ended session says goodbye and answers with an error", "[interposer][session]") {
  ScriptedServer server(AnswerAll);
  auto session = server.Connect();
  REQUIRE(Tell(*session, 1, 0) == CUDA_SUCCESS);
  session->End();
  CHECK(Ask(*session, 1, 0) == CUDA_ERROR_DEINITIALIZED);
  CHECK(Tell(*session, 1, 0) == CUDA_ERROR_DEINITIALIZED);
  const Deadline deadline = Deadline::After(5000);
  while (!server.goodbye && !deadline.expired()) std::this_thread::yield();
  CHECK(server.goodbye);
}

TEST_CASE("a destroyed object's handle is stale for ever", "[interposer][records]") {
  RecordTable<EventRecord> table(HandleKind::kEvent);
  const Handle first = table.Mint([](EventRecord&, Handle) {})->handle;
  CHECK(table.Find(first) != nullptr);
  REQUIRE(table.Remove(first));
  CHECK(table.Find(first) == nullptr);
  CHECK_FALSE(table.Remove(first));
  for (int i = 0; i < 1000; ++i) {
    const Handle next = table.Mint([](EventRecord&, Handle) {})->handle;
    REQUIRE(next.bits != first.bits);
    REQUIRE(table.Find(first) == nullptr);
    table.Remove(next);
  }
  CHECK(table.Find(Handle{}) == nullptr);
  CHECK(table.Find(Handle::Make(HandleKind::kStream, 1, 1)) == nullptr);
  CHECK(table.Find(Handle::Make(HandleKind::kEvent, 1, 0)) == nullptr);
  CHECK(table.Find(Handle::Make(HandleKind::kEvent, 1, kMaxHandlesPerKind + 5)) == nullptr);
  CHECK(table.Find(Handle::Make(HandleKind::kEvent, 1, 0xFFFFFFFF)) == nullptr);
}
