#include <catch2/catch.hpp>
#include <cstring>

#include "protocol/hello.h"

namespace penstock {
namespace {

template <typename T>
std::vector<std::byte> Bytes(const T& value) {
  std::vector<std::byte> bytes(sizeof value);
  memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

const Key kKey = {'0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'};

}  // namespace

TEST_CASE("two keys, labels or transcripts never share a proof", "[protocol]") {
  ClientHello hello;
  Challenge challenge;
  const Mac mac = ClientMac(kKey, hello, challenge);
  Key other = kKey;
  other[0] ^= 1;
  REQUIRE_FALSE(SameMac(mac, ClientMac(other, hello, challenge)));
  REQUIRE_FALSE(SameMac(mac, ClientMac({}, hello, challenge)));
  REQUIRE_FALSE(SameMac(mac, ServerMac(kKey, hello, challenge, 0, {})));
  REQUIRE(SameMac(mac, ClientMac(kKey, hello, challenge)));
}

TEST_CASE("a proof is worth nothing under another nonce", "[protocol]") {
  ClientHello hello;
  Challenge challenge;
  const Mac recorded = ClientMac(kKey, hello, challenge);
  challenge.nonce[5] = 9;
  REQUIRE_FALSE(SameMac(recorded, ClientMac(kKey, hello, challenge)));
  const Mac bulk = BulkMac(kKey, hello, challenge, {}, 1, 1);
  REQUIRE_FALSE(SameMac(bulk, BulkMac(kKey, hello, challenge, {}, 1, 2)));
  REQUIRE_FALSE(SameMac(bulk, BulkMac(kKey, hello, challenge, {}, 2, 1)));
}

TEST_CASE("a hello of the wrong size, magic or role is refused", "[protocol]") {
  ClientHello hello;
  CopyText(hello.program, "train.py");
  auto bytes = Bytes(hello);
  REQUIRE(std::string(ParseClientHello(bytes)->program) == "train.py");
  REQUIRE(*PeekRole(bytes) == Role::kControl);
  auto shorter = bytes;
  shorter.pop_back();
  REQUIRE_FALSE(ParseClientHello(shorter).has_value());
  auto magic = bytes;
  magic[0] = std::byte{0};
  REQUIRE(ParseClientHello(magic).error().code == Code::kProtocol);
  REQUIRE_FALSE(PeekRole(magic).has_value());
  hello.gpus = kMaxDevices + 1;
  REQUIRE_FALSE(ParseClientHello(Bytes(hello)).has_value());
  REQUIRE_FALSE(PeekRole(std::span<const std::byte>(bytes).first(7)).has_value());
}

TEST_CASE("an unterminated text is terminated", "[protocol]") {
  ClientHello hello;
  memset(hello.host, 'x', sizeof hello.host);
  REQUIRE(strlen(ParseClientHello(Bytes(hello))->host) == sizeof hello.host - 1);
}

TEST_CASE("a welcome must hold as many devices as it says", "[protocol]") {
  std::vector<DeviceInfo> devices(2);
  CopyText(devices[1].name, "simulated");
  Welcome welcome;
  welcome.server.device_count = 2;
  auto bytes = SerializeWelcome(welcome, devices);
  const auto parsed = ParseWelcome(bytes);
  REQUIRE(parsed.has_value());
  REQUIRE(std::string(parsed->devices[1].name) == "simulated");
  bytes.pop_back();
  REQUIRE_FALSE(ParseWelcome(bytes).has_value());
  welcome.server.device_count = 0x10000001;  // times the size wraps in 32 bits
  REQUIRE_FALSE(ParseWelcome(SerializeWelcome(welcome, devices)).has_value());
}

TEST_CASE("versions meet at the newest common one", "[protocol]") {
  REQUIRE(ChooseVersion(1, 1) == 1);
  REQUIRE(ChooseVersion(1, 7) == kProtocolVersion);
  REQUIRE(ChooseVersion(kProtocolVersion + 1, kProtocolVersion + 3) == 0);
  REQUIRE(ChooseVersion(0, 0) == 0);
}

TEST_CASE("a path request asks for a possible number of rails", "[protocol]") {
  PathRequest request;
  request.most_rails = kMaxPathRails;
  REQUIRE(ParsePathRequest(Bytes(request))->most_rails == kMaxPathRails);
  request.most_rails = 0;
  REQUIRE_FALSE(ParsePathRequest(Bytes(request)).has_value());
  request.most_rails = kMaxPathRails + 1;
  REQUIRE(ParsePathRequest(Bytes(request)).error().code == Code::kProtocol);
  auto bytes = Bytes(PathRequest{});
  bytes.pop_back();
  REQUIRE_FALSE(ParsePathRequest(bytes).has_value());
}

TEST_CASE("a path offer is dialled only if every part of it is possible", "[protocol]") {
  PathOffer good;
  good.path = Path::kRdma;
  good.port = 4711;
  good.rail_count = 2;
  CopyText(good.addresses[0], "192.0.2.7");
  CopyText(good.addresses[1], "2001:db8::7");
  const auto parsed = ParsePathOffer(Bytes(good));
  REQUIRE(parsed.has_value());
  REQUIRE(std::string(parsed->addresses[1]) == "2001:db8::7");

  const auto refused = [&](auto change) {
    PathOffer offer = good;
    change(offer);
    const auto result = ParsePathOffer(Bytes(offer));
    return !result.has_value() && result.error().code == Code::kProtocol;
  };
  REQUIRE(refused([](PathOffer& offer) { offer.magic = 0; }));
  REQUIRE(refused([](PathOffer& offer) { offer.path = static_cast<Path>(4); }));
  REQUIRE(refused([](PathOffer& offer) { offer.path = Path::kShm; }));  // names two sockets
  REQUIRE(refused([](PathOffer& offer) {
    offer.path = Path::kShm;
    offer.rail_count = 1;
    offer.addresses[0][0] = '\0';
  }));
  PathOffer shm = good;
  shm.path = Path::kShm;
  shm.rail_count = 1;
  CopyText(shm.addresses[0], "penstock-0123");
  REQUIRE(ParsePathOffer(Bytes(shm))->addresses[0] == std::string("penstock-0123"));
  REQUIRE(refused([](PathOffer& offer) { offer.port = 0; }));
  REQUIRE(refused([](PathOffer& offer) { offer.port = 65536; }));
  REQUIRE(refused([](PathOffer& offer) { offer.rail_count = 0; }));
  REQUIRE(refused([](PathOffer& offer) { offer.rail_count = kMaxPathRails + 1; }));
  REQUIRE(refused([](PathOffer& offer) { offer.rail_count = 3; }));  // the third is empty
  REQUIRE(refused([](PathOffer& offer) { CopyText(offer.addresses[0], "gpu7.example"); }));
  REQUIRE(refused([](PathOffer& offer) { memset(offer.addresses[0], '1', kPathAddressBytes); }));
  auto longer = Bytes(good);
  longer.push_back({});
  REQUIRE_FALSE(ParsePathOffer(longer).has_value());
}

TEST_CASE("an offer of tcp names no rail, and its reason is one plain line", "[protocol]") {
  PathOffer offer;
  offer.rail_count = 77;
  memset(offer.text, 'x', sizeof offer.text);
  offer.text[3] = '\n';
  offer.text[4] = '\x1b';
  const auto parsed = ParsePathOffer(Bytes(offer));
  REQUIRE(parsed.has_value());
  REQUIRE(parsed->rail_count == 0);
  REQUIRE(strlen(parsed->text) == sizeof offer.text - 1);
  REQUIRE(std::string(parsed->text).substr(0, 6) == "xxx??x");
}

TEST_CASE("a path decision is tcp or rdma", "[protocol]") {
  PathDecision decision;
  decision.path = Path::kRdma;
  REQUIRE(ParsePathDecision(Bytes(decision))->path == Path::kRdma);
  decision.path = static_cast<Path>(0);
  REQUIRE_FALSE(ParsePathDecision(Bytes(decision)).has_value());
  decision.path = Path::kTcp;
  memset(decision.text, 'x', sizeof decision.text);
  REQUIRE(strlen(ParsePathDecision(Bytes(decision))->text) == sizeof decision.text - 1);
}

TEST_CASE("a path token belongs to one session and is not its ticket", "[protocol]") {
  Nonce ticket{};
  ticket[0] = 1;
  const PathToken token = DerivePathToken(ticket, 7, 1);
  REQUIRE(token == DerivePathToken(ticket, 7, 1));
  REQUIRE_FALSE(token == DerivePathToken(ticket, 8, 1));
  REQUIRE_FALSE(token == DerivePathToken(ticket, 7, 2));
  REQUIRE_FALSE(memcmp(token.data(), ticket.data(), token.size()) == 0);
  ticket[31] ^= 1;
  REQUIRE_FALSE(token == DerivePathToken(ticket, 7, 1));
}

}  // namespace penstock
