// Stands in for simgpu/exec where that is not built: memory, streams and events work, modules are
// refused.
#include "simgpu/exec/executor.h"

namespace simgpu {

std::unique_ptr<Program> Program::Load(std::string_view, MemoryMap&, LoadError* error) {
  *error = {LoadError::Kind::kUnsupported, "This build of simgpu has no PTX executor."};
  return nullptr;
}

Kernel* Program::FindKernel(std::string_view) const { return nullptr; }

const Variable* Program::FindVariable(std::string_view) const { return nullptr; }

}  // namespace simgpu
