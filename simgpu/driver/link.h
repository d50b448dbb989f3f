// The state between cuLinkCreate and cuLinkDestroy.
#pragma once

#include <string>
#include <vector>

#include "simgpu/driver/module.h"

namespace simgpu {

struct LinkState {
  JitLogs logs;
  std::vector<std::string> texts;
  std::string linked;  // what cuLinkComplete gave out; lives as long as this
};

}  // namespace simgpu
