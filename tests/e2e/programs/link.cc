// Linking at run time, and what can be listed of modules: prints the same on a local GPU.
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "tests/e2e/programs/program.h"

namespace {

const char kHead[] = ".version 6.3\n.target sm_70\n.address_size 64\n";

const std::string kTwice = std::string(kHead) + R"(
.visible .func (.param .b32 result) twice(.param .b32 value) {
  .reg .b32 %r<3>;
  ld.param.b32 %r1, [value];
  add.s32 %r2, %r1, %r1;
  st.param.b32 [result], %r2;
  ret;
}
)";

const std::string kUser = std::string(kHead) + R"(
.extern .func (.param .b32 result) twice(.param .b32 value);
.visible .entry user(.param .u64 target, .param .u32 value) {
  .reg .b32 %r<3>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [target];
  cvta.to.global.u64 %rd2, %rd1;
  ld.param.u32 %r1, [value];
  {
    .param .b32 in;
    .param .b32 out;
    st.param.b32 [in], %r1;
    call (out), twice, (in);
    ld.param.b32 %r2, [out];
  }
  st.global.u32 [%rd2], %r2;
  ret;
}
.visible .entry other() { ret; }
)";

CUresult Add(CUlinkState state, const std::string& ptx, const char* name) {
  return cuLinkAddData(state, CU_JIT_INPUT_PTX, const_cast<char*>(ptx.c_str()), ptx.size() + 1,
                       name, 0, nullptr, nullptr);
}

void Link() {
  char info[4096] = "", errors[4096] = "";
  CUjit_option names[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
                          CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {info, reinterpret_cast<void*>(sizeof info), errors,
                    reinterpret_cast<void*>(sizeof errors)};
  CUlinkState state;
  CHECK(cuLinkCreate(4, names, values, &state));
  CHECK(Add(state, kUser, "user.ptx"));
  CHECK(Add(state, kTwice, "twice.ptx"));
  void* image = nullptr;
  size_t bytes = 0;
  CHECK(cuLinkComplete(state, &image, &bytes));
  printf("an image of more than (%d) bytes\n", bytes > 100 ? 100 : 0);
  CUmodule module;
  CHECK(cuModuleLoadData(&module, image));
  CHECK(cuLinkDestroy(state));

  CUfunction user;
  CHECK(cuModuleGetFunction(&user, module, "user"));
  CUdeviceptr target;
  CHECK(cuMemAlloc(&target, 4));
  uint32_t value = 21, result = 0;
  void* parameters[] = {&target, &value};
  CHECK(cuLaunchKernel(user, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
  CHECK(cuMemcpyDtoH(&result, target, 4));
  printf("twice 21 is %u\n", result);

  unsigned count = 0;
  CHECK(cuModuleGetFunctionCount(&count, module));
  std::vector<CUfunction> functions(count);
  CHECK(cuModuleEnumerateFunctions(functions.data(), count, module));
  std::set<std::string> listed;
  for (const CUfunction function : functions) {
    const char* name = nullptr;
    CHECK(cuFuncGetName(&name, function));
    listed.insert(name);
    // What is listed can be launched, and is what the name finds.
    if (std::string(name) != "user") continue;
    value = 4;
    CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
    CHECK(cuMemcpyDtoH(&result, target, 4));
  }
  for (const std::string& name : listed) printf("it holds (%s)\n", name.c_str());
  printf("twice 4 is %u\n", result);
  CHECK(cuModuleUnload(module));
}

void Library() {
  CUlibrary library;
  const std::string text = kTwice + kUser.substr(kUser.find(".visible .entry other"));
  CHECK(cuLibraryLoadData(&library, text.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  unsigned count = 0;
  CHECK(cuLibraryGetKernelCount(&count, library));
  std::vector<CUkernel> kernels(count);
  CHECK(cuLibraryEnumerateKernels(kernels.data(), count, library));
  for (const CUkernel kernel : kernels) {
    const char* name = nullptr;
    CHECK(cuKernelGetName(&name, kernel));
    printf("the library holds (%s)\n", name);
  }
  CHECK(cuLibraryUnload(library));
}

void Mistakes() {
  CUlinkState state;
  CHECK(cuLinkCreate(0, nullptr, nullptr, &state));
  printf("no such file: %s\n",
         ErrorName(cuLinkAddFile(state, CU_JIT_INPUT_PTX, "/nowhere.ptx", 0, nullptr, nullptr)));
  printf("no data: %s\n", ErrorName(cuLinkAddData(state, CU_JIT_INPUT_PTX, nullptr, 4, "none", 0,
                                                  nullptr, nullptr)));
  void* image = nullptr;
  size_t bytes = 0;
  printf("nothing to link: %d\n", cuLinkComplete(state, &image, &bytes) != CUDA_SUCCESS);
  CHECK(cuLinkDestroy(state));
  printf("twice destroyed: %s\n", ErrorName(cuLinkDestroy(state)));
  printf("after its end: %s\n", ErrorName(Add(state, kTwice, "twice.ptx")));
}

// More than one frame holds, both ways.
void Large() {
  std::string text = kTwice;
  for (int i = 0; i < 3000; ++i) {
    text += ".visible .global .align 4 .u32 variable_with_a_long_name_" + std::to_string(i) +
            " = " + std::to_string(i) + ";\n";
  }
  CUlinkState state;
  CHECK(cuLinkCreate(0, nullptr, nullptr, &state));
  CHECK(Add(state, text, "large.ptx"));
  CHECK(Add(state, kUser, "user.ptx"));
  void* image = nullptr;
  size_t bytes = 0;
  CHECK(cuLinkComplete(state, &image, &bytes));
  CUmodule module;
  CHECK(cuModuleLoadData(&module, image));
  CHECK(cuLinkDestroy(state));
  CUdeviceptr address;
  size_t size = 0;
  CHECK(cuModuleGetGlobal(&address, &size, module, "variable_with_a_long_name_2999"));
  uint32_t value = 0;
  CHECK(cuMemcpyDtoH(&value, address, 4));
  printf("the last variable is %u\n", value);
}

}  // namespace

int main() {
  StartWatchdog();
  Gpu gpu;
  Link();
  Library();
  Mistakes();
  Large();
  printf("link: ok\n");
}
