// The kernels of all test programs, compiled to PTX text that is embedded in each of them.
//
// Several kernels stand before a "door": a word in device memory that the program opens when it has
// seen what it wanted to see. So the tests need no guess about how long anything takes. A kernel
// gives up after `limit` clocks and says so in door[1]: a failed test ends, also on real hardware.

__device__ bool WaitAt(volatile int* door, long long limit) {
  const long long start = clock64();
  while (door[0] == 0) {
    if (clock64() - start > limit) {
      door[1] = 1;
      return false;
    }
  }
  return true;
}

extern "C" __global__ void Hold(int* door, long long limit) {
  WaitAt(door, limit);
}

// For where no other stream may open a door.
extern "C" __global__ void Delay(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
}

// Holds, and only then reads what it was launched on.
extern "C" __global__ void HoldThenCopy(int* door, long long limit, const int* source, int* target,
                                        int count) {
  WaitAt(door, limit);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) target[i] = source[i];
}

// Two of these, each with the other's word, end only if they run at the same time.
extern "C" __global__ void Meet(volatile int* mine, volatile int* other, long long limit) {
  mine[0] = 1;
  __threadfence();
  WaitAt(other, limit);
}

// Repeatable content: element i of pattern `seed`.
__device__ unsigned Pattern(unsigned seed, unsigned i) {
  return (i + seed) * 2654435761u ^ seed;
}

extern "C" __global__ void Fill(unsigned* target, int count, unsigned seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) target[i] = Pattern(seed, i);
}

extern "C" __global__ void CountWrong(const unsigned* source, int count, unsigned seed,
                                      int* wrong) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count && source[i] != Pattern(seed, i)) atomicAdd(wrong, 1);
}

extern "C" __global__ void Add(int* values, int count, int addend) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] += addend;
}

extern "C" __global__ void Increment(int* counter) {
  ++*counter;
}

extern "C" __global__ void Nothing() {}

extern "C" __global__ void Write(int* address, int value) {
  *address = value;
}
