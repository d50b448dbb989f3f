// Managed memory and a managed variable, written and read by host and device in turn.
#include <cstdio>

__managed__ int variable[4] = {1, 2, 3, 4};

__global__ void Step(int* memory) {
  variable[threadIdx.x] *= 10;
  memory[threadIdx.x] += variable[threadIdx.x];
}

int main() {
  variable[1] = 7;  // before the first call of the runtime
  int* memory = nullptr;
  if (cudaMallocManaged(&memory, 4 * sizeof(int)) != cudaSuccess) return 1;
  for (int i = 0; i < 4; ++i) memory[i] = i;
  Step<<<1, 4>>>(memory);
  if (cudaDeviceSynchronize() != cudaSuccess) return 2;
  printf("%d %d %d %d, %d %d\n", variable[0], variable[1], variable[2], variable[3], memory[0],
         memory[3]);
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, variable) != cudaSuccess) return 3;
  if (attributes.type != cudaMemoryTypeManaged) return 4;
  return variable[0] == 10 && variable[1] == 70 && variable[3] == 40 && memory[0] == 10 &&
                 memory[3] == 43
             ? 0
             : 5;
}
