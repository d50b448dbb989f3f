// The device attributes. Values that programs size their work by follow the compute capability;
// rates are small honest numbers; everything that simgpu does not do is 0.
#include "simgpu/driver/device.h"

namespace simgpu {

bool DeviceAttribute(const Device& device, CUdevice_attribute attribute, int* value) {
  if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return false;
  *value = [&]() -> int {
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return kMaxThreadsPerBlock;
      case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        return kMaxBlockDim[0];
      case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        return kMaxBlockDim[1];
      case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return kMaxBlockDim[2];
      case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        return static_cast<int>(kMaxGridDim[0]);
      case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        return static_cast<int>(kMaxGridDim[1]);
      case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        return static_cast<int>(kMaxGridDim[2]);
      case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return kSharedPerBlock;
      case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return device.limits.shared_per_block_max;
      case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return device.limits.shared_per_sm;
      case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
        return device.limits.shared_reserved;
      case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
        return 65536;
      case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
      case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        return 2147483647;
      case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        return kRegistersPerSm;
      case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        return kRegistersPerSm;
      // Clocks count nanoseconds, so that a program which spins for N cycles spins for N/rate.
      case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        return 1000000;
      case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        return 1000000;
      case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        return 64;
      case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        return 4 << 20;
      case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
        return 512;
      case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT:
        return 32;
      case CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT:
        return 512;
      case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
        return 1;
      case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 2;
      case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        return 1;
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return kMultiprocessors;
      case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return device.limits.threads_per_sm;
      case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        return device.limits.blocks_per_sm;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return device.cc_major;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return device.cc_minor;
      case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        return device.pci_domain;
      case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return device.pci_bus;
      case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        return device.pci_device;
      case CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID:
        return device.physical_ordinal;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        return CU_COMPUTEMODE_DEFAULT;
      case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        return 1;
      case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        return 1;
      case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        return 1;
      case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
        return 1;
      case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
        return 1;
      case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        return 1;
      case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        return 1;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
        return 1;
      case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        return 1;
      case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        return 1;
      case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
        return 1;
      case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        return 1;
      case CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO:
        return 2;
      case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        return 1;
      case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
        return 1;
      case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1:
        return 1;
      case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1:
        return 1;
      case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
        return 1;
      case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
        return 1;
      case CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT:
        return 1;
      case CU_DEVICE_ATTRIBUTE_NUMA_ID:
        return -1;
      case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
        return -1;
      case CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID:
        return 0x000110de;  // no real device's
      case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
        return device.gpu_direct ? 1 : 0;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
        return device.gpu_direct ? CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST : 0;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
        return device.gpu_direct ? device.writes_ordering : 0;
      case CU_DEVICE_ATTRIBUTE_CAN_TEX2D_GATHER:
        return 1;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH:
        return 131072;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH:
        return 131072;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT:
        return 65536;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH:
        return 16384;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE:
        return 8192;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE:
        return 32768;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT:
        return 32768;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS:
        return 2048;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS:
        return 2046;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH:
        return 131072;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT:
        return 65536;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT:
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH:
        return 16384;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH:
        return 1 << 27;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH:
        return 131072;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT:
        return 65000;
      case CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH:
        return 2097120;
      default:
        return 0;
    }
  }();
  return true;
}

}  // namespace simgpu
