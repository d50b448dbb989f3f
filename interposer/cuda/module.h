// What modules and libraries have in common: module.cc.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "interposer/core/call.h"
#include "interposer/core/objects.h"
#include "interposer/cuda/image.h"

namespace penstock::interposer {

// The program's JIT options: numbers go to the server as they are, log buffers stay here and are
// filled from the reply.
struct LoadOptions {
  std::vector<JitOption> scalars;
  char* info_log = nullptr;
  char* error_log = nullptr;
  uint32_t info_bytes = 0, error_bytes = 0;
  // Where the program wants to read how much was written.
  void** info_used = nullptr;
  void** error_used = nullptr;
};

// Each of these records the call's error and returns false or null on failure.
bool ReadJitOptions(Call& call, unsigned count, CUjit_option* options, void** values,
                    LoadOptions* result);
bool Measure(Call& call, const void* program_image, Image* image);
// Loads into a fresh record at the call's server.
ModuleRecord* Load(Call& call, ModuleKind kind, const Image& image, const LoadOptions& options);
// A command that begins with a LoadModuleCommand, whose counts are filled in; `bytes` is all of it.
struct CodeCommand {
  Operation operation;
  LoadModuleCommand* load;
  size_t bytes;
  std::string_view name;  // behind the options; of links
};
CUresult SendCode(Call& call, const CodeCommand& sent, const Image& image,
                  const LoadOptions& options);
// Writes what a reply brought into the program's log buffers.
void GiveLogs(const LoadOptions& options, const LoadModuleReply& reply,
              std::span<const std::byte> logs);
// The file is one of this machine; with a NUL behind it, in case it is PTX.
bool ReadFile(Call& call, const char* path, std::vector<char>* content);
// The length of a name that the caller gave.
bool NameOf(Call& call, const char* name, std::string_view* text);
// The function of this name, asked for once per owner.
FunctionRecord* FindFunction(Call& call, ModuleRecord& owner, RecordTable<FunctionRecord>& table,
                             std::string_view name);
// All functions of a module or library, `most` at most.
CUresult ListFunctions(Call& call, ModuleRecord& owner, RecordTable<FunctionRecord>& table,
                       size_t most, std::vector<Handle>* functions);
// The same of a module that the program names, as a call of its own.
CUresult FunctionsOf(CUmodule module, size_t most, std::vector<Handle>* functions);
// The variable of this name in the call's context.
CUresult FindGlobal(Call& call, ModuleRecord& owner, std::string_view name, bool library,
                    CUdeviceptr* address, size_t* bytes);
void ForgetContents(Call& call, ModuleRecord& owner, RecordTable<FunctionRecord>& functions);

}  // namespace penstock::interposer
