#include <array>
#include <catch2/catch.hpp>

#include "protocol/reader.h"
#include "protocol/writer.h"

namespace penstock {

TEST_CASE("what was written is read back", "[protocol]") {
  std::array<std::byte, 64> memory;
  memory.fill(std::byte{0xEE});
  Writer writer(memory);
  writer.Put<uint32_t>(0x01020304);
  writer.PutString("hello");
  writer.Put<uint64_t>(42);
  REQUIRE(writer.ok());
  REQUIRE(writer.used() == 24);
  REQUIRE(memory[0] == std::byte{4});  // little-endian
  REQUIRE(memory[7] == std::byte{0});  // padding is zeroed
  REQUIRE(memory[15] == std::byte{0});

  Reader reader(std::span<const std::byte>(memory).first(writer.used()));
  uint32_t number;
  std::string_view text;
  uint64_t last;
  REQUIRE(reader.Take(&number));
  REQUIRE(reader.TakeString(5, &text));
  REQUIRE(reader.Take(&last));
  REQUIRE(number == 0x01020304);
  REQUIRE(text == "hello");
  REQUIRE(last == 42);
  REQUIRE(reader.AtEnd());
}

TEST_CASE("a writer stops at the end of its memory", "[protocol]") {
  std::array<std::byte, 16> memory;
  Writer writer(memory);
  writer.Put<uint64_t>(1);
  REQUIRE(writer.Claim(9) == nullptr);
  REQUIRE_FALSE(writer.ok());
  writer.Put<uint32_t>(2);  // would fit, but the frame is spoilt
  REQUIRE(writer.used() == 8);
}

TEST_CASE("a short frame fails and stays failed", "[protocol]") {
  std::array<std::byte, 12> memory{};
  Reader reader(memory);
  uint64_t value = 1;
  REQUIRE(reader.Take(&value));
  value = 1;
  REQUIRE_FALSE(reader.Take(&value));  // four bytes are left
  REQUIRE(value == 0);
  uint32_t small;
  REQUIRE_FALSE(reader.Take(&small));
  REQUIRE_FALSE(reader.AtEnd());
}

TEST_CASE("lengths near the end of the number range do not wrap", "[protocol]") {
  std::array<std::byte, 32> memory{};
  for (uint64_t bytes : {UINT64_MAX, UINT64_MAX - 6, UINT64_MAX - 7, uint64_t{33}}) {
    Reader reader(memory);
    std::span<const std::byte> section;
    REQUIRE_FALSE(reader.TakeSection(bytes, &section));
    REQUIRE(section.empty());
  }
  Reader reader(memory);
  std::span<const uint64_t> values;
  REQUIRE_FALSE(reader.TakeArray(uint64_t{1} << 61, UINT64_MAX, &values));
  Reader bounded(memory);
  REQUIRE_FALSE(bounded.TakeArray(3, 2, &values));
}

}  // namespace penstock
