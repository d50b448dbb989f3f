// The functions that the driver provides to kernels: vprintf, __assertfail, malloc, free.
#pragma once

#include "simgpu/exec/code.h"
#include "simgpu/exec/context.h"

namespace simgpu::exec {

void RunBuiltin(Context& c, const Inst& i, uint32_t mask, const CallSite& site);

}  // namespace simgpu::exec
