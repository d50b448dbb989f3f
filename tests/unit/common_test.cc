#include <catch2/catch.hpp>

#include "common/clock.h"
#include "common/env.h"
#include "common/result.h"
#include "common/unique_fd.h"

namespace penstock {

namespace {
Result<int> Half(int value) {
  if (value % 2 != 0) return Fail(Code::kInvalidArgument, "The value is odd.");
  return value / 2;
}
Result<int> Quarter(int value) {
  ASSIGN_OR_RETURN(int half, Half(value));
  ASSIGN_OR_RETURN(int quarter, Half(half));
  return quarter;
}
}  // namespace

TEST_CASE("an error is passed up unchanged", "[common]") {
  REQUIRE(Quarter(8).value() == 2);
  REQUIRE_FALSE(Quarter(6).has_value());
  REQUIRE(Quarter(6).error().message == "The value is odd.");
}

TEST_CASE("environment values fall back when they are not numbers", "[common]") {
  setenv("PENSTOCK_TEST_VALUE", "0x10", 1);
  REQUIRE(EnvInteger("PENSTOCK_TEST_VALUE", 3) == 16);
  setenv("PENSTOCK_TEST_VALUE", "12abc", 1);
  REQUIRE(EnvInteger("PENSTOCK_TEST_VALUE", 3) == 3);
  setenv("PENSTOCK_TEST_VALUE", "alpha,beta", 1);
  REQUIRE(EnvListContains("PENSTOCK_TEST_VALUE", "beta"));
  REQUIRE_FALSE(EnvListContains("PENSTOCK_TEST_VALUE", "bet"));
}

TEST_CASE("a deadline expires and never means never", "[common]") {
  REQUIRE(Deadline::After(0).expired());
  REQUIRE_FALSE(Deadline::After(10'000).expired());
  REQUIRE(Deadline::Never().poll_timeout_ms() == -1);
}

TEST_CASE("a descriptor is closed by its last owner", "[common]") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  UniqueFd reader(ends[0]);
  { UniqueFd writer(ends[1]); }
  char byte;
  REQUIRE(read(reader.get(), &byte, 1) == 0);
}

}  // namespace penstock
