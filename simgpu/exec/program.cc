#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "simgpu/exec/decode.h"
#include "simgpu/exec/engine.h"
#include "simgpu/exec/executor.h"
#include "simgpu/ptx/parser.h"

namespace simgpu {
namespace {

using exec::DecodeError;
using exec::KernelImage;
using exec::LaunchEngine;

// Bodies are read at once in a text up to this size, so that an error in one is found when the
// module is loaded, as the driver does; a library's text is larger and read kernel by kernel.
constexpr size_t kEagerBytes = 4u << 20;

std::string AtLine(int line, const std::string& message) {
  return "PTX line (" + std::to_string(line) + "): " + message;
}

class ProgramImpl;

class KernelImpl : public Kernel {
 public:
  KernelImpl(ProgramImpl* program, int32_t index) : program_(program), index_(index) {}
  const KernelInfo& info() const override;
  LaunchResult Launch(const LaunchRequest& request) override;
  int32_t index() const { return index_; }

 private:
  friend class ProgramImpl;
  void Prepare() const;  // under the program's mutex

  ProgramImpl* program_;
  int32_t index_;
  mutable std::once_flag prepared_, decoded_;
  mutable KernelInfo info_;
  mutable KernelImage image_;
  mutable DecodeError error_;  // why the kernel cannot run
};

class ProgramImpl : public Program {
 public:
  explicit ProgramImpl(MemoryMap& memory) : memory_(memory) {}
  ~ProgramImpl() override {
    for (uint64_t address : addresses_)
      if (address) memory_.FreeVariable(address);
  }
  bool Load(std::string_view ptx, LoadError* error);
  const std::vector<Kernel*>& kernels() const override { return kernel_pointers_; }
  const std::vector<Variable>& variables() const override { return variables_; }
  // Does not prepare the kernels that it passes, as their info() would.
  Kernel* Find(std::string_view name) const {
    for (const auto& kernel : kernels_)
      if (module_.functions[static_cast<size_t>(kernel->index())].name == name) return kernel.get();
    return nullptr;
  }

 private:
  friend class KernelImpl;
  bool PlaceVariables(LoadError* error);
  bool Initialize(const ptx::Variable& variable, uint64_t address, LoadError* error);
  bool CheckBodies(LoadError* error);

