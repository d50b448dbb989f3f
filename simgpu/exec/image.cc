// What a kernel reaches, and the layout of its shared and local memory.
#include <algorithm>

#include "simgpu/exec/decode.h"
#include "simgpu/ptx/parser.h"

namespace simgpu::exec {
namespace {

using ptx::Operand;
using ptx::Space;

constexpr uint64_t kMaxStaticShared = 48 << 10;  // as ptxas has it
constexpr uint64_t kMaxLocal = 16 << 20;         // of a thread; a device's limit is 512 KiB

struct Reach {
  ptx::Module* module;
  KernelImage* image;
  DecodeError* error;
  std::vector<int32_t> order;  // functions, kernel first
  std::unordered_map<int32_t, std::vector<int32_t>> callees;
  std::vector<int32_t> shared;  // module variables
  std::vector<char> shared_seen;
  bool indirect = false;

  bool Visit(int32_t index);
  void Operands(const std::vector<Operand>& operands, bool call, int32_t from);
};

void Reach::Operands(const std::vector<Operand>& operands, bool call, int32_t from) {
  for (const Operand& operand : operands) {
    if (operand.kind == Operand::Kind::kSymbol) {
      if (auto at = module->variable_index.find(operand.name); at != module->variable_index.end()) {
        if (module->variables[static_cast<size_t>(at->second)].space == Space::kShared &&
            !shared_seen[static_cast<size_t>(at->second)]) {
          shared_seen[static_cast<size_t>(at->second)] = 1;
          shared.push_back(at->second);
        }
      } else if (auto fn = module->function_index.find(operand.name);
                 fn != module->function_index.end()) {
        // Called here, or its address is taken.
        callees[from].push_back(fn->second);
      }
    }
    if (!operand.elements.empty()) Operands(operand.elements, call, from);
  }
}

bool Reach::Visit(int32_t root) {
  std::vector<int32_t> todo{root};
  std::vector<char> seen(module->functions.size(), 0);
  seen[static_cast<size_t>(root)] = 1;
  bool tables_added = false;
  for (size_t k = 0; k < todo.size(); ++k) {
    int32_t index = todo[k];
    ptx::Function& function = module->functions[static_cast<size_t>(index)];
    if (!function.has_body) continue;
    ptx::ParseError parse_error;
    if (!ptx::ParseBody(&function, &parse_error)) {
      error->line = parse_error.line;
      error->message = parse_error.message;
      return false;
    }
    order.push_back(index);
    for (const ptx::Statement& statement : function.statements) {
      bool call = statement.mnemonic.substr(0, 4) == "call";
      Operands(statement.operands, call, index);
      if (call)
        for (const Operand& operand : statement.operands)
          if (operand.kind == Operand::Kind::kRegister) indirect = true;
    }
    auto add = [&](int32_t callee) {
      if (seen[static_cast<size_t>(callee)]) return;
      seen[static_cast<size_t>(callee)] = 1;
      todo.push_back(callee);
    };
    for (int32_t callee : callees[index]) add(callee);
    if (indirect && !tables_added) {
      // Function addresses may come out of any table (of virtual functions, say).
      tables_added = true;
      for (const ptx::Variable& variable : module->variables)
        for (const ptx::Initializer& item : variable.initializer)
          if (item.kind == ptx::Initializer::Kind::kSymbol)
            if (auto at = module->function_index.find(item.symbol);
                at != module->function_index.end())
              add(at->second);
    }
  }
  return true;
}

uint32_t AlignUp(uint32_t value, uint32_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

}  // namespace

bool PrepareImage(ptx::Module* module, int32_t entry, KernelImage* image, DecodeError* error) {
  Reach reach{module, image, error, {}, {}, {}, {}, false};
  reach.shared_seen.resize(module->variables.size());
  if (!reach.Visit(entry)) return false;
  image->entry = &module->functions[static_cast<size_t>(entry)];

  // Shared memory: first what is sized, then, for all unsized arrays, one place after it.
  uint64_t shared = 0;
  uint32_t dynamic_alignment = 16;
  auto place = [&](const ptx::Variable& variable) {
    shared = (shared + variable.alignment - 1) & ~uint64_t{variable.alignment - 1};
    uint64_t at = shared;
    shared += variable.bytes;
    return at;
  };
  for (int32_t v : reach.shared) {
    const ptx::Variable& variable = module->variables[static_cast<size_t>(v)];
    if (variable.bytes == 0) {
      dynamic_alignment = std::max(dynamic_alignment, variable.alignment);
    } else {
      image->shared_offsets[&variable] = place(variable);
    }
  }
  for (int32_t f : reach.order) {
    for (const ptx::Variable& variable : module->functions[static_cast<size_t>(f)].variables) {
      if (variable.space != Space::kShared) continue;
      if (variable.bytes == 0) {
        dynamic_alignment = std::max(dynamic_alignment, variable.alignment);
      } else {
        image->shared_offsets[&variable] = place(variable);
      }
    }
  }
  if (shared > kMaxStaticShared) {
    error->line = image->entry->line;
    error->message =
        "The shared memory (" + std::to_string(shared) + ") of the kernel is too large.";
    return false;
  }
  image->dynamic_shared_offset =
      (shared + dynamic_alignment - 1) & ~uint64_t{dynamic_alignment - 1};
  image->static_shared_bytes = static_cast<uint32_t>(shared);

  // Local memory: each function's variables, then its parameters and those of its calls.
  for (int32_t f : reach.order) {
    const ptx::Function& function = module->functions[static_cast<size_t>(f)];
    Code code;
    code.function = &function;
    code.index = static_cast<int32_t>(image->codes.size());
    code.variable_offsets.assign(function.variables.size(), 0);
    uint64_t bytes = 0;
    uint32_t parameter_bytes = 0;
    for (size_t v = 0; v < function.variables.size(); ++v) {
      const ptx::Variable& variable = function.variables[v];
      bool entry_parameter =
          function.entry && v < function.parameters.size() + function.returns.size();
      if (entry_parameter) {
        // Packed with natural alignment; the driver fills the block so.
        parameter_bytes = (parameter_bytes + variable.alignment - 1) & ~(variable.alignment - 1);
        code.variable_offsets[v] = parameter_bytes;
        parameter_bytes += static_cast<uint32_t>(variable.bytes);
      }
      if (variable.space != Space::kLocal && (variable.space != Space::kParam || entry_parameter))
        continue;
      uint32_t alignment = std::max(variable.alignment, 8u);
      bytes = (bytes + alignment - 1) & ~uint64_t{alignment - 1};
      code.variable_offsets[v] = static_cast<uint32_t>(bytes);
      bytes += variable.bytes;
      if (bytes > kMaxLocal) {
        error->line = function.line;
        error->message =
            "The local memory of function (" + std::string(function.name) + ") is too large.";
        return false;
      }
    }
    code.local_bytes = AlignUp(static_cast<uint32_t>(bytes), 16);
    if (!function.entry) {
      for (int32_t v : function.parameters)
        code.parameters.push_back(
            {code.variable_offsets[static_cast<size_t>(v)],
             static_cast<uint32_t>(function.variables[static_cast<size_t>(v)].bytes)});
      for (int32_t v : function.returns)
        code.results.push_back(
            {code.variable_offsets[static_cast<size_t>(v)],
             static_cast<uint32_t>(function.variables[static_cast<size_t>(v)].bytes)});
    }
    image->codes.push_back(std::move(code));
    image->by_function[f] = &image->codes.back();
  }

  // The deepest chain of calls; a cycle, or a call through a pointer, has no bound.
  image->calls_unbounded = reach.indirect;
  std::unordered_map<int32_t, int> state;  // 1: being visited, 2: done
  std::unordered_map<int32_t, uint64_t> depth;
  std::vector<std::pair<int32_t, size_t>> stack{{entry, 0}};
  state[entry] = 1;
  while (!stack.empty()) {
    int32_t f = stack.back().first;
    const std::vector<int32_t>& callees = reach.callees[f];
    if (stack.back().second < callees.size()) {
      int32_t callee = callees[stack.back().second++];
      if (!image->by_function.count(callee)) continue;
      int& s = state[callee];
      if (s == 1) image->calls_unbounded = true;
      if (s == 0) {
        s = 1;
        stack.push_back({callee, 0});
      }
      continue;
    }
    uint64_t deepest = 0;
    for (int32_t callee : callees) deepest = std::max(deepest, depth[callee]);
    depth[f] = deepest + image->by_function[f]->local_bytes;
    if (depth[f] > kMaxLocal) {
      error->line = image->entry->line;
      error->message = "The local memory (" + std::to_string(depth[f]) + ") of kernel (" +
                       std::string(image->entry->name) + ") and what it calls is too large.";
      return false;
    }
    state[f] = 2;
    stack.pop_back();
  }
  image->local_bytes = static_cast<uint32_t>(depth[entry]);
  return true;
}

}  // namespace simgpu::exec
