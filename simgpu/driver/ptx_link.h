// Reading PTX at the level of modules: which kernels a text has, and joining several texts into
// one.
//
// Programs built with -rdc=true hold one relocatable PTX text per translation unit. The real driver
// links their machine code; here the texts are joined before they are parsed: declarations whose
// definition stands in another text go away, the first of several weak definitions wins, and names
// that are local to a text are made different from those of the others.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace simgpu {

// The names of all .entry definitions, in order of appearance.
std::vector<std::string> KernelNames(std::string_view ptx);

// The device runtime that nvcc adds to -rdc programs.
bool IsDeviceRuntime(std::string_view ptx);

// False with a sentence in *error if a name is defined twice. One text comes back as it is. The
// device runtime is left out if nothing refers to it.
bool LinkPtx(const std::vector<std::string>& texts, std::string* linked, std::string* error);

}  // namespace simgpu
