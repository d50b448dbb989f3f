// The driver API with PTX text in the program: no runtime, no nvcc-made kernel. The driver compiles
// the text; the program finds a kernel and a global variable in it by name.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                         \
  do {                                                                                      \
    const CUresult check_result = (call);                                                   \
    if (check_result != CUDA_SUCCESS) {                                                     \
      const char* check_text = "unknown error";                                             \
      cuGetErrorString(check_result, &check_text);                                          \
      fprintf(stderr, "%s:%d: %s fails: %s (%d).\n", __FILE__, __LINE__, #call, check_text, \
              static_cast<int>(check_result));                                              \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

// y[i] = factor * x[i] + y[i] for i < n.
static const char kSaxpy[] = R"(
.version 7.0
.target sm_75
.address_size 64

.visible .global .align 4 .f32 factor = 0f3F800000;

.visible .entry saxpy(
    .param .u64 x_param,
    .param .u64 y_param,
    .param .u32 n_param
)
{
    .reg .pred  %p<2>;
    .reg .f32   %f<5>;
    .reg .b32   %r<6>;
    .reg .b64   %rd<8>;

    ld.param.u64  %rd1, [x_param];
    ld.param.u64  %rd2, [y_param];
    ld.param.u32  %r1, [n_param];
    mov.u32       %r2, %ctaid.x;
    mov.u32       %r3, %ntid.x;
    mov.u32       %r4, %tid.x;
    mad.lo.s32    %r5, %r2, %r3, %r4;
    setp.ge.s32   %p1, %r5, %r1;
    @%p1 bra      $done;

    cvta.to.global.u64  %rd3, %rd1;
    cvta.to.global.u64  %rd4, %rd2;
    mul.wide.s32  %rd5, %r5, 4;
    add.s64       %rd6, %rd3, %rd5;
    add.s64       %rd7, %rd4, %rd5;
    ld.global.f32 %f1, [factor];
    ld.global.f32 %f2, [%rd6];
    ld.global.f32 %f3, [%rd7];
    fma.rn.f32    %f4, %f1, %f2, %f3;
    st.global.f32 [%rd7], %f4;
$done:
    ret;
}
)";

int main() {
  CHECK(cuInit(0));
  CUdevice device;
  CUcontext context;
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuCtxCreate(&context, nullptr, 0, device));

  CUmodule module;
  CUfunction saxpy;
  CUdeviceptr factor;
  size_t factor_bytes = 0;
  CHECK(cuModuleLoadData(&module, kSaxpy));
  CHECK(cuModuleGetFunction(&saxpy, module, "saxpy"));
  CHECK(cuModuleGetGlobal(&factor, &factor_bytes, module, "factor"));
  if (factor_bytes != sizeof(float)) {
    fprintf(stderr, "The variable has (%zu) bytes instead of (4).\n", factor_bytes);
    return 1;
  }
  CUfunction missing;
  if (cuModuleGetFunction(&missing, module, "no_such_kernel") != CUDA_ERROR_NOT_FOUND) {
    fprintf(stderr, "A kernel that does not exist is found.\n");
    return 1;
  }

  const int n = 100'000;
  std::vector<float> x(n), y(n);
  for (int i = 0; i < n; ++i) {
    x[i] = static_cast<float>(i % 1000);
    y[i] = static_cast<float>(i % 77);
  }
  CUdeviceptr device_x, device_y;
  CHECK(cuMemAlloc(&device_x, n * sizeof(float)));
  CHECK(cuMemAlloc(&device_y, n * sizeof(float)));
  CHECK(cuMemcpyHtoD(device_x, x.data(), n * sizeof(float)));
  CHECK(cuMemcpyHtoD(device_y, y.data(), n * sizeof(float)));

  // Once with the factor of the PTX text (1), once with one written by the host (3).
  int count = n;
  void* parameters[] = {&device_x, &device_y, &count};
  const unsigned block = 128, grid = (n + block - 1) / block;
  CHECK(cuLaunchKernel(saxpy, grid, 1, 1, block, 1, 1, 0, nullptr, parameters, nullptr));
  const float three = 3.0f;
  CHECK(cuMemcpyHtoD(factor, &three, sizeof(three)));
  CHECK(cuLaunchKernel(saxpy, grid, 1, 1, block, 1, 1, 0, nullptr, parameters, nullptr));
  CHECK(cuCtxSynchronize());

  std::vector<float> result(n);
  CHECK(cuMemcpyDtoH(result.data(), device_y, n * sizeof(float)));
  double total = 0;
  for (int i = 0; i < n; ++i) {
    const float expected = 4.0f * x[i] + y[i];
    if (result[i] != expected) {
      fprintf(stderr, "Element (%d) is (%g) instead of (%g).\n", i, result[i], expected);
      return 1;
    }
    total += result[i];
  }
  CHECK(cuMemFree(device_x));
  CHECK(cuMemFree(device_y));
  CHECK(cuModuleUnload(module));
  CHECK(cuCtxDestroy(context));
  printf("driver_api_ptx: %d elements, total %.0f, ok\n", n, total);
  return 0;
}
