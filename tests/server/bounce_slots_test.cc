// How the worker deals out the client's bounce slots. The test is the client and answers pieces, or
// does not.
#include <catch2/catch.hpp>
#include <cstring>
#include <set>

#include "tests/server/raw_client.h"

namespace penstock::server {
namespace {

constexpr int kSilenceMs = 100;
constexpr uint32_t kUpload = static_cast<uint32_t>(Operation::kUpload);
constexpr uint32_t kDownload = static_cast<uint32_t>(Operation::kDownload);
constexpr uint32_t kDone = static_cast<uint32_t>(Operation::kBounceDone);

struct Slots {
  explicit Slots(RawClient& client) : bytes(size_t{kBounceSlots} * kBounceSlotBytes) {
    auto made = client.connection().Register(bytes.data(), bytes.size(),
                                             transport::Access::kPeerReadsAndWrites);
    REQUIRE(made.has_value());
    region = std::move(*made);
  }
  std::byte* slot(uint32_t index) { return bytes.data() + size_t{index} * kBounceSlotBytes; }

  std::vector<std::byte> bytes;
  std::unique_ptr<transport::MemoryRegion> region;
};

UploadCommand Upload(const Slots& slots, uint64_t target, uint64_t bytes, Handle stream) {
  UploadCommand command{};
  command.target = target;
  command.stream = stream.bits;
  command.width = command.target_pitch = command.host_pitch = bytes;
  command.height = 1;
  command.place = HostPlace::kBounced;
  command.reply_when = ReplyWhen::kDone;
  memcpy(&command.key, &slots.region->key(), sizeof command.key);
  return command;
}

DownloadCommand Download(const Slots& slots, uint64_t source, uint64_t bytes, Handle stream) {
  DownloadCommand command{};
  command.source = source;
  command.stream = stream.bits;
  command.width = command.source_pitch = command.host_pitch = bytes;
  command.height = 1;
  command.place = HostPlace::kBounced;
  command.reply_when = ReplyWhen::kDone;
  memcpy(&command.key, &slots.region->key(), sizeof command.key);
  return command;
}

void Answer(RawClient& client, const RawClient::NamedPiece& named) {
  client.Send(kDone, BounceDoneCommand{named.call, named.piece.slot, 0}, false);
}

// The pieces that come until it has been quiet for a while, unanswered.
std::vector<RawClient::NamedPiece> PiecesUntilQuiet(RawClient& client) {
  std::vector<RawClient::NamedPiece> all;
  for (Deadline quiet = Deadline::After(kSilenceMs); !quiet.expired();) {
    client.Receive(10);
    const auto more = client.TakePieces();
    if (!more.empty()) quiet = Deadline::After(kSilenceMs);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

uint64_t Filled(RawClient& client, uint64_t bytes, uint8_t value) {
  const uint64_t address = client.Allocate(bytes);
  commands::CuMemsetD8Async command{};
  command.dstDevice = address;
  command.N = bytes;
  command.uc = value;
  client.Post(command);
  REQUIRE(client.WaitFor(client.Synchronize(kLegacyStream)).result == CUDA_SUCCESS);
  return address;
}

}  // namespace

TEST_CASE("copies that wait for their stream hold no bounce slot", "[server][bounce]") {
  RawClient client;
  Slots slots(client);
  const uint64_t flag = Filled(client, 4, 0);
  const uint64_t device = Filled(client, kBounceSlotBytes, 0x21);
  const Handle held = client.NewStream(), other = client.NewStream();
  client.LaunchHold(held, flag);
  std::set<uint64_t> waiting;
  for (uint32_t i = 0; i < 2 * kBounceSlots; ++i) {
    waiting.insert(client.Send(kDownload, Download(slots, device, kBounceSlotBytes, held), true));
  }
  CHECK(PiecesUntilQuiet(client).empty());
  // More slots than there are, one after another.
  const uint64_t target = client.Allocate(uint64_t{kBounceSlots} * 2 * kBounceSlotBytes);
  const uint64_t upload = client.Send(
      kUpload, Upload(slots, target, uint64_t{kBounceSlots} * 2 * kBounceSlotBytes, other), true);
  uint32_t filled = 0;
  for (const Deadline limit = Deadline::After(5000);
       filled < 2 * kBounceSlots && !limit.expired();) {
    client.Receive(10);
    for (const auto& named : client.TakePieces()) {
      REQUIRE(named.call == upload);
      memset(slots.slot(named.piece.slot), 0x42, named.piece.bytes);
      Answer(client, named);
      ++filled;
    }
  }
  CHECK(client.WaitFor(upload).result == CUDA_SUCCESS);
  CHECK(client.DownloadInline(target + 2 * kBounceSlots * uint64_t{kBounceSlotBytes} - 1, 1,
                              other) == std::vector<std::byte>{std::byte{0x42}});
  // Then the others have their turn.
  client.Release(flag);
  for (const Deadline limit = Deadline::After(5000); !waiting.empty() && !limit.expired();) {
    client.Receive(10);
    for (const auto& named : client.TakePieces()) {
      REQUIRE(waiting.erase(named.call) == 1);
      CHECK(slots.slot(named.piece.slot)[kBounceSlotBytes - 1] == std::byte{0x21});
      memset(slots.slot(named.piece.slot), 0, kBounceSlotBytes);
      Answer(client, named);
      CHECK(client.WaitFor(named.call).result == CUDA_SUCCESS);
    }
  }
  CHECK(waiting.empty());
}

TEST_CASE("a bounce slot is used again when the client has emptied it, not before",
          "[server][bounce]") {
  RawClient client;
  Slots slots(client);
  const uint64_t bytes = uint64_t{kBounceSlots + 3} * kBounceSlotBytes;
  const uint64_t device = Filled(client, bytes, 0x33);
  const Handle stream = client.NewStream();
  const uint64_t call = client.Send(kDownload, Download(slots, device, bytes, stream), true);
  const auto pieces = PiecesUntilQuiet(client);
  REQUIRE(pieces.size() == kBounceSlots);
  CHECK_FALSE(client.WaitFor(call, 1).came);
  std::set<uint32_t> used;
  std::set<uint64_t> offsets;
  for (const auto& named : pieces) {
    used.insert(named.piece.slot);
    offsets.insert(named.piece.offset);
  }
  CHECK(used.size() == kBounceSlots);
  Answer(client, pieces[5]);
  auto more = PiecesUntilQuiet(client);
  REQUIRE(more.size() == 1);
  CHECK(more[0].piece.slot == pieces[5].piece.slot);
  Answer(client, pieces[0]);
  Answer(client, pieces[1]);
  const auto last = PiecesUntilQuiet(client);
  REQUIRE(last.size() == 2);
  // The reply says that all is in the slots. They are the client's until it says so.
  CHECK(client.WaitFor(call).result == CUDA_SUCCESS);
  for (const auto& named : {more[0], last[0], last[1]}) offsets.insert(named.piece.offset);
  REQUIRE(offsets.size() == kBounceSlots + 3);
  CHECK(*offsets.rbegin() == uint64_t{kBounceSlots + 2} * kBounceSlotBytes);
}

TEST_CASE("a copy that fails under way leaves its slots to the client's answers",
          "[server][bounce]") {
  RawClient client;
  Slots slots(client);
  const uint64_t bytes = uint64_t{kBounceSlots} * 2 * kBounceSlotBytes;
  uint64_t device = client.Allocate(bytes);
  const uint64_t call = client.Send(kUpload, Upload(slots, device, bytes, kLegacyStream), true);
  const auto lent = PiecesUntilQuiet(client);
  REQUIRE(!lent.empty());
  commands::CuDevicePrimaryCtxReset reset{};
  reset.dev = 0;
  CHECK(client.Call(reset).result == CUDA_SUCCESS);
  CHECK(client.WaitFor(call).result != CUDA_SUCCESS);
  for (const auto& named : lent) Answer(client, named);
  // All slots are there again.
  device = Filled(client, bytes, 0x11);
  client.Send(kDownload, Download(slots, device, bytes, kLegacyStream), true);
  CHECK(PiecesUntilQuiet(client).size() == kBounceSlots);
}

TEST_CASE("an answer that no honest client gives to a bounce piece ends the session",
          "[server][bounce]") {
  RawClient client;
  Slots slots(client);
  const uint64_t device = Filled(client, kBounceSlotBytes, 0x33);
  const uint64_t call =
      client.Send(kDownload, Download(slots, device, kBounceSlotBytes, kLegacyStream), true);
  const auto pieces = PiecesUntilQuiet(client);
  REQUIRE(pieces.size() == 1);
  SECTION("another slot") {
    client.Send(kDone, BounceDoneCommand{call, (pieces[0].piece.slot + 1) % kBounceSlots, 0},
                false);
  }
  SECTION("no slot") {
    client.Send(kDone, BounceDoneCommand{call, kBounceSlots, 0}, false);
  }
  SECTION("another call") {
    client.Send(kDone, BounceDoneCommand{call + 1, pieces[0].piece.slot, 0}, false);
  }
  SECTION("twice") {
    Answer(client, pieces[0]);
    Answer(client, pieces[0]);
  }
  SECTION("and waits for a reply") {
    client.Send(kDone, BounceDoneCommand{call, pieces[0].piece.slot, 0}, true);
  }
  SECTION("a posted copy") {
    client.Send(kUpload, Upload(slots, device, kBounceSlotBytes, kLegacyStream), false);
  }
  SECTION("rows that are not packed") {
    DownloadCommand command = Download(slots, device, 64, kLegacyStream);
    command.host_pitch = 100;
    client.Send(kDownload, command, true);
  }
  CHECK(client.WaitForGoodbye());
}

}  // namespace penstock::server
