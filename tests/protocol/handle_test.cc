#include <catch2/catch.hpp>
#include <string>

#include "protocol/handle_table.h"

namespace penstock {

TEST_CASE("a stale generation is refused", "[protocol][handle]") {
  HandleTable<int> table(HandleKind::kEvent);
  const Handle first = table.Mint(7);
  REQUIRE(*table.Find(first) == 7);
  REQUIRE(table.Remove(first) != nullptr);
  REQUIRE(table.Find(first) == nullptr);
  const Handle second = table.Mint(8);
  REQUIRE(second.id() == first.id());
  REQUIRE(second.generation() == first.generation() + 1);
  REQUIRE(table.Find(first) == nullptr);
  REQUIRE(table.WasMinted(first));
  REQUIRE_FALSE(
      table.WasMinted(Handle::Make(HandleKind::kEvent, second.generation() + 1, second.id())));
}

TEST_CASE("a handle of another kind is refused", "[protocol][handle]") {
  HandleTable<int> table(HandleKind::kEvent);
  const Handle handle = table.Mint(7);
  const Handle foreign = Handle::Make(HandleKind::kStream, handle.generation(), handle.id());
  REQUIRE(table.Find(foreign) == nullptr);
  REQUIRE(table.Remove(foreign) == nullptr);
  REQUIRE(table.Find(Handle{0x1234}) == nullptr);
}

TEST_CASE("the server adopts only what a client can have minted", "[protocol][handle]") {
  HandleTable<int> client(HandleKind::kStream), server(HandleKind::kStream);
  const Handle a = client.Mint(1);
  REQUIRE(server.Adopt(a, 10));
  REQUIRE_FALSE(server.Adopt(a, 11));  // still alive
  client.Remove(a);
  server.Remove(a);
  REQUIRE_FALSE(server.Adopt(a, 12));  // the generation does not grow
  const Handle b = client.Mint(2);
  REQUIRE(server.Adopt(b, 13));
  REQUIRE(*server.Find(b) == 13);
  REQUIRE_FALSE(server.Adopt(Handle::Make(HandleKind::kStream, 1, kFirstServerHandleId), 14));
  REQUIRE_FALSE(server.Adopt(Handle::Make(HandleKind::kStream, 1, kMaxHandlesPerKind + 5), 15));
  REQUIRE_FALSE(server.Adopt(Handle::Make(HandleKind::kStream, 0, 3), 16));
  REQUIRE_FALSE(server.Adopt(kLegacyStream, 17));
}

TEST_CASE("a table refuses to grow beyond its limit", "[protocol][handle]") {
  HandleTable<std::string> table(HandleKind::kModule, 1, 3);
  for (int i = 0; i < 3; ++i) REQUIRE_FALSE(table.Mint("x").null());
  REQUIRE(table.Mint("x").null());
}

TEST_CASE("both halves of the id space are apart", "[protocol][handle]") {
  HandleTable<int> server(HandleKind::kKernel, kFirstServerHandleId);
  const Handle handle = server.Mint(1);
  REQUIRE(handle.id() == kFirstServerHandleId);
  REQUIRE(*server.Find(handle) == 1);
  HandleTable<int> client(HandleKind::kKernel);
  REQUIRE(client.Find(handle) == nullptr);
}

}  // namespace penstock
