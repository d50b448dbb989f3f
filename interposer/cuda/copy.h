// Copies between any two places, as the functions for rows, volumes and batches share them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "interposer/core/call.h"
#include "interposer/cuda/rows.h"

namespace penstock::interposer {

// One side of a copy. The address tells whether it lies on the device or in the program's memory.
struct Place {
  uint64_t address = 0;
  uint64_t pitch = 0;
  uint64_t slice_rows = 0;
  uint64_t context = 0;  // wire value of its context, if the program named one
};

// call.Stream() has been asked; `stream` is its wire value.
CUresult CopyBetween(Call& call, uint64_t stream, const Place& target, const Place& source,
                     Shape shape, bool asynchronous);

}  // namespace penstock::interposer
