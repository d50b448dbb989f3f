#include <catch2/catch.hpp>
#include <string>

#include "driver.gen.h"

namespace penstock::server {
namespace {

TEST_CASE("a library that is absent or no driver is refused with a sentence", "[codegen]") {
  Result<Driver> absent = LoadDriver("/nonexistent/libcuda.so.1");
  REQUIRE(!absent);
  CHECK(absent.error().code == Code::kUnavailable);
  CHECK(absent.error().message.find("/nonexistent/libcuda.so.1") != std::string::npos);
  Result<Driver> other = LoadDriver("libc.so.6");
  REQUIRE(!other);
  CHECK(other.error().message.find("is no CUDA driver") != std::string::npos);
}

// The library of this test has cuInit, which returns 17 more than its argument, and nothing else.
TEST_CASE("an older driver answers what it has and refuses the rest", "[codegen]") {
  Result<Driver> driver = LoadDriver(PENSTOCK_OLD_DRIVER);
  REQUIRE(driver);
  CHECK(driver->cuInit(3) == static_cast<CUresult>(20));
  CHECK(driver->cuMemAlloc_v2(nullptr, 1) == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(driver->cuLaunchKernel_ptsz(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr) ==
        CUDA_ERROR_NOT_SUPPORTED);
}

}  // namespace
}  // namespace penstock::server
