// Warp-wide, block-wide and grid-wide cooperation.
#include <cooperative_groups.h>
#include <cuda_fp16.h>
namespace cg = cooperative_groups;

extern "C" __global__ void shuffles(const int* in, int* out) {
  int t = threadIdx.x, v = in[t];
  out[t] = __shfl_sync(~0u, v, (t * 5 + 3) % 32);
  out[32 + t] = __shfl_up_sync(~0u, v, 3);
  out[64 + t] = __shfl_down_sync(~0u, v, 5);
  out[96 + t] = __shfl_xor_sync(~0u, v, 9);
  out[128 + t] = __shfl_sync(~0u, v, t + 1, 8);
  out[160 + t] = __shfl_up_sync(~0u, v, 2, 8);
  out[192 + t] = __shfl_down_sync(~0u, v, 2, 16);
  out[224 + t] = __shfl_xor_sync(~0u, v, 4, 8);
  out[256 + t] = (int)__shfl_down_sync(~0u, (double)v, 1);
}
extern "C" __global__ void votes(const int* in, unsigned* out) {
  int t = threadIdx.x, v = in[t];
  out[t] = __ballot_sync(~0u, v & 1);
  out[32 + t] = __any_sync(~0u, v == in[7]);
  out[64 + t] = __all_sync(~0u, v >= 0);
  out[96 + t] = __match_any_sync(~0u, v % 5);
  int same;
  out[128 + t] = __match_all_sync(~0u, v / 1000, &same);
  out[160 + t] = same;
  out[192 + t] = __activemask();
  if (t % 4 == 1) out[224 + t] = __ballot_sync(0x22222222u, v & 2);
}
extern "C" __global__ void tiles(const int* in, int* out) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  int v = in[threadIdx.x];
  for (int d = 4; d; d /= 2) v += tile.shfl_down(v, d);
  v = tile.shfl(v, 0);
  tile.sync();
  out[threadIdx.x] = v + 1000 * tile.thread_rank();
  auto active = cg::coalesced_threads();
  if (threadIdx.x % 3 == 0) {
    auto few = cg::coalesced_threads();
    out[threadIdx.x + 64] = few.size() * 100 + few.thread_rank();
    out[threadIdx.x + 64] += 10000 * few.shfl(threadIdx.x, 1);
  } else {
    out[threadIdx.x + 64] = active.size();
  }
}
extern "C" __global__ void grid_barrier(int* data, int rounds) {
  auto grid = cg::this_grid();
  int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int r = 0; r < rounds; ++r) {
    int v = data[r * n + (i + 1) % n];
    grid.sync();
    data[(r + 1) * n + i] = v + 1;
    grid.sync();
  }
}
extern "C" __global__ void ring(int* out, int n) {
  // Two warps pass a value through shared memory with named barriers.
  __shared__ int box;
  int warp = threadIdx.x / 32;
  int sum = 0;
  for (int i = 0; i < n; ++i) {
    if (warp == 0) {
      if (threadIdx.x == 0) box = i * i;
      asm volatile("bar.arrive 1, 64;" ::: "memory");
      asm volatile("bar.sync 2, 64;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 64;" ::: "memory");
      sum += box;
      asm volatile("bar.arrive 2, 64;" ::: "memory");
    }
  }
  out[threadIdx.x] = sum;
}
extern "C" __global__ void early_exit(int* out) {
  __shared__ int x[128];
  if (threadIdx.x % 7 == 3) return;
  x[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (threadIdx.x % 5 == 0) {
    out[threadIdx.x] = -1;
    return;
  }
  __syncwarp();
  int next = (threadIdx.x + 1) % 128;
  out[threadIdx.x] = next % 7 == 3 ? 0 : x[next];
}
__device__ __noinline__ int search(const int* p, int n, int key) {
  for (int i = 0; i < n; ++i) {
    if (p[i] == key) return i;
    if (p[i] < 0) return -2;
  }
  return -1;
}
extern "C" __global__ void returns(const int* p, int n, int* out) {
  int r = search(p, n, threadIdx.x);
  out[threadIdx.x] = r >= 0 ? search(p, n, r) + 100 * r : r;
}
extern "C" __global__ void nested(int* out) {
  int t = threadIdx.x, v = 0;
  for (int i = 0; i <= t % 5; ++i) {
    for (int j = 0; j < (t + i) % 4; ++j) {
      if ((i + j) % 3 == 0) continue;
      if (j == 3) break;
      v += i * 10 + j;
      switch ((t + j) % 6) {
        case 0:
          v ^= 1;
          break;
        case 1:
          v += 7;  // falls through
        case 2:
          v *= 3;
          break;
        case 4:
          goto out;
        default:
          v -= 2;
      }
    }
  }
out:
  out[t] = v;
}
extern "C" __global__ void timer(unsigned long long* out) {
  unsigned long long a = clock64(), g;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(g));
  __nanosleep(100);
  long long c = clock64();
  while (clock64() - c < 20000) {
  }
  out[0] = clock64() - a;
  out[1] = g;
}
extern "C" __global__ void heap_order(int* lock, int* out) {
  // A lock per warp in shared memory, taken by all lanes.
  __shared__ int l;
  __shared__ int order;
  if (threadIdx.x == 0) l = 0, order = 0;
  __syncthreads();
  bool done = false;
  while (!done) {
    if (atomicExch(&l, 1) == 0) {
      out[threadIdx.x] = order;
      order = order + 1;
      __threadfence_block();
      atomicExch(&l, 0);
      done = true;
    }
  }
}
