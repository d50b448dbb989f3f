# Finds a CUDA 13 toolkit: nvcc and the headers. scripts/setup puts one under .cache/cuda where the
# machine has none. Gives PENSTOCK_NVCC, PENSTOCK_CUDA_ROOT and the target penstock_cuda_headers.

# An older toolkit is passed over, as scripts/setup does.
function(penstock_is_cuda_13 accepted nvcc)
  file(REAL_PATH ${nvcc} nvcc)
  cmake_path(GET nvcc PARENT_PATH folder)
  cmake_path(GET folder PARENT_PATH root)
  set(version)
  if(EXISTS ${root}/include/cuda.h)
    file(STRINGS ${root}/include/cuda.h version REGEX "^#define CUDA_VERSION 13[0-9][0-9][0-9]")
  endif()
  if(NOT version)
    set(${accepted} FALSE PARENT_SCOPE)
  endif()
endfunction()

find_program(PENSTOCK_NVCC nvcc
             HINTS ${CMAKE_SOURCE_DIR}/.cache/cuda/bin $ENV{CUDA_HOME}/bin
             PATHS /usr/local/cuda/bin VALIDATOR penstock_is_cuda_13)
if(NOT PENSTOCK_NVCC)
  message(FATAL_ERROR "No nvcc of CUDA 13 was found. Run scripts/setup, or put one on the PATH.")
endif()
get_filename_component(nvcc_real ${PENSTOCK_NVCC} REALPATH)
get_filename_component(nvcc_bin ${nvcc_real} DIRECTORY)
get_filename_component(PENSTOCK_CUDA_ROOT ${nvcc_bin} DIRECTORY)
find_path(PENSTOCK_CUDA_INCLUDE cuda.h
          HINTS ${PENSTOCK_CUDA_ROOT}/include ${PENSTOCK_CUDA_ROOT}/targets/x86_64-linux/include
          NO_DEFAULT_PATH REQUIRED)
add_library(penstock_cuda_headers INTERFACE)
target_include_directories(penstock_cuda_headers SYSTEM INTERFACE ${PENSTOCK_CUDA_INCLUDE})
