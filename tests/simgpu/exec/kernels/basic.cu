// Kernels of the executor's tests, compiled to PTX when the tests are built. (Names are plain.)
#include <cassert>
#include <cstdio>

extern "C" __global__ void vector_add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

template <int kTile>
__device__ void Multiply(float* c, const float* a, const float* b, int wa, int wb) {
  __shared__ float as[kTile][kTile], bs[kTile][kTile];
  int tx = threadIdx.x, ty = threadIdx.y;
  int begin = wa * kTile * blockIdx.y;
  float sum = 0;
  for (int ai = begin, bi = kTile * blockIdx.x; ai < begin + wa; ai += kTile, bi += kTile * wb) {
    as[ty][tx] = a[ai + wa * ty + tx];
    bs[ty][tx] = b[bi + wb * ty + tx];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += as[ty][k] * bs[k][tx];
    __syncthreads();
  }
  c[wb * kTile * blockIdx.y + kTile * blockIdx.x + wb * ty + tx] = sum;
}
extern "C" __global__ void matmul16(float* c, const float* a, const float* b, int wa, int wb) {
  Multiply<16>(c, a, b, wa, wb);
}
extern "C" __global__ void matmul32(float* c, const float* a, const float* b, int wa, int wb) {
  Multiply<32>(c, a, b, wa, wb);
}

extern "C" __global__ void reduce(const int* in, int* out, int n) {
  __shared__ int part[32];
  int sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    sum += in[i];
  for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
    if (threadIdx.x == 0) atomicAdd(out, sum);
  }
}

extern "C" __global__ void collatz(int* steps, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned long long v = i + 1;
  int count = 0;
  while (v != 1) {
    v = v & 1 ? 3 * v + 1 : v / 2;
    ++count;
  }
  steps[i] = count;
}

