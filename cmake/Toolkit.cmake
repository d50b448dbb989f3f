# Finds a CUDA 13 toolkit: nvcc and the headers. scripts/setup puts one under .cache/cuda where the
# machine has none. Gives PENSTOCK_NVCC, PENSTOCK_CUDA_ROOT and the target penstock_cuda_headers.
find_program(PENSTOCK_NVCC nvcc
             HINTS ${CMAKE_SOURCE_DIR}/.cache/cuda/bin $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
if(NOT PENSTOCK_NVCC)
  message(FATAL_ERROR "nvcc was not found. Run scripts/setup, or put a CUDA 13 toolkit on the PATH.")
endif()
get_filename_component(nvcc_real ${PENSTOCK_NVCC} REALPATH)
get_filename_component(nvcc_bin ${nvcc_real} DIRECTORY)
get_filename_component(PENSTOCK_CUDA_ROOT ${nvcc_bin} DIRECTORY)
find_path(PENSTOCK_CUDA_INCLUDE cuda.h
          HINTS ${PENSTOCK_CUDA_ROOT}/include ${PENSTOCK_CUDA_ROOT}/targets/x86_64-linux/include
          NO_DEFAULT_PATH REQUIRED)
add_library(penstock_cuda_headers INTERFACE)
target_include_directories(penstock_cuda_headers SYSTEM INTERFACE ${PENSTOCK_CUDA_INCLUDE})
