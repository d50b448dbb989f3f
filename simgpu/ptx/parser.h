// Reads PTX text. ParseModule finds the variables and functions and the extent of each body;
// ParseBody reads one body. They are apart because a library's PTX holds thousands of kernels of
// which a program runs a few.
#pragma once

#include <string>
#include <string_view>

#include "simgpu/ptx/module.h"

namespace simgpu::ptx {

struct ParseError {
  int line = 0;
  std::string message;  // a sentence without the line
};

bool ParseModule(std::string_view text, Module* module, ParseError* error);
bool ParseBody(Function* function, ParseError* error);

}  // namespace simgpu::ptx
