// What is particular to shared memory: memory that both ends reach, and peers that write what no
// honest one writes. The hostile ends are made of the raw parts: a Link and a mapped Segment.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "harness.h"
#include "transport/shm/connection.h"
#include "transport/shm/shm.h"

namespace penstock::transport::shm {
namespace {

constexpr Token kToken = {7, 1, 9};
constexpr uint32_t kMaxFrame = 64 << 10;

LinkMessage Hello() {
  LinkMessage hello;
  hello.kind = LinkKind::kHello;
  hello.max_frame = kMaxFrame;
  std::copy(kToken.begin(), kToken.end(), hello.token);
  return hello;
}

// A server that is ours, and a client that can do anything to it.
struct Besieged {
  std::unique_ptr<Connection> server;
  std::unique_ptr<Link> link;
  std::unique_ptr<Segment> segment;
  Collector collector;

  Besieged() {
    auto listener = Listener::Open({});
    REQUIRE(listener);
    auto socket = ConnectTo((*listener)->name());
    REQUIRE(socket);
    link = std::make_unique<Link>(std::move(*socket));
    REQUIRE(link->Send(Hello(), -1, Deadline::After(1000)));
    auto accepted = (*listener)->Accept(kToken, Deadline::After(5000));
    REQUIRE(accepted);
    server = std::move(*accepted);
    LinkMessage welcome;
    UniqueFd file;
    REQUIRE(link->Receive(&welcome, &file) == Link::Received::kMessage);
    auto mapped = Segment::Map(file.get(), welcome.ring_bytes, welcome.slot_bytes);
    REQUIRE(mapped);
    segment = std::move(*mapped);
  }
  RingWords& ring() { return segment->words().to[kServer]; }
  std::byte* place() { return segment->ring(kServer); }
  void Length(uint32_t length) { std::memcpy(place(), &length, sizeof length); }

  // The server ends the connection, and says why with these words.
  void Ends(const std::string& words) {
    link->SendWake();
    ReceiveToEnd(*server, collector);
    CAPTURE(server->close_reason());
    CHECK(server->close_reason().find(words) != std::string::npos);
  }
};

UniqueFd File(size_t bytes, int seals, unsigned flags = 0) {
  UniqueFd file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  REQUIRE(file.valid());
  REQUIRE(ftruncate(file.get(), static_cast<off_t>(bytes)) == 0);
  if (seals != 0) REQUIRE(fcntl(file.get(), F_ADD_SEALS, seals) == 0);
  return file;
}

LinkMessage Share(uint64_t id, uint64_t bytes) {
  LinkMessage share;
  share.kind = LinkKind::kShare;
  share.id = id;
  share.bytes = bytes;
  share.access = static_cast<uint32_t>(Access::kPeerReadsAndWrites);
  return share;
}

TEST_CASE("memory for copies is one memory on both sides", "[shm]") {
  Pair pair = MakeShmPair();
  constexpr size_t kSize = 300'000;
  auto made = pair.far->Allocate(kSize, Access::kPeerReadsAndWrites);
  REQUIRE(made);
  std::byte* const client = (*made)->address();
  const auto noise = Noise(kSize, 5);
  std::memcpy(client, noise.data(), kSize);
  ReachedMemory here;
  REQUIRE(pair.near->Reach((*made)->key(), 1000, 50'000, Access::kPeerReads, &here));
  CHECK(here.address == here.base + 1000);
  CHECK(here.address != client + 1000);
  CHECK(std::memcmp(here.address, noise.data() + 1000, 50'000) == 0);
  here.address[7] = std::byte{0x5a};
  CHECK(client[1007] == std::byte{0x5a});
  CHECK(pair.near->counters().bulk_copies == 0);
}

TEST_CASE("shared memory is reached only within its bounds, access and time", "[shm]") {
  Pair pair = MakeShmPair();
  auto made = pair.far->Allocate(8192, Access::kPeerReads);
  REQUIRE(made);
  const MemoryKey key = (*made)->key();
  ReachedMemory here;
  CHECK(pair.near->Reach(key, 0, 8192, Access::kPeerReads, &here));
  CHECK_FALSE(pair.near->Reach(key, 1, 8192, Access::kPeerReads, &here));
  CHECK_FALSE(pair.near->Reach(key, UINT64_MAX, 2, Access::kPeerReads, &here));
  CHECK_FALSE(pair.near->Reach(key, 0, 100, Access::kPeerWrites, &here));
  MemoryKey garbled = key;
  garbled.blob[garbled.bytes - 1] ^= std::byte{1};
  CHECK_FALSE(pair.near->Reach(garbled, 0, 100, Access::kPeerReads, &here));
  garbled = key;
  garbled.blob[4] ^= std::byte{64};
  CHECK_FALSE(pair.near->Reach(garbled, 0, 100, Access::kPeerReads, &here));
  std::vector<std::byte> other(4096);
  auto registered = pair.far->Register(other.data(), other.size(), Access::kPeerReads);
  REQUIRE(registered);
  CHECK_FALSE(pair.near->Reach((*registered)->key(), 0, 100, Access::kPeerReads, &here));

  REQUIRE(pair.near->Reach(key, 0, 100, Access::kPeerReads, &here));
  made->reset();
  Settle(*pair.far, *pair.near);
  Collector collector;
  pair.near->Wait(1, collector, Deadline::After(1));
  ReachedMemory late;
  CHECK_FALSE(pair.near->Reach(key, 0, 100, Access::kPeerReads, &late));
  CHECK(here.keep.use_count() == 1);
  CHECK(here.address[50] == std::byte{0});  // still mapped, for whoever was using it
}

TEST_CASE("Get and Put work on shared memory without the client's help", "[shm]") {
  Pair pair = MakeShmPair();
  constexpr size_t kSize = 3 << 20;
  auto made = pair.far->Allocate(kSize, Access::kPeerReadsAndWrites);
  REQUIRE(made);
  std::vector<std::byte> local(kSize);
  auto region = pair.near->Register(local.data(), kSize, Access::kPeerReadsAndWrites);
  REQUIRE(region);
  const auto noise = Noise(kSize, 9);
  std::memcpy((*made)->address(), noise.data(), kSize);
  Collector collector;
  REQUIRE(pair.near->Get(**region, 0, (*made)->key(), 0, kSize, 1) == Outcome::kOk);
  ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() == 1; });
  CHECK(collector.done[0].status == BulkStatus::kOk);
  CHECK(Same(local, noise));
  std::memset((*made)->address(), 0, kSize);
  REQUIRE(pair.near->Put(**region, 5, (*made)->key(), 7, kSize - 7, 2) == Outcome::kOk);
  ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() == 2; });
  CHECK(collector.done[1].status == BulkStatus::kOk);
  CHECK(std::memcmp((*made)->address() + 7, noise.data() + 5, kSize - 7) == 0);
  REQUIRE(pair.near->Put(**region, 0, (*made)->key(), 1, kSize, 3) == Outcome::kOk);
  ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() == 3; });
  CHECK(collector.done[2].status == BulkStatus::kRefused);
  CHECK(pair.far->counters().bulk_bytes_sent == 0);
}

