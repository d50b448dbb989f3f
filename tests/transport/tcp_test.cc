// What is particular to tcp: dialling, the handshake's blobs, and peers that do not play by the
// rules.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "harness.h"
#include "transport/tcp/bulk.h"
#include "transport/tcp/tcp.h"

namespace penstock::transport::tcp {
namespace {

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

struct Sockets {
  UniqueFd a, b;
  Sockets() {
    auto listener = Listener::Bind("127.0.0.1", 0);
    REQUIRE(listener);
    auto dialled = Dial("127.0.0.1", listener->port(), Deadline::After(2000));
    REQUIRE(dialled);
    auto accepted = listener->Accept(Deadline::After(2000));
    REQUIRE(accepted);
    a = std::move(*dialled);
    b = std::move(*accepted);
  }
};

TEST_CASE("Dial and Bind work by name, over IPv4 and IPv6", "[tcp]") {
  auto any = Listener::Bind("", 0);
  REQUIRE(any);
  CHECK(any->port() != 0);
  for (const char* host : {"127.0.0.1", "localhost"}) {
    auto dialled = Dial(host, any->port(), Deadline::After(2000));
    REQUIRE(dialled);
    auto accepted = any->Accept(Deadline::After(2000));
    REQUIRE(accepted);
    CHECK(PeerName(dialled->get()).find(std::to_string(any->port())) != std::string::npos);
  }
  auto six = Listener::Bind("::1", 0);
  if (six) {  // a machine may lack IPv6
    CHECK(Dial("::1", six->port(), Deadline::After(2000)));
  }
  CHECK(Listener::Bind("localhost", 0));
}

TEST_CASE("Dial says why it fails, and in time", "[tcp]") {
  uint16_t port;
  {
    auto gone = Listener::Bind("127.0.0.1", 0);
    REQUIRE(gone);
    port = gone->port();
  }
  auto refused = Dial("127.0.0.1", port, Deadline::After(2000));
  REQUIRE_FALSE(refused);
  CHECK(refused.error().message.find("Connection refused") != std::string::npos);
  CHECK(refused.error().message.find(std::to_string(port)) != std::string::npos);
  CHECK_FALSE(Dial("no-such-host.invalid", 1, Deadline::After(2000)));
}

TEST_CASE("a taken port is an error, Accept has a deadline", "[tcp]") {
  auto first = Listener::Bind("127.0.0.1", 0);
  REQUIRE(first);
  CHECK_FALSE(Listener::Bind("127.0.0.1", first->port()));
  auto nobody = first->Accept(Deadline::After(20));
  REQUIRE_FALSE(nobody);
  CHECK(nobody.error().code == Code::kTimeout);
}

TEST_CASE("blobs arrive whole and leave what follows them", "[tcp][blob]") {
  Sockets sockets;
  const std::string large(200'000, 'x');
  std::thread sender([&] {
    CHECK(SendBlob(sockets.a.get(), Bytes("hello"), 64, Deadline::After(5000)));
    CHECK(SendBlob(sockets.a.get(), {}, 64, Deadline::After(5000)));
    CHECK(SendBlob(sockets.a.get(), Bytes(large), 1 << 20, Deadline::After(5000)));
    CHECK(send(sockets.a.get(), "!", 1, 0) == 1);
  });
  auto first = ReceiveBlob(sockets.b.get(), 64, Deadline::After(5000));
  auto second = ReceiveBlob(sockets.b.get(), 64, Deadline::After(5000));
  auto third = ReceiveBlob(sockets.b.get(), 1 << 20, Deadline::After(5000));
  sender.join();
  REQUIRE((first && second && third));
  CHECK(std::string(reinterpret_cast<char*>(first->data()), first->size()) == "hello");
  CHECK(second->empty());
  CHECK(third->size() == large.size());
  char rest = 0;
  CHECK(recv(sockets.b.get(), &rest, 1, 0) == 1);
  CHECK(rest == '!');
}

TEST_CASE("an oversized blob is refused before its bytes are read", "[tcp][blob]") {
  Sockets sockets;
  CHECK_FALSE(SendBlob(sockets.a.get(), Bytes("too long"), 4, Deadline::After(1000)));
  const uint32_t length = 0xffffffff;
  REQUIRE(send(sockets.a.get(), &length, 4, 0) == 4);
  auto blob = ReceiveBlob(sockets.b.get(), 1 << 20, Deadline::After(1000));
  REQUIRE_FALSE(blob);
  CHECK(blob.error().code == Code::kProtocol);
  CHECK(blob.error().message.find("4294967295") != std::string::npos);
}

TEST_CASE("a peer that trickles gets no more than the deadline", "[tcp][blob]") {
  Sockets sockets;
  std::thread trickler([&] {
    const uint32_t length = 1000;
    send(sockets.a.get(), &length, 4, MSG_NOSIGNAL);
    for (int i = 0; i < 40; ++i) {
      if (send(sockets.a.get(), "x", 1, MSG_NOSIGNAL) != 1) break;
      poll(nullptr, 0, 5);
    }
  });
  const int64_t start = NowNanoseconds();
  auto blob = ReceiveBlob(sockets.b.get(), 4096, Deadline::After(60));
  CHECK(NowNanoseconds() - start < 2'000'000'000);
  REQUIRE_FALSE(blob);
  CHECK(blob.error().code == Code::kTimeout);
  sockets.b.reset();
  trickler.join();
}

TEST_CASE("a peer that closes during a blob is reported as gone", "[tcp][blob]") {
  Sockets sockets;
  REQUIRE(send(sockets.a.get(), "\x10\0\0\0abc", 7, 0) == 7);
  sockets.a.reset();
  auto blob = ReceiveBlob(sockets.b.get(), 64, Deadline::After(1000));
  REQUIRE_FALSE(blob);
  CHECK(blob.error().code == Code::kUnavailable);
}

// A Connection whose peer is this test, holding the bare sockets.
struct RawPeer {
  Sockets control, bulk;
  std::unique_ptr<Connection> connection;
  RawPeer() {
    TcpOptions options;
    options.max_frame = 4096;
    connection = Adopt(std::move(control.a), std::move(bulk.a), options);
  }
};

TEST_CASE("a frame with a bad length closes the connection with a reason", "[tcp][hostile]") {
  const uint32_t length = GENERATE(0u, 7u, 4097u, 0xffffffffu);
  RawPeer peer;
  std::vector<std::byte> good(16);
  FillFrame(good.data(), 16, 3);
  REQUIRE(send(peer.control.b.get(), good.data(), 16, 0) == 16);
  REQUIRE(send(peer.control.b.get(), &length, 4, 0) == 4);
  Collector collector;
  ReceiveToEnd(*peer.connection, collector);
  CHECK(collector.frames.size() == 1);
  CHECK(peer.connection->close_reason().find("(" + std::to_string(length) + ")") !=
        std::string::npos);
}

TEST_CASE("a frame that stays incomplete is not delivered", "[tcp][hostile]") {
  RawPeer peer;
  std::vector<std::byte> frame(64);
  FillFrame(frame.data(), 64, 0);
  REQUIRE(send(peer.control.b.get(), frame.data(), 63, 0) == 63);
  Collector collector;
  CHECK(peer.connection->Wait(8, collector, Deadline::After(20)) == 0);
  peer.control.b.reset();
  ReceiveToEnd(*peer.connection, collector);
  CHECK(collector.frames.empty());
  CHECK_FALSE(peer.connection->close_reason().empty());
}

TEST_CASE("frames that follow the end of the bulk socket are still delivered", "[tcp][close]") {
  RawPeer peer;
  peer.bulk.b.reset();
  while (!peer.connection->closed()) poll(nullptr, 0, 1);
  std::vector<std::byte> frame(4096);
  for (uint32_t i = 0; i < 20; ++i) {
    FillFrame(frame.data(), frame.size(), i);
    REQUIRE(send(peer.control.b.get(), frame.data(), frame.size(), MSG_NOSIGNAL) == 4096);
  }
  Collector collector;
  SECTION("the control socket ends too") {
    peer.control.b.reset();
    ReceiveToEnd(*peer.connection, collector);
  }
  SECTION("the control socket never ends") {
    const int64_t start = NowNanoseconds();
    ReceiveToEnd(*peer.connection, collector);
    CHECK(NowNanoseconds() - start < 2 * Lifeline::kReadOnNs);
  }
  CHECK(collector.frames.size() == 20);
}

TEST_CASE("malformed bulk messages close the connection", "[tcp][hostile]") {
  RawPeer peer;
  std::vector<std::byte> memory(4096);
  auto region =
      peer.connection->Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
  REQUIRE(region);
  BulkHeader header = {.type = kPut, .bytes = 16, .offset = 0, .move_bytes = 16};
  SECTION("unknown type") {
    header.type = 77;
  }
  SECTION("an empty chunk") {
    header.bytes = 0;
  }
  SECTION("a chunk beyond the largest") {
    header.bytes = header.move_bytes = kMaxBulkChunk + 1;
  }
  SECTION("a chunk outside its move") {
    header.offset = 8;
  }
  SECTION("a chunk before its move") {
    header.move_offset = 8;
  }
  SECTION("data that nobody asked for") {
    header.type = kData;
  }
  SECTION("an answer to nothing") {
    header.type = kDone;
  }
  SECTION("an answer to an impossible slot") {
    header.type = kDone;
    header.slot = 0xffffffff;
  }
  REQUIRE(send(peer.bulk.b.get(), &header, sizeof header, 0) == sizeof header);
  Collector collector;
  ReceiveToEnd(*peer.connection, collector);
  CHECK(peer.connection->close_reason().find("bulk protocol") != std::string::npos);
}

TEST_CASE("an answer before its request was sent, or a wrong amount of data, is a violation",
          "[tcp][hostile]") {
  RawPeer peer;
  std::vector<std::byte> memory(4096);
  auto region =
      peer.connection->Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
  REQUIRE(region);
  MemoryKey key = (*region)->key();
  REQUIRE(peer.connection->Get(**region, 0, key, 0, 4096, 5) == Outcome::kOk);
  BulkHeader request;
  REQUIRE(recv(peer.bulk.b.get(), &request, sizeof request, MSG_WAITALL) == sizeof request);
  CHECK(request.type == kGet);
  CHECK(request.bytes == 4096);
  BulkHeader answer = {.slot = request.slot, .sequence = request.sequence};
  SECTION("more data than asked") {
    answer.type = kData;
    answer.bytes = 4097;
  }
  SECTION("success without data") {
    answer.type = kDone;
    answer.status = kWireOk;
  }
  SECTION("an unknown status") {
    answer.type = kDone;
    answer.status = 9;
  }
  SECTION("an old sequence") {
    answer.type = kDone;
    answer.status = kWireRefused;
    answer.sequence -= 1;
  }
  REQUIRE(send(peer.bulk.b.get(), &answer, sizeof answer, 0) == sizeof answer);
  Collector collector;
  ReceiveToEnd(*peer.connection, collector);
  REQUIRE(collector.done.size() == 1);
  CHECK(collector.done[0].status == BulkStatus::kClosed);
  CHECK(peer.connection->close_reason().find("bulk protocol") != std::string::npos);
}

TEST_CASE("a peer that asks without reading answers is cut off", "[tcp][hostile]") {
  RawPeer peer;
  std::vector<std::byte> memory(1 << 20);
  auto region = peer.connection->Register(memory.data(), memory.size(), Access::kPeerReads);
  REQUIRE(region);
  KeyBlob key;
  REQUIRE(ParseKey((*region)->key(), &key));
  BulkHeader header = {.type = kGet,
                       .bytes = memory.size(),
                       .move_bytes = memory.size(),
                       .key_slot = key.slot,
                       .key_generation = key.generation,
                       .key_secret = key.secret};
  for (int i = 0; i < 2000 && !peer.connection->closed(); ++i) {
    if (send(peer.bulk.b.get(), &header, sizeof header, MSG_NOSIGNAL) < 0) break;
  }
  Collector collector;
  ReceiveToEnd(*peer.connection, collector);
  CHECK(peer.connection->close_reason().find("open requests") != std::string::npos);
}

TEST_CASE("deregistration does not wait for a peer that stops in the middle of a chunk",
          "[tcp][hostile]") {
  RawPeer peer;
  std::vector<std::byte> memory(4096);
  auto region = peer.connection->Register(memory.data(), memory.size(), Access::kPeerWrites);
  REQUIRE(region);
  KeyBlob key;
  REQUIRE(ParseKey((*region)->key(), &key));
  const BulkHeader header = {.type = kPut,
                             .slot = 3,
                             .bytes = 4096,
                             .move_bytes = 4096,
                             .key_slot = key.slot,
                             .key_generation = key.generation,
                             .key_secret = key.secret};
  REQUIRE(send(peer.bulk.b.get(), &header, sizeof header, 0) == sizeof header);
  const std::vector<std::byte> ones(2048, std::byte{1});
  REQUIRE(send(peer.bulk.b.get(), ones.data(), 2048, 0) == 2048);
  while (peer.connection->counters().bulk_bytes_received < 2048) poll(nullptr, 0, 1);
  region->reset();
  std::memset(memory.data(), 2, memory.size());
  REQUIRE(send(peer.bulk.b.get(), ones.data(), 2048, 0) == 2048);
  BulkHeader answer;
  REQUIRE(recv(peer.bulk.b.get(), &answer, sizeof answer, MSG_WAITALL) == sizeof answer);
  CHECK(answer.type == kDone);
  CHECK(answer.slot == 3);
  CHECK(answer.status == kWireRefused);
  CHECK(AllAre(memory, std::byte{2}));
}

TEST_CASE("a live peer that does not read for many timeouts keeps its connection", "[tcp][close]") {
  Sockets control, bulk;
  TcpOptions options;
  options.peer_timeout_ms = 100;
  auto connection = Adopt(std::move(control.a), std::move(bulk.a), options);
  std::vector<std::byte> memory(32 << 20);
  auto region = connection->Register(memory.data(), memory.size(), Access::kPeerReads);
  REQUIRE(region);
  REQUIRE(connection->Put(**region, 0, (*region)->key(), 0, memory.size(), 1) == Outcome::kOk);
  const int64_t end = NowNanoseconds() + 1'500'000'000;
  while (NowNanoseconds() < end && !connection->closed()) {
    TrySend(*connection, 60'000, 0, kNone);
    poll(nullptr, 0, 1);
  }
  CHECK(connection->close_reason() == "");
}

#ifndef __SANITIZE_THREAD__  // tsan does not follow a multi-threaded program through fork
TEST_CASE("a killed peer process ends the connection and its moves", "[tcp][fork]") {
  Sockets control, bulk;
  int key_pipe[2];
  REQUIRE(pipe(key_pipe) == 0);
  const pid_t child = fork();
  if (child == 0) {
    control.a.reset();
    bulk.a.reset();
    auto connection = Adopt(std::move(control.b), std::move(bulk.b), {});
    static std::vector<std::byte> memory(64 << 20);
    auto region = connection->Register(memory.data(), memory.size(), Access::kPeerReadsAndWrites);
    if (write(key_pipe[1], &(*region)->key(), sizeof(MemoryKey)) < 0) _exit(1);
    for (;;) pause();
  }
  control.b.reset();
  bulk.b.reset();
  MemoryKey key;
  REQUIRE(read(key_pipe[0], &key, sizeof key) == sizeof key);
  auto connection = Adopt(std::move(control.a), std::move(bulk.a), {});
  std::vector<std::byte> memory(64 << 20);
  auto region = connection->Register(memory.data(), memory.size(), Access::kPeerReads);
  for (uint64_t i = 0; i < 50; ++i) {
    REQUIRE(connection->Put(**region, 0, key, 0, memory.size(), i) == Outcome::kOk);
  }
  while (connection->counters().bulk_bytes_sent < (4 << 20)) poll(nullptr, 0, 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  Collector collector;
  ReceiveToEnd(*connection, collector);
  REQUIRE(collector.done.size() == 50);
  CHECK(collector.done.back().status == BulkStatus::kClosed);
  CHECK_FALSE(connection->close_reason().empty());
  close(key_pipe[0]);
  close(key_pipe[1]);
}

TEST_CASE("a forked child that abandons the connection does not disturb it", "[tcp][fork]") {
  Pair pair = MakeTcpPair();
  pair.near->event_fd();
  const pid_t child = fork();
  if (child == 0) {
    AbandonAfterFork(*pair.near);
    AbandonAfterFork(*pair.far);
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  Send(*pair.near, 100, 1);
  Collector collector;
  ReceiveUntil(*pair.far, collector, [&] { return collector.frames.size() == 1; });
  CHECK(IsFrame(collector.frames[0], 100, 1));
  CHECK_FALSE(pair.near->closed());
}
#endif

}  // namespace
}  // namespace penstock::transport::tcp
