// Instructions that look across the lanes of a warp. Operands: a the value, e the member mask (a
// slot, for each lane may name its own group), g the second destination.
#pragma once

#include <string_view>

#include "simgpu/exec/inst.h"

namespace simgpu::exec {

Handler ShuffleHandler(std::string_view mode);  // up down bfly idx
Handler VoteHandler(std::string_view mode);     // any all uni ballot
Handler MatchHandler(bool all, bool wide);
Handler ReduxHandler(std::string_view operation, std::string_view type);
void WarpSync(Context& c, const Inst& i, uint32_t mask);  // b: member mask
void ActiveMask(Context& c, const Inst& i, uint32_t mask);

}  // namespace simgpu::exec