TEST_CASE("memory beyond the limits is still memory for copies", "[shm]") {
  Pair pair = MakeShmPair();
  std::vector<std::unique_ptr<MemoryRegion>> regions;
  Collector collector;
  for (size_t i = 0; i < kMostShares + 3; ++i) {
    auto made = pair.far->Allocate(4096, Access::kPeerReads);
    REQUIRE(made);
    regions.push_back(std::move(*made));
    if (i % 64 == 0) pair.near->Wait(1, collector, Deadline::After(1));
  }
  std::memset(regions.back()->address(), 3, 4096);
  std::vector<std::byte> local(4096);
  auto region = pair.near->Register(local.data(), local.size(), Access::kPeerReads);
  REQUIRE(region);
  ReachedMemory here;
  CHECK(pair.near->Reach(regions[0]->key(), 0, 1, Access::kPeerReads, &here));
  CHECK_FALSE(pair.near->Reach(regions.back()->key(), 0, 1, Access::kPeerReads, &here));
  REQUIRE(pair.near->Get(**region, 0, regions.back()->key(), 0, 4096, 1) == Outcome::kOk);
  ReceiveUntil(*pair.near, collector, [&] { return collector.done.size() == 1; });
  CHECK(collector.done[0].status == BulkStatus::kOk);
  CHECK(AllAre(local, std::byte{3}));
}

TEST_CASE("whoever does not show the token is hung up on, and the client still gets in", "[shm]") {
  auto listener = Listener::Open({});
  REQUIRE(listener);
  auto silent = ConnectTo((*listener)->name());  // says nothing, and keeps nobody waiting
  auto stranger = ConnectTo((*listener)->name());
  REQUIRE(silent);
  REQUIRE(stranger);
  Link link(std::move(*stranger));
  LinkMessage hello = Hello();
  hello.token[15] ^= 1;
  REQUIRE(link.Send(hello, -1, Deadline::After(1000)));
  std::unique_ptr<Connection> client;
  std::thread dialling([&] {
    auto dialled = Dial({}, (*listener)->name(), kToken, Deadline::After(5000));
    if (dialled) client = std::move(*dialled);
  });
  auto server = (*listener)->Accept(kToken, Deadline::After(5000));
  dialling.join();
  REQUIRE(server);
  REQUIRE(client != nullptr);
  Settle(*client, **server);
  LinkMessage message;
  UniqueFd file;
  CHECK(link.Receive(&message, &file) == Link::Received::kEnd);
  CHECK_FALSE(Dial({}, (*listener)->name(), kToken, Deadline::After(100)));  // nobody listens
}

