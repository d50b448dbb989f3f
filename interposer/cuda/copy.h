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
  // Its context, if the program named one: the record and its wire value.
  uint64_t context = 0;
  ContextRecord* owner = nullptr;
};

// call.Stream() has been asked; `stream` is its wire value.
CUresult CopyBetween(Call& call, uint64_t stream, const Place& target, const Place& source,
                     Shape shape, bool asynchronous);

// For functions that name contexts beside addresses; null names none.
bool NamedContext(Call& call, CUcontext context, Place* place);
// cuMemcpyPeer and cuMemcpy3DPeer are in order with all that both contexts have under way, and with
// what comes after them: this before the copy, and a wait for its stream behind it.
CUresult WaitForPeers(Call& call, const Place& target, const Place& source);
// What lies on devices lies at the call's server.
bool AtOneServer(const Call& call, const Place& target, const Place& source);
// The way for those where it does not: copy_across.cc.
CUresult CopyAcross(Call& call, uint64_t stream, const Place& target, const Place& source,
                    const Shape& shape, bool asynchronous);

}  // namespace penstock::interposer
