// Modules, libraries and launches, with PTX written here.
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/simgpu/driver_fixture.h"

using namespace simgpu_test;

namespace {

#define PTX_HEAD ".version 8.0\n.target sm_75\n.address_size 64\n"

// scale(float* data, float factor, int count); fill(int* data) writes its thread number;
// trap_if(int* flag) traps where the flag is set; wild(int* p) writes wherever it is told.
constexpr char kPtx[] = PTX_HEAD R"(
.visible .global .align 4 .u32 counter = 41;
.visible .const .align 4 .f32 table[4] = {0f3F800000, 0f40000000, 0f40400000, 0f40800000};

.visible .entry scale(.param .u64 p0, .param .f32 p1, .param .u32 p2)
{
	.reg .pred %p<2>;
	.reg .f32 %f<4>;
	.reg .b32 %r<6>;
	.reg .b64 %rd<4>;
	ld.param.u64 %rd1, [p0];
	ld.param.f32 %f1, [p1];
	ld.param.u32 %r1, [p2];
	mov.u32 %r2, %ctaid.x;
	mov.u32 %r3, %ntid.x;
	mov.u32 %r4, %tid.x;
	mad.lo.s32 %r5, %r2, %r3, %r4;
	setp.ge.s32 %p1, %r5, %r1;
	@%p1 bra DONE;
	cvta.to.global.u64 %rd1, %rd1;
	mul.wide.s32 %rd2, %r5, 4;
	add.s64 %rd3, %rd1, %rd2;
	ld.global.f32 %f2, [%rd3];
	mul.f32 %f3, %f2, %f1;
	st.global.f32 [%rd3], %f3;
DONE:
	ret;
}

.visible .entry bump()
{
	.reg .b32 %r<3>;
	ld.global.u32 %r1, [counter];
	add.s32 %r2, %r1, 1;
	st.global.u32 [counter], %r2;
	ret;
}

.visible .entry wild(.param .u64 p0)
{
	.reg .b32 %r<2>;
	.reg .b64 %rd<2>;
	ld.param.u64 %rd1, [p0];
	mov.u32 %r1, 7;
	st.global.u32 [%rd1], %r1;
	ret;
}

.visible .entry small() .maxntid 64, 1, 1
{
	ret;
}
)";

CUfunction Load(const char* name, CUmodule* module) {
  REQUIRE_CUDA(cuModuleLoadData(module, kPtx));
  CUfunction function = nullptr;
  REQUIRE_CUDA(cuModuleGetFunction(&function, *module, name));
  return function;
}

}  // namespace