  MemoryMap& memory_;
  std::string text_;
  ptx::Module module_;
  exec::VariableAddresses addresses_;
  std::vector<Variable> variables_;
  std::vector<std::unique_ptr<KernelImpl>> kernels_;
  std::vector<Kernel*> kernel_pointers_;
  std::mutex mutex_;  // bodies are parsed in module_
};

bool ProgramImpl::Load(std::string_view ptx, LoadError* error) {
  text_ = std::string(ptx);
  ptx::ParseError parse_error;
  if (!ptx::ParseModule(text_, &module_, &parse_error)) {
    *error = {LoadError::Kind::kInvalidPtx, AtLine(parse_error.line, parse_error.message)};
    return false;
  }
  if (text_.size() <= kEagerBytes && !CheckBodies(error)) return false;
  if (!PlaceVariables(error)) return false;
  for (size_t f = 0; f < module_.functions.size(); ++f) {
    if (!module_.functions[f].entry || !module_.functions[f].has_body) continue;
    kernels_.push_back(std::make_unique<KernelImpl>(this, static_cast<int32_t>(f)));
    kernel_pointers_.push_back(kernels_.back().get());
  }
  return true;
}

bool ProgramImpl::CheckBodies(LoadError* error) {
  for (ptx::Function& function : module_.functions) {
    if (!function.has_body) continue;
    ptx::ParseError parse_error;
    if (!ptx::ParseBody(&function, &parse_error)) {
      *error = {LoadError::Kind::kInvalidPtx, AtLine(parse_error.line, parse_error.message)};
      return false;
    }
    for (const ptx::Statement& statement : function.statements) {
      if (statement.mnemonic.substr(0, 4) != "call") continue;
      for (const ptx::Operand& operand : statement.operands) {
        if (operand.kind != ptx::Operand::Kind::kSymbol) continue;
        auto at = module_.function_index.find(operand.name);
        if (at == module_.function_index.end()) continue;
        const ptx::Function& callee = module_.functions[static_cast<size_t>(at->second)];
        if (callee.has_body || exec::BuiltinByName(callee.name) != exec::Builtin::kNone) continue;
        *error = {LoadError::Kind::kUnresolvedSymbol,
                  AtLine(statement.line,
                         "The function (" + std::string(callee.name) + ") is not defined.")};
        return false;
      }
    }
  }
  return true;
}

bool ProgramImpl::PlaceVariables(LoadError* error) {
  addresses_.assign(module_.variables.size(), 0);
  for (size_t v = 0; v < module_.variables.size(); ++v) {
    const ptx::Variable& variable = module_.variables[v];
    if (variable.space == ptx::Space::kShared) continue;
    if (variable.external) {
      *error = {LoadError::Kind::kUnresolvedSymbol,
                AtLine(variable.line,
                       "The variable (" + std::string(variable.name) + ") is not defined.")};
      return false;
    }
    uint64_t bytes = std::max<uint64_t>(variable.bytes, 1);
    bool constant = variable.space == ptx::Space::kConst;
    addresses_[v] = memory_.AllocateVariable(bytes, std::max(variable.alignment, 16u), constant);
    if (addresses_[v] == 0) {
      *error = {LoadError::Kind::kOutOfMemory, "There is no device memory for the variable (" +
                                                   std::string(variable.name) + ") of size (" +
                                                   std::to_string(bytes) + ")."};
      return false;
    }
    variables_.push_back(
        {std::string(variable.name), addresses_[v], variable.bytes, constant, variable.managed});
  }
  // All addresses are known now; an initializer may name any variable.
  for (size_t v = 0; v < module_.variables.size(); ++v)
    if (addresses_[v] && !Initialize(module_.variables[v], addresses_[v], error)) return false;
  return true;
}

bool ProgramImpl::Initialize(const ptx::Variable& variable, uint64_t address, LoadError* error) {
  auto* out = reinterpret_cast<std::byte*>(address);
  auto fail = [&](const std::string& what) {
    *error = {LoadError::Kind::kInvalidPtx,
              AtLine(variable.line,
                     "The initializer of (" + std::string(variable.name) + ") " + what + ".")};
    return false;
  };
  size_t size = variable.type.bytes;
  for (size_t k = 0; k < variable.initializer.size(); ++k) {
    const ptx::Initializer& item = variable.initializer[k];
    uint64_t bits = item.bits;
    switch (item.kind) {
      case ptx::Initializer::Kind::kInteger:
        if (variable.type.kind == 'f') return fail("has an integer for a float");
        break;
      case ptx::Initializer::Kind::kF32:
        if (size == 8) {
          float value;
          uint32_t narrow = static_cast<uint32_t>(bits);
          memcpy(&value, &narrow, 4);
          double wide = value;
          memcpy(&bits, &wide, 8);
        } else if (size != 4) {
          return fail("has a float of the wrong width");
        }
        break;
      case ptx::Initializer::Kind::kF64:
        if (size == 4) {
          double value;
          memcpy(&value, &bits, 8);
          float narrow = static_cast<float>(value);
          uint32_t narrow_bits;
          memcpy(&narrow_bits, &narrow, 4);
          bits = narrow_bits;
        } else if (size != 8) {
          return fail("has a float of the wrong width");
        }
        break;
      case ptx::Initializer::Kind::kSymbol: {
        if (size != 8) return fail("has an address in less than 8 bytes");
        if (auto at = module_.variable_index.find(item.symbol);
            at != module_.variable_index.end()) {
          if (addresses_[static_cast<size_t>(at->second)] == 0)
            return fail("names the shared variable (" + std::string(item.symbol) + ")");
          bits += addresses_[static_cast<size_t>(at->second)];
        } else if (auto fn = module_.function_index.find(item.symbol);
                   fn != module_.function_index.end()) {
          bits += exec::FunctionHandle(fn->second);
        } else {
          return fail("names what is not declared (" + std::string(item.symbol) + ")");
        }
        break;
      }
    }
    memcpy(out + k * size, &bits, std::min<size_t>(size, 8));
    if (size > 8) memset(out + k * size + 8, 0, size - 8);
  }
  return true;
}

void KernelImpl::Prepare() const {
  std::call_once(prepared_, [this] {
    std::lock_guard<std::mutex> lock(program_->mutex_);
    const ptx::Function& function = program_->module_.functions[static_cast<size_t>(index_)];
    info_.name = std::string(function.name);
    info_.ptx_version = program_->module_.version;
    info_.target = program_->module_.target;
    uint32_t offset = 0;
    for (int32_t v : function.parameters) {
      const ptx::Variable& variable = function.variables[static_cast<size_t>(v)];
      offset = (offset + variable.alignment - 1) & ~(variable.alignment - 1);
      info_.parameters.push_back({offset, static_cast<uint32_t>(variable.bytes)});
      offset += static_cast<uint32_t>(variable.bytes);
    }
    info_.parameter_bytes = offset;
    auto product = [](const uint32_t* d) {
      uint64_t p = uint64_t{d[0]} * d[1] * d[2];
      return static_cast<uint32_t>(std::min<uint64_t>(p, 1024));
    };
    if (function.max_threads[0]) info_.max_threads = product(function.max_threads);
    if (function.required_threads[0]) {
      info_.max_threads = product(function.required_threads);
      std::copy(function.required_threads, function.required_threads + 3, info_.required_threads);
    }
    for (const ptx::Variable& variable : program_->module_.variables)
      if (variable.space == ptx::Space::kConst)
        info_.constant_bytes += static_cast<uint32_t>(variable.bytes);
    exec::PrepareImage(&program_->module_, index_, &image_, &error_);
    info_.static_shared_bytes = image_.static_shared_bytes;
    info_.local_bytes = image_.local_bytes;
    // Registers are renamed freely in PTX; this only has to be plausible, and at most 64 so that a
    // block of 1,024 threads fits.
    info_.registers =
        static_cast<uint32_t>(std::min<size_t>(64, 16 + function.registers.size() / 8));
  });
}

const KernelInfo& KernelImpl::info() const {
  Prepare();
  return info_;
}

LaunchResult KernelImpl::Launch(const LaunchRequest& request) {
  Prepare();
  std::call_once(decoded_, [this] {
    if (error_.message.empty())
      exec::DecodeImage(program_->module_, program_->addresses_, exec::BestHandlers(), &image_,
                        &error_);
  });
  if (!error_.message.empty())
    return {Fault::kIllegalInstruction,
            "Kernel (" + info_.name + "), " + AtLine(error_.line, error_.message)};
  // A block takes host memory for its registers, shared and local memory. Where there is none, the
  // launch ends; everything that it had is freed on the way.
  try {
    return LaunchEngine(image_, info_, program_->module_, program_->memory_, request).Run();
  } catch (const std::bad_alloc&) {
    return {Fault::kOutOfMemory,
            "Kernel (" + info_.name + "): the host has no memory for another block of it."};
  }
}

}  // namespace

std::unique_ptr<Program> Program::Load(std::string_view ptx, MemoryMap& memory, LoadError* error) {
  auto program = std::make_unique<ProgramImpl>(memory);
  LoadError ignored;
  if (!program->Load(ptx, error ? error : &ignored)) return nullptr;
  return program;
}

Kernel* Program::FindKernel(std::string_view name) const {
  return static_cast<const ProgramImpl*>(this)->Find(name);
}

const Variable* Program::FindVariable(std::string_view name) const {
  for (const Variable& variable : variables())
    if (variable.name == name) return &variable;
  return nullptr;
}

}  // namespace simgpu
