// From a parsed function to instructions that run.
//
// Most instructions are looked up in the table of rows (inst.h) by their whole mnemonic; those
// whose operands need more (memory, moves, control flow, calls, warp-wide operations) have a method
// each. What neither knows is refused here, by name and line, before anything has run.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "simgpu/exec/code.h"

namespace simgpu::exec {

struct DecodeError {
  int line = 0;
  std::string message;
};

// The addresses of the module's variables in device memory, by their index.
using VariableAddresses = std::vector<uint64_t>;

// Parses the bodies a kernel reaches and lays out its shared and local memory: all that is reported
// of a kernel. False if a body is malformed.
bool PrepareImage(ptx::Module* module, int32_t entry, KernelImage* image, DecodeError* error);

// Makes the instructions, after PrepareImage.
bool DecodeImage(const ptx::Module& module, const VariableAddresses& addresses,
                 const HandlerSet& handlers, KernelImage* image, DecodeError* error);

// Does the name belong to a function that the simulator itself provides?
Builtin BuiltinByName(std::string_view name);

// Finds a row by mnemonic. The table is built once.
using RowTable = std::unordered_map<std::string, const Row*>;
const RowTable& RowsOf(const HandlerSet& handlers);
uint32_t ModifierFlags(std::string_view mnemonic);

// For each guarded branch, the index of the instruction where its sides meet.
void FindJoins(Code* code);

}  // namespace simgpu::exec