extern "C" __global__ void nbody(const float4* in, float4* out, int n) {
  extern __shared__ float4 tile[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float4 me = in[i];
  float ax = 0, ay = 0, az = 0;
  for (int base = 0; base < n; base += blockDim.x) {
    tile[threadIdx.x] = in[base + threadIdx.x];
    __syncthreads();
    for (int k = 0; k < blockDim.x; ++k) {
      float4 p = tile[k];
      float dx = p.x - me.x, dy = p.y - me.y, dz = p.z - me.z;
      float r2 = dx * dx + dy * dy + dz * dz + 0.01f;
      float inv = 1.0f / sqrtf(r2);
      float s = p.w * inv * inv * inv;
      ax += dx * s;
      ay += dy * s;
      az += dz * s;
    }
    __syncthreads();
  }
  out[i] = make_float4(ax, ay, az, me.w);
}

// Calls, recursion, pointers to functions, local arrays, constants, tables, printf, assert.
__device__ __noinline__ int fibonacci(int n) {
  return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}
__device__ __noinline__ int twice(int n) {
  return 2 * n;
}
__device__ __noinline__ int negative(int n) {
  return -n;
}
__device__ int table[4] = {1, 20, 300};
__constant__ float factors[2] = {1.5f, 2.5f};
__device__ const char* names[2] = {"even", "odd"};
struct Mixed {
  char tag;
  double d;
  short s[3];
  int n;
};

extern "C" __global__ void calls(int* out) {
  out[threadIdx.x] = fibonacci(threadIdx.x % 12);
}
extern "C" __global__ void indirect(int* out, int which) {
  int (*f)(int) = (threadIdx.x + which) % 3 == 0   ? fibonacci
                  : (threadIdx.x + which) % 3 == 1 ? twice
                                                   : negative;
  out[threadIdx.x] = f(threadIdx.x % 10);
}
extern "C" __global__ void tables(int* ints, float* floats, Mixed m) {
  ints[threadIdx.x] = table[threadIdx.x % 4] + m.s[threadIdx.x % 3] + m.n + m.tag;
  floats[threadIdx.x] = factors[threadIdx.x % 2] * static_cast<float>(m.d);
}
extern "C" __global__ void local_array(int* out, int n) {
  int a[16];
  for (int i = 0; i < 16; ++i) a[i] = i * threadIdx.x;
  for (int i = 0; i < n; ++i) a[(i * 7) % 16] += a[(i * 3 + threadIdx.x) % 16];
  out[threadIdx.x] = a[n % 16];
}
extern "C" __global__ void print(int n, double d) {
  if (threadIdx.x < 2)
    printf("%s %d|%5u|%-4d|%08.3f|%lld|%c|%x|%%|%e\n", names[threadIdx.x & 1], n + (int)threadIdx.x,
           7u, -3, d, 1234567890123LL, 'x', 255, d);
}
extern "C" __global__ void check(int n) {
  assert(n > (int)threadIdx.x);
}

// Waiting for each other inside a warp: what needs independent thread scheduling.
extern "C" __global__ void warp_lock(int* lock, int* count) {
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  __threadfence();
  *count = *(volatile int*)count + 1;
  __threadfence();
  atomicExch(lock, 0);
}
extern "C" __global__ void warp_lock_inside(int* lock, int* count) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      *count = *(volatile int*)count + 1;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}
extern "C" __global__ void lanes_wait(volatile int* flag, int* out) {
  if (threadIdx.x == 0) {
    while (flag[0] == 0) {
    }
    out[0] = flag[0];
  } else if (threadIdx.x == 1) {
    flag[0] = 42;
  }
  __syncwarp();
  out[threadIdx.x + 1] = out[0];
}
extern "C" __global__ void blocks_wait(volatile int* flags, int* out) {
  // Each block waits for the next one, so the first to start ends last.
  if (threadIdx.x == 0) {
    if (blockIdx.x + 1 < gridDim.x)
      while (flags[blockIdx.x + 1] == 0) {
      }
    __threadfence();
    out[blockIdx.x] = blockIdx.x + 1 < gridDim.x ? out[blockIdx.x + 1] + 1 : 1;
    __threadfence();
    flags[blockIdx.x] = 1;
  }
}
extern "C" __global__ void spin(volatile int* flag) {
  while (flag[0] == 0) {
  }
}
extern "C" __global__ void barrier_loop(int* out, int n) {
  __shared__ int x[256];
  int t = threadIdx.x;
  x[t] = t;
  __syncthreads();
  for (int i = 0; i < n; ++i) {
    int v = x[(t + 1) % blockDim.x];
    __syncthreads();
    x[t] = v + 1;
    __syncthreads();
  }
  int any = __syncthreads_or(t == 5), all = __syncthreads_and(t < 1000),
      count = __syncthreads_count(t % 3 == 0);
  out[t] = x[t] + 1000000 * any + 2000000 * all + 10000 * count;
}
extern "C" __global__ void out_of_bounds(int* p, int index) {
  p[index + threadIdx.x] = 1;
}
extern "C" __global__ void atomics(unsigned* u, int* s, float* f, double* d,
                                   unsigned long long* l) {
  int t = threadIdx.x;
  atomicAdd(&u[0], t);
  atomicMax(&u[1], t * 7 % 64);
  atomicMin(&s[0], 10 - t);
  atomicMax(&s[1], t - 40);
  atomicInc(&u[2], 9);
  atomicDec(&u[3], 4);
  atomicOr(&u[4], 1u << (t % 32));
  atomicAnd(&u[5], ~(1u << (t % 32)));
  atomicXor(&u[6], t);
  atomicAdd(&f[0], 0.5f);
  atomicAdd(&d[0], 0.25);
  atomicAdd(&l[0], 1ull << 32);
  __shared__ unsigned h[4];
  if (t < 4) h[t] = 0;
  __syncthreads();
  atomicAdd(&h[t % 4], t);
  __syncthreads();
  if (t < 4) u[8 + t] = h[t];
}