TEST_CASE("a kernel from PTX text computes", "[simgpu][module]") {
  ScopedContext context;
  CUmodule module = nullptr;
  const CUfunction scale = Load("scale", &module);
  const int count = 1000;
  std::vector<float> data(count);
  for (int i = 0; i < count; ++i) data[static_cast<size_t>(i)] = static_cast<float>(i);
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, count * 4));
  CHECK_CUDA(cuMemcpyHtoD(memory, data.data(), count * 4));
  float factor = 2.5f;
  void* arguments[] = {&memory, &factor, const_cast<int*>(&count)};
  CHECK_CUDA(cuLaunchKernel(scale, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
  std::vector<float> result(count);
  CHECK_CUDA(cuMemcpyDtoH(result.data(), memory, count * 4));
  int wrong = 0;
  for (int i = 0; i < count; ++i) {
    if (result[static_cast<size_t>(i)] != static_cast<float>(i) * 2.5f) ++wrong;
  }
  CHECK(wrong == 0);

  // The same arguments, packed.
  struct {
    CUdeviceptr data;
    float factor;
    int count;
  } packed = {memory, 0.5f, count};
  size_t bytes = sizeof(packed);
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  CHECK_CUDA(cuLaunchKernel(scale, 8, 1, 1, 128, 1, 1, 0, nullptr, nullptr, extra));
  CHECK_CUDA(cuMemcpyDtoH(result.data(), memory, count * 4));
  CHECK(result[999] == 999 * 1.25f);
  CHECK(cuLaunchKernel(scale, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, extra) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK_CUDA(cuModuleUnload(module));
  CHECK(cuLaunchKernel(scale, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr) ==
        CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("a function tells its parameters and attributes", "[simgpu][module]") {
  ScopedContext context;
  CUmodule module = nullptr;
  const CUfunction scale = Load("scale", &module);
  size_t offset = 0;
  size_t bytes = 0;
  CHECK_CUDA(cuFuncGetParamInfo(scale, 0, &offset, &bytes));
  CHECK((offset == 0 && bytes == 8));
  CHECK_CUDA(cuFuncGetParamInfo(scale, 2, &offset, &bytes));
  CHECK((offset == 12 && bytes == 4));
  CHECK(cuFuncGetParamInfo(scale, 3, &offset, &bytes) == CUDA_ERROR_INVALID_VALUE);
  const char* name = nullptr;
  CHECK_CUDA(cuFuncGetName(&name, scale));
  CHECK(std::string(name) == "scale");
  CUmodule owner = nullptr;
  CHECK_CUDA(cuFuncGetModule(&owner, scale));
  CHECK(owner == module);
  unsigned count = 0;
  CHECK_CUDA(cuModuleGetFunctionCount(&count, module));
  REQUIRE(count == 4);
  CUfunction all[4];
  CHECK_CUDA(cuModuleEnumerateFunctions(all, 4, module));
  CHECK(all[0] == scale);
  int value = 0;
  CUfunction small = nullptr;
  CHECK_CUDA(cuModuleGetFunction(&small, module, "small"));
  CHECK_CUDA(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, small));
  CHECK(value == 64);
  CUfunction none = nullptr;
  CHECK(cuModuleGetFunction(&none, module, "nothing") == CUDA_ERROR_NOT_FOUND);
}

TEST_CASE("impossible shapes are refused before they run", "[simgpu][launch]") {
  ScopedContext context;
  CUmodule module = nullptr;
  const CUfunction bump = Load("bump", &module);
  CUfunction small = nullptr;
  REQUIRE_CUDA(cuModuleGetFunction(&small, module, "small"));
  auto launch = [](CUfunction f, unsigned gx, unsigned gy, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared) {
    return cuLaunchKernel(f, gx, gy, 1, bx, by, bz, shared, nullptr, nullptr, nullptr);
  };
  CHECK(launch(bump, 0, 1, 1, 1, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(launch(bump, 1, 65536, 1, 1, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(launch(bump, 1, 1, 1025, 1, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(launch(bump, 1, 1, 64, 32, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(launch(bump, 1, 1, 1, 1, 65, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(launch(bump, 1, 1, 1, 1, 1, 49153) == CUDA_ERROR_INVALID_VALUE);
  CHECK(launch(small, 1, 1, 65, 1, 1, 0) == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  CHECK_CUDA(launch(small, 1, 1, 64, 1, 1, 0));
  CHECK_CUDA(cuFuncSetAttribute(bump, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60'000));
  CHECK_CUDA(launch(bump, 1, 1, 1, 1, 1, 60'000));
  CHECK(cuFuncSetAttribute(bump, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 20) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchCooperativeKernel(bump, 1 << 20, 1, 1, 1, 1, 1, 0, nullptr, nullptr) ==
        CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  CHECK_CUDA(cuCtxSynchronize());
}

TEST_CASE("module variables are memory of the context", "[simgpu][module]") {
  ScopedContext context;
  CUmodule module = nullptr;
  const CUfunction bump = Load("bump", &module);
  CUdeviceptr counter = 0;
  size_t bytes = 0;
  CHECK_CUDA(cuModuleGetGlobal(&counter, &bytes, module, "counter"));
  CHECK(bytes == 4);
  uint32_t value = 0;
  CHECK_CUDA(cuMemcpyDtoH(&value, counter, 4));
  CHECK(value == 41);
  CHECK_CUDA(cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  CHECK_CUDA(cuMemcpyDtoH(&value, counter, 4));
  CHECK(value == 42);
  CUdeviceptr table = 0;
  float floats[4] = {};
  CHECK_CUDA(cuModuleGetGlobal(&table, &bytes, module, "table"));
  CHECK(bytes == 16);
  CHECK_CUDA(cuMemcpyDtoH(floats, table, 16));
  CHECK(floats[2] == 3.0f);
  CHECK(cuModuleGetGlobal(&table, &bytes, module, "nothing") == CUDA_ERROR_NOT_FOUND);
  CHECK(cuMemFree(counter) == CUDA_ERROR_INVALID_VALUE);
  CHECK_CUDA(cuModuleUnload(module));
  CHECK(cuMemcpyDtoH(&value, counter, 4) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a wild store poisons its context and no other", "[simgpu][launch]") {
  ScopedContext other;
  {
    CUcontext broken = nullptr;
    REQUIRE_CUDA(cuCtxCreate_v4(&broken, nullptr, 0, 0));
    CUmodule module = nullptr;
    const CUfunction wild = Load("wild", &module);
    CUdeviceptr memory = 0;
    REQUIRE_CUDA(cuMemAlloc(&memory, 4));
    CUdeviceptr address = memory;
    void* arguments[] = {&address};
    CHECK_CUDA(cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr));
    CHECK_CUDA(cuCtxSynchronize());
    address = memory + 64;
    CHECK_CUDA(cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr));
    CHECK(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(cuMemAlloc(&memory, 4) == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr) ==
          CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_CUDA(cuCtxDestroy(broken));
  }
  CUdeviceptr memory = 0;
  CHECK_CUDA(cuMemAlloc(&memory, 4));
  CHECK_CUDA(cuCtxSynchronize());
}

TEST_CASE("memory of another context is out of bounds", "[simgpu][launch]") {
  ScopedContext first(0);
  CUdeviceptr foreign = 0;
  REQUIRE_CUDA(cuMemAlloc(&foreign, 4));
  CUcontext second = nullptr;
  REQUIRE_CUDA(cuCtxCreate_v4(&second, nullptr, 0, 1));
  CUmodule module = nullptr;
  const CUfunction wild = Load("wild", &module);
  void* arguments[] = {&foreign};
  CHECK_CUDA(cuCtxEnablePeerAccess(first.get(), 0));
  CHECK_CUDA(cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr));
  CHECK_CUDA(cuCtxSynchronize());
  CHECK_CUDA(cuCtxDisablePeerAccess(first.get()));
  CHECK_CUDA(cuLaunchKernel(wild, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr));
  CHECK(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK_CUDA(cuCtxDestroy(second));
}

TEST_CASE("broken images are refused with a reason", "[simgpu][module]") {
  ScopedContext context;
  CUmodule module = nullptr;
  char log[512] = "untouched";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log, reinterpret_cast<void*>(sizeof(log))};
  const char broken[] = PTX_HEAD ".visible .entry k() { this.is.not.ptx %r1 }";
  CHECK(cuModuleLoadDataEx(&module, broken, 2, options, values) == CUDA_ERROR_INVALID_PTX);
  CHECK(std::strlen(log) > 10);
  CHECK(reinterpret_cast<size_t>(values[1]) == std::strlen(log));
  CHECK(cuModuleLoadData(&module,
                         "\x7f"
                         "ELF machine code") == CUDA_ERROR_NO_BINARY_FOR_GPU);
  CHECK(cuModuleLoadData(&module, "garbage") == CUDA_ERROR_INVALID_IMAGE);
  CHECK(cuModuleLoadData(&module, ".version 99.0\n.target sm_75\n.address_size 64\n") ==
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  CHECK(cuModuleLoad(&module, "/nonexistent.ptx") == CUDA_ERROR_FILE_NOT_FOUND);
}

TEST_CASE("a library serves every context, and its kernels are functions", "[simgpu][library]") {
  Initialise();
  CUlibrary library = nullptr;
  REQUIRE_CUDA(cuLibraryLoadData(&library, kPtx, nullptr, nullptr, 0, nullptr, nullptr, 0));
  unsigned count = 0;
  CHECK_CUDA(cuLibraryGetKernelCount(&count, library));
  CHECK(count == 4);
  CUkernel bump = nullptr;
  REQUIRE_CUDA(cuLibraryGetKernel(&bump, library, "bump"));
  CUkernel none = nullptr;
  CHECK(cuLibraryGetKernel(&none, library, "nothing") == CUDA_ERROR_NOT_FOUND);
  for (CUdevice device : {0, 1}) {
    ScopedContext context(device);
    CHECK_CUDA(cuLaunchKernel(reinterpret_cast<CUfunction>(bump), 1, 1, 1, 1, 1, 1, 0, nullptr,
                              nullptr, nullptr));
    CUdeviceptr counter = 0;
    size_t bytes = 0;
    CHECK_CUDA(cuLibraryGetGlobal(&counter, &bytes, library, "counter"));
    uint32_t value = 0;
    CHECK_CUDA(cuMemcpyDtoH(&value, counter, 4));
    CHECK(value == 42);  // each context has its own
    CUfunction function = nullptr;
    CHECK_CUDA(cuKernelGetFunction(&function, bump));
    int blocks = 0;
    CHECK_CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 256, 0));
    CHECK(blocks > 0);
  }
  CHECK_CUDA(cuLibraryUnload(library));
  ScopedContext context;
  CHECK(cuLaunchKernel(reinterpret_cast<CUfunction>(bump), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr,
                       nullptr) == CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("linked PTX loads like any other", "[simgpu][link]") {
  ScopedContext context;
  const char part[] = PTX_HEAD R"(
.visible .func (.param .b32 r) seven() {
	.reg .b32 %r<2>;
	mov.u32 %r1, 7;
	st.param.b32 [r], %r1;
	ret;
})";
  const char main_part[] = PTX_HEAD R"(
.extern .func (.param .b32 r) seven();
.visible .entry store(.param .u64 p0) {
	.reg .b32 %r<2>;
	.reg .b64 %rd<2>;
	ld.param.u64 %rd1, [p0];
	{
	.param .b32 result;
	call.uni (result), seven, ();
	ld.param.b32 %r1, [result];
	}
	st.global.u32 [%rd1], %r1;
	ret;
})";
  CUlinkState link = nullptr;
  REQUIRE_CUDA(cuLinkCreate(0, nullptr, nullptr, &link));
  CHECK_CUDA(cuLinkAddData(link, CU_JIT_INPUT_PTX, const_cast<char*>(main_part), sizeof(main_part),
                           "main", 0, nullptr, nullptr));
  CHECK_CUDA(cuLinkAddData(link, CU_JIT_INPUT_PTX, const_cast<char*>(part), sizeof(part), "part", 0,
                           nullptr, nullptr));
  void* image = nullptr;
  size_t bytes = 0;
  REQUIRE_CUDA(cuLinkComplete(link, &image, &bytes));
  CUmodule module = nullptr;
  REQUIRE_CUDA(cuModuleLoadData(&module, image));
  CHECK_CUDA(cuLinkDestroy(link));
  CUfunction store = nullptr;
  REQUIRE_CUDA(cuModuleGetFunction(&store, module, "store"));
  CUdeviceptr memory = 0;
  REQUIRE_CUDA(cuMemAlloc(&memory, 4));
  void* arguments[] = {&memory};
  CHECK_CUDA(cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr));
  uint32_t value = 0;
  CHECK_CUDA(cuMemcpyDtoH(&value, memory, 4));
  CHECK(value == 7);
}
