// What the driver API programs of the end-to-end tests share: one context and one small kernel.
#pragma once

#include <cuda.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                      \
  do {                                                                                   \
    const CUresult check_result = (call);                                                \
    if (check_result != CUDA_SUCCESS) {                                                  \
      const char* check_name = "an unknown error";                                       \
      cuGetErrorName(check_result, &check_name);                                         \
      fprintf(stderr, "%s:%d: %s returns %s.\n", __FILE__, __LINE__, #call, check_name); \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

// data[i] += value for i < count.
inline constexpr char kAddPtx[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 data_param, .param .u32 count_param, .param .u32 value_param)
{
    .reg .pred %p<2>;
    .reg .b32  %r<9>;
    .reg .b64  %rd<5>;
    ld.param.u64 %rd1, [data_param];
    ld.param.u32 %r1, [count_param];
    ld.param.u32 %r2, [value_param];
    mov.u32      %r3, %ctaid.x;
    mov.u32      %r4, %ntid.x;
    mov.u32      %r5, %tid.x;
    mad.lo.s32   %r6, %r3, %r4, %r5;
    setp.ge.s32  %p1, %r6, %r1;
    @%p1 bra     $done;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.s32 %rd3, %r6, 4;
    add.s64      %rd4, %rd2, %rd3;
    ld.global.u32 %r7, [%rd4];
    add.s32      %r8, %r7, %r2;
    st.global.u32 [%rd4], %r8;
$done:
    ret;
}
)";

class AddProgram {
 public:
  AddProgram() {
    CHECK(cuInit(0));
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate(&context_, nullptr, 0, device));
    CHECK(cuModuleLoadData(&module_, kAddPtx));
    CHECK(cuModuleGetFunction(&add_, module_, "add"));
  }

  CUresult Add(CUdeviceptr data, unsigned count, unsigned value, CUstream stream = nullptr) {
    void* parameters[] = {&data, &count, &value};
    return cuLaunchKernel(add_, (count + 127) / 128, 1, 1, 128, 1, 1, 0, stream, parameters,
                          nullptr);
  }

 private:
  CUcontext context_;
  CUmodule module_;
  CUfunction add_;
};
