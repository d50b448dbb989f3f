// A PTX module as read from its text, before anything is decided about how to run it.
//
// All names are views into the text, which must outlive the Module. Registers, function-scope
// variables and labels are resolved here (PTX scopes nest and redeclare); module-scope names stay
// names. The type of a register is only its width: what an instruction does with it is the
// instruction's business, as newer compilers declare every register .b32 or .b64.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace simgpu::ptx {

enum class Space : uint8_t { kNone, kGlobal, kConst, kShared, kLocal, kParam, kReg };

struct Type {
  char kind = 0;  // 'b' 'u' 's' 'f' or 'p' (predicate); 0 is no type
  uint8_t bytes = 0;
};
// ".u32" or "u32"; kind 0 if it is not a fundamental type.
Type ParseType(std::string_view text);

struct Initializer {
  enum class Kind : uint8_t { kInteger, kF32, kF64, kSymbol } kind = Kind::kInteger;
  uint64_t bits = 0;        // the value, or what is added to the symbol's address
  std::string_view symbol;  // of a variable or function
};

struct Variable {
  std::string_view name;
  Space space = Space::kNone;
  Type type;
  uint32_t alignment = 1;
  uint64_t bytes = 0;     // 0 for an unsized (dynamic shared) array
  bool external = false;  // .extern
  bool weak = false;      // .weak or .common
  bool managed = false;
  bool has_initializer = false;
  std::vector<Initializer> initializer;
  int line = 0;
};

struct Operand {
  enum class Kind : uint8_t {
    kRegister,
    kInteger,
    kF32,       // 0f3F800000
    kF64,       // 0d... or a decimal literal
    kSymbol,    // a module-scope name, special register, or label
    kVariable,  // a function-scope variable
    kAddress,   // [base + offset]; base is elements[0]; more elements: texture coordinates
    kVector,    // {a, b}
    kList,      // (a, b) of a call
    kSink,      // _
  };
  Kind kind = Kind::kInteger;
  bool negated = false;   // !%p or -%r
  int32_t reg = -1;       // kRegister; index into Function::registers
  int32_t second = -1;    // %p|%q; -2 for a sink
  int32_t variable = -1;  // kVariable; index into Function::variables
  int64_t value = 0;      // kInteger value; kF32 and kF64 bits; offset of kAddress, kSymbol
  std::string_view name;  // kSymbol
  std::vector<Operand> elements;
};

struct Statement {
  std::string_view mnemonic;  // with all modifiers: "ld.global.nc.f32"
  int32_t guard = -1;         // predicate register
  bool guard_negated = false;
  int line = 0;
  int32_t target = -1;  // of bra: index of the statement
  int32_t scope = 0;
  std::vector<Operand> operands;
};

struct Prototype {  // .callprototype
  std::vector<Variable> returns, parameters;
};

struct Function {
  std::string_view name;
  bool entry = false;
  bool external = false;
  bool weak = false;
  bool visible = false;
  bool has_body = false;
  std::vector<int32_t> returns, parameters;  // indices into variables
  std::vector<Variable> variables;           // parameters, then those of the body
  uint32_t max_threads[3] = {0, 0, 0};       // .maxntid
  uint32_t required_threads[3] = {0, 0, 0};  // .reqntid
  int line = 0;

  // Of the body, once it is parsed.
  std::string_view body;
  int body_line = 0;
  bool parsed = false;
  std::vector<Type> registers;
  std::vector<Statement> statements;
  std::unordered_map<std::string_view, Prototype> prototypes;
};

struct Module {
  int version = 0;  // 90 for 9.0
  int target = 0;   // 75 for sm_75
  std::vector<Variable> variables;
  std::vector<Function> functions;
  std::unordered_map<std::string_view, int32_t> variable_index, function_index;
};

}  // namespace simgpu::ptx