TEST_CASE("a peer that is killed is missed within a moment", "[shm]") {
  auto listener = Listener::Open({});
  REQUIRE(listener);
  const pid_t child = fork();
  if (child == 0) {
    auto socket = ConnectTo((*listener)->name());
    if (!socket) _exit(1);
    Link link(std::move(*socket));
    if (!link.Send(Hello(), -1, Deadline::After(1000))) _exit(1);
    for (;;) pause();
  }
  REQUIRE(child > 0);
  auto server = (*listener)->Accept(kToken, Deadline::After(5000));
  REQUIRE(server);
  Collector collector;
  CHECK((*server)->Wait(1, collector, Deadline::After(5)) == 0);
  kill(child, SIGKILL);
  const int64_t killed_ns = NowNanoseconds();
  ReceiveToEnd(**server, collector);
  CHECK(NowNanoseconds() - killed_ns < 2'000'000'000);
  CHECK((*server)->close_reason().find("closed the connection") != std::string::npos);
  waitpid(child, nullptr, 0);
}

TEST_CASE("garbage in the words of a ring ends the session", "[shm][hostile]") {
  Besieged besieged;
  SECTION("a head beyond the ring") {
    besieged.ring().head.store(uint64_t{1} << 40);
    besieged.Ends("impossible position");
  }
  SECTION("a head behind the tail") {
    besieged.ring().head.store(UINT64_MAX - 7);
    besieged.Ends("impossible position");
  }
  SECTION("a head between two frames' places") {
    besieged.ring().head.store(13);
    besieged.Ends("impossible position");
  }
  SECTION("a frame of no length") {
    besieged.Length(0);
    besieged.ring().head.store(64);
    besieged.Ends("bad length (0)");
  }
  SECTION("a frame of a length beyond the largest") {
    besieged.Length(kMaxFrame + 1);
    besieged.ring().head.store(uint64_t{2} * kMaxFrame);
    besieged.Ends("bad length (65537)");
  }
  SECTION("a frame longer than what is there") {
    besieged.Length(72);
    besieged.ring().head.store(64);
    besieged.Ends("bad length (72)");
  }
  SECTION("a tail beyond what was sent") {
    besieged.segment->words().to[kClient].tail.store(uint64_t{1} << 30);
    std::byte* slot = nullptr;
    Outcome outcome = Outcome::kOk;
    for (int i = 0; i < 1000 && outcome == Outcome::kOk; ++i) {
      outcome = besieged.server->Reserve(kMaxFrame, &slot);
      if (outcome != Outcome::kOk) break;
      FillFrame(slot, kMaxFrame, 0);
      besieged.server->Commit(kMaxFrame, kNone);
    }
    CHECK(outcome == Outcome::kClosed);
    besieged.Ends("impossible position");
  }
}

// One thread turns the lengths of all frames back and forth between what they are and one that
// reaches over the frames behind, while the server reads. It may believe either or end the session,
// but never check the one and use the other.
TEST_CASE("a length that changes after the check is never used", "[shm][hostile]") {
  struct Checker : Handler {
    uint64_t frames = 0, wrong = 0;
    bool OnFrame(std::span<const std::byte> frame) override {
      uint32_t length;
      std::memcpy(&length, frame.data(), sizeof length);
      if (length != frame.size()) ++wrong;
      ++frames;
      return true;
    }
    void OnBulkDone(uint64_t, BulkStatus, uint64_t) override {}
  } checker;
  constexpr uint64_t kFrame = 64;
  constexpr uint32_t kLong = 4096;
  for (int round = 0; round < 40; ++round) {
    Besieged besieged;
    const uint64_t frames = besieged.segment->ring_bytes() / kFrame;
    const auto set_all = [&](uint32_t length) {
      for (uint64_t i = 0; i < frames; ++i) {
        __atomic_store_n(reinterpret_cast<uint32_t*>(besieged.place() + i * kFrame), length,
                         __ATOMIC_RELAXED);
      }
    };
    set_all(kFrame);
    std::atomic<bool> stop{false};
    std::thread flipper([&] {
      for (uint32_t length = kLong; !stop; length ^= kFrame ^ kLong) set_all(length);
    });
    besieged.ring().head.store(besieged.segment->ring_bytes());
    while (besieged.server->Poll(64, checker) > 0) {
    }
    stop = true;
    flipper.join();
    CHECK(checker.wrong == 0);
    if (besieged.server->closed()) {
      CHECK(besieged.server->close_reason().find("shared memory protocol") != std::string::npos);
    }
  }
  CHECK(checker.frames > 0);
}

TEST_CASE("memory that could fault later is not mapped", "[shm][hostile]") {
  Besieged besieged;
  const size_t kSize = 64 << 10;
  SECTION("a file that is not sealed") {
    const UniqueFd file = File(kSize, 0);
    REQUIRE(besieged.link->Send(Share(1, kSize), file.get(), Deadline::After(1000)));
    besieged.Ends("not sealed against shrinking");
  }
  SECTION("a file that is only sealed against growing") {
    const UniqueFd file = File(kSize, F_SEAL_GROW);
    REQUIRE(besieged.link->Send(Share(1, kSize), file.get(), Deadline::After(1000)));
    besieged.Ends("not sealed against shrinking");
  }
  SECTION("a file that is shorter than said") {
    const UniqueFd file = File(kSize - 4096, F_SEAL_SHRINK);
    REQUIRE(besieged.link->Send(Share(1, kSize), file.get(), Deadline::After(1000)));
    besieged.Ends("smaller than it says");
  }
  SECTION("a file of huge pages, which may not be there") {
    const UniqueFd file = File(2 << 20, F_SEAL_SHRINK, MFD_HUGETLB);
    REQUIRE(besieged.link->Send(Share(1, 2 << 20), file.get(), Deadline::After(1000)));
    besieged.Ends("not of ordinary pages");
  }
  SECTION("no memory file at all") {
    const UniqueFd file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    REQUIRE(besieged.link->Send(Share(1, 4096), file.get(), Deadline::After(1000)));
    besieged.Ends("no memory file");
  }
  SECTION("no descriptor") {
    REQUIRE(besieged.link->Send(Share(1, 4096), -1, Deadline::After(1000)));
    besieged.Ends("has no memory file");
  }
}

TEST_CASE("shares that no honest client makes end the session", "[shm][hostile]") {
  Besieged besieged;
  const UniqueFd file = File(4096, F_SEAL_SHRINK);
  const auto send = [&](const LinkMessage& message) {
    const bool carries = message.kind == LinkKind::kShare;
    REQUIRE(besieged.link->Send(message, carries ? file.get() : -1, Deadline::After(1000)));
  };
  SECTION("an id twice") {
    send(Share(3, 4096));
    send(Share(3, 4096));
    besieged.Ends("id (3)");
  }
  SECTION("more bytes than a session may have") {
    send(Share(1, kMostShareBytes + 4096));
    besieged.Ends("exceed what a session may have");
  }
  SECTION("more mappings than a session may have") {
    for (uint64_t id = 1; id <= kMostShares + 1 && !besieged.server->closed(); ++id) {
      send(Share(id, 4096));
      if (id % 16 == 0) {
        besieged.link->SendWake();
        besieged.server->Arm();
      }
    }
    besieged.Ends("exceed what a session may have");
  }
  SECTION("an access that does not exist") {
    LinkMessage share = Share(1, 4096);
    share.access = 8;
    send(share);
    besieged.Ends("access (8)");
  }
  SECTION("memory taken back that was never shared") {
    LinkMessage unshare;
    unshare.kind = LinkKind::kUnshare;
    unshare.id = 5;
    send(unshare);
    besieged.Ends("never shared (5)");
  }
  SECTION("a second hello") {
    send(Hello());
    besieged.Ends("out of place");
  }
  SECTION("a message of another size") {
    REQUIRE(::send(besieged.link->fd(), "abc", 3, MSG_NOSIGNAL) == 3);
    besieged.Ends("malformed message");
  }
}

int OpenDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

TEST_CASE("descriptors that come unasked are closed", "[shm][hostile]") {
  Besieged siege;
  const int before = OpenDescriptors();
  UniqueFd file = File(4096, F_SEAL_SHRINK | F_SEAL_GROW);
  LinkMessage share = Share(1, 4096);
  const int descriptors[2] = {file.get(), file.get()};
  iovec part = {&share, sizeof share};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof descriptors);
  std::memcpy(CMSG_DATA(header), descriptors, sizeof descriptors);
  REQUIRE(sendmsg(siege.link->fd(), &message, 0) == sizeof share);
  siege.Ends("malformed message");
  file.reset();
  CHECK(OpenDescriptors() == before);
}

