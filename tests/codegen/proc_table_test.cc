#include "interposer/core/proc_table.h"

#include <cuda.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <string>
#include <tuple>

#include "interposer/core/unsupported.h"

namespace penstock::interposer {
namespace {

// The generated table with names in place of addresses, so a search can be read.
const ProcEntry kTable[] = {
#define PENSTOCK_PROC(base, symbol, version, per_thread) \
  {#base, version, per_thread != 0, const_cast<char*>(#symbol)},
#include "proc_table.gen.inc"
#undef PENSTOCK_PROC
};

std::string Find(const char* name, int version, bool per_thread = false) {
  CUdriverProcAddressQueryResult status{};
  void* found = FindProc(
      kTable, name, version,
      per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_DEFAULT,
      &status);
  if (status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) return found ? "?" : "unknown";
  if (status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT) return found ? "?" : "too low";
  return static_cast<const char*>(found);
}

TEST_CASE("a version finds the newest generation not newer than it", "[codegen]") {
  CHECK(Find("cuMemAlloc", 2000) == "cuMemAlloc");
  CHECK(Find("cuMemAlloc", 3010) == "cuMemAlloc");
  CHECK(Find("cuMemAlloc", 3020) == "cuMemAlloc_v2");
  CHECK(Find("cuMemAlloc", 13000) == "cuMemAlloc_v2");
  CHECK(Find("cuCtxGetDevice", 2000) == "cuCtxGetDevice");
  CHECK(Find("cuCtxGetDevice", 13000) == "cuCtxGetDevice_v2");
  CHECK(Find("cuDeviceGetUuid", 9020) == "cuDeviceGetUuid");
  CHECK(Find("cuDevicePrimaryCtxReset", 7000) == "cuDevicePrimaryCtxReset");
  CHECK(Find("cuCtxCreate", 3020) == "cuCtxCreate_v2");
}

TEST_CASE("per-thread default streams find twins where a name has them", "[codegen]") {
  CHECK(Find("cuMemcpyHtoD", 13000, true) == "cuMemcpyHtoD_v2_ptds");
  CHECK(Find("cuMemcpyHtoD", 13000, false) == "cuMemcpyHtoD_v2");
  CHECK(Find("cuLaunchKernel", 13000, true) == "cuLaunchKernel_ptsz");
  CHECK(Find("cuMemAlloc", 13000, true) == "cuMemAlloc_v2");
  CHECK(Find("cuMemcpyHtoD", 6050, true) == "too low");
}

TEST_CASE("an unknown name and a version too low are told apart", "[codegen]") {
  CHECK(Find("", 0) == "unknown");
  CHECK(Find("cuMemAlloc_v2", 13000) == "unknown");
  CHECK(Find("cuLibraryLoadData", 11080) == "too low");
  CHECK(Find("zz", 13000) == "unknown");
}

TEST_CASE("the table is sorted as the search needs it", "[codegen]") {
  CHECK(std::size(kTable) == 637);
  for (size_t i = 1; i < std::size(kTable); ++i) {
    const ProcEntry &a = kTable[i - 1], &b = kTable[i];
    INFO(b.name);
    CHECK(std::tie(a.name, a.per_thread, a.version) < std::tie(b.name, b.per_thread, b.version));
  }
}

// Runs the body with stderr in a file and returns what was written.
template <typename Body>
std::string CaptureStderr(Body body) {
  FILE* file = tmpfile();
  fflush(stderr);
  int saved = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  body();
  fflush(stderr);
  dup2(saved, STDERR_FILENO);
  close(saved);
  rewind(file);
  std::string text(4096, '\0');
  text.resize(fread(text.data(), 1, text.size(), file));
  fclose(file);
  return text;
}

TEST_CASE("a function that is not served returns its error and says why once", "[codegen]") {
  CUresult first = CUDA_SUCCESS, second = CUDA_SUCCESS, twin = CUDA_SUCCESS;
  std::string text = CaptureStderr([&] {
    first = cuArrayDestroy(nullptr);
    second = cuArrayDestroy(nullptr);
    twin = cuGraphUpload_ptsz(nullptr, nullptr);
  });
  CHECK(first == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(second == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(twin == CUDA_ERROR_NOT_SUPPORTED);
  size_t at = text.find("cuArrayDestroy is not supported: arrays are not forwarded yet.");
  REQUIRE(at != std::string::npos);
  CHECK(text.find("cuArrayDestroy", at + 1) == std::string::npos);
  CHECK(text.find("cuGraphUpload is not supported: graphs") != std::string::npos);
}

TEST_CASE("the index of functions is dense and leads back to the name", "[codegen]") {
  CHECK(FunctionName(Function::kCuMemAlloc) == std::string("cuMemAlloc"));
  CHECK(FunctionName(Function::kCuMemAlloc_v1) == std::string("cuMemAlloc_v1"));
  CHECK(FunctionName(Function::kCuCtxCreate_v4) == std::string("cuCtxCreate_v4"));
  CHECK(FunctionReason(Function::kCuMemAlloc) == nullptr);
  CHECK(FunctionIndex(Function::kCuGetErrorString) == 0);
  uint32_t named = 0;
  for (uint32_t index = 0; index < kFunctionCount; ++index) {
    const Function function = FunctionAt(index);
    if (function == Function{}) continue;
    ++named;
    CHECK(FunctionIndex(function) == index);
    CHECK(FunctionName(function) != nullptr);
  }
  CHECK(named > 500);
}

}  // namespace
}  // namespace penstock::interposer