TEST_CASE("answers to bulk requests are checked", "[shm][hostile]") {
  Besieged besieged;
  std::vector<std::byte> local(4096);
  auto region = besieged.server->Register(local.data(), local.size(), Access::kPeerReads);
  REQUIRE(region);
  MemoryKey key;
  const KeyBlob blob = {kKeyKind, 0, 1, 0, 2};
  key.bytes = sizeof blob;
  std::memcpy(key.blob.data(), &blob, sizeof blob);
  REQUIRE(besieged.server->Get(**region, 0, key, 0, 4096, 1) == Outcome::kOk);
  BulkDescriptor& descriptor = besieged.segment->descriptor(0);
  const Deadline deadline = Deadline::After(5000);
  while (descriptor.request.load() != 1 && !deadline.expired()) sched_yield();
  descriptor.status = 7;
  descriptor.reply.store(1);
  besieged.Ends("answer with status (7)");
  REQUIRE(besieged.collector.done.size() == 1);
  CHECK(besieged.collector.done[0].status == BulkStatus::kClosed);
}

TEST_CASE("a client believes its server as little", "[shm][hostile]") {
  auto listening = ListenAt("penstock-test-" + std::to_string(getpid()));
  REQUIRE(listening);
  Result<std::unique_ptr<Connection>> client = Fail(Code::kInternal, "");
  std::thread dialling([&] {
    client = Dial({}, "penstock-test-" + std::to_string(getpid()), kToken, Deadline::After(5000));
  });
  pollfd entry = {listening->get(), POLLIN, 0};
  poll(&entry, 1, 5000);
  Link link(UniqueFd(accept4(listening->get(), nullptr, nullptr, SOCK_CLOEXEC)));
  LinkMessage welcome;
  welcome.kind = LinkKind::kWelcome;
  welcome.max_frame = kMaxFrame;
  welcome.ring_bytes = 1 << 20;
  welcome.slot_bytes = 64 << 10;
  const size_t bytes = Segment::FileBytes(welcome.ring_bytes, welcome.slot_bytes);
  SECTION("an unsealed file") {
    const UniqueFd file = File(bytes, 0);
    REQUIRE(link.Send(welcome, file.get(), Deadline::After(1000)));
    dialling.join();
    REQUIRE_FALSE(client);
    CHECK(client.error().message.find("not sealed") != std::string::npos);
  }
  SECTION("a file too small for its rings") {
    const UniqueFd file = File(bytes - 4096, F_SEAL_SHRINK);
    REQUIRE(link.Send(welcome, file.get(), Deadline::After(1000)));
    dialling.join();
    REQUIRE_FALSE(client);
    CHECK(client.error().message.find("smaller than it says") != std::string::npos);
  }
  SECTION("a ring whose size is no power of two") {
    welcome.ring_bytes += 4096;
    const UniqueFd file = File(bytes * 2, F_SEAL_SHRINK);
    REQUIRE(link.Send(welcome, file.get(), Deadline::After(1000)));
    dialling.join();
    REQUIRE_FALSE(client);
    CHECK(client.error().code == Code::kProtocol);
  }
  SECTION("a bulk request beyond its slot") {
    const UniqueFd file = File(bytes, F_SEAL_SHRINK);
    REQUIRE(link.Send(welcome, file.get(), Deadline::After(1000)));
    dialling.join();
    REQUIRE(client);
    std::vector<std::byte> memory(256 << 10);
    auto region = (*client)->Register(memory.data(), memory.size(), Access::kPeerWrites);
    REQUIRE(region);
    auto segment = Segment::Map(file.get(), welcome.ring_bytes, welcome.slot_bytes);
    REQUIRE(segment);
    KeyBlob key;
    std::memcpy(&key, (*region)->key().blob.data(), sizeof key);
    BulkDescriptor& descriptor = (*segment)->descriptor(0);
    descriptor.body = {.op = kBulkPut,
                       .key_slot = key.slot,
                       .key_generation = key.generation,
                       .bytes = welcome.slot_bytes + 1,
                       .key_secret = key.secret,
                       .move_bytes = welcome.slot_bytes + 1};
    descriptor.request.store(1);
    Collector collector;
    ReceiveToEnd(**client, collector);
    CHECK((*client)->close_reason().find("bulk protocol") != std::string::npos);
    CHECK(AllAre(memory, std::byte{0}));
  }
}

}  // namespace
}  // namespace penstock::transport::shm
