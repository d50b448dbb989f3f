#include "simgpu/ptx/parser.h"

#include <algorithm>
#include <utility>

#include "simgpu/ptx/lexer.h"

namespace simgpu::ptx {

Type ParseType(std::string_view text) {
  if (!text.empty() && text[0] == '.') text.remove_prefix(1);
  if (text == "pred") return {'p', 1};
  if (text == "f16" || text == "bf16") return {'f', 2};
  if (text == "f16x2" || text == "bf16x2") return {'b', 4};
  if (text.size() < 2 || text.size() > 4) return {};
  char kind = text[0];
  std::string_view bits = text.substr(1);
  if (kind == 'b' && bits == "128") return {'b', 16};
  if (kind != 'b' && kind != 'u' && kind != 's' && kind != 'f') return {};
  uint8_t bytes = bits == "8" ? 1 : bits == "16" ? 2 : bits == "32" ? 4 : bits == "64" ? 8 : 0;
  if (bytes == 0 || (kind == 'f' && bytes == 1)) return {};
  return {kind, bytes};
}

namespace {

using Kind = Token::Kind;

constexpr int kMaxNesting = 64;
constexpr uint64_t kMaxVariableBytes = uint64_t{1} << 40;
// What a hostile text can make us reserve is bounded by its own length: a register that is used
// stands in the text, and few are declared that are not.
constexpr uint64_t kUnusedRegisters = 4096;
// Of a kernel, since CUDA 12.1.
constexpr uint64_t kMaxParameterBytes = 32764;

class Parser {
 public:
  Parser(std::string_view text, int line, ParseError* error) : lexer_(text, line), error_(error) {
    Advance();
  }

 protected:
  bool Fail(std::string message) { return FailAt(token_.line, std::move(message)); }
  bool FailAt(int line, std::string message) {
    if (error_->message.empty()) {
      error_->line = line;
      error_->message = std::move(message);
    }
    return false;
  }
  bool Unexpected(const char* wanted) {
    if (token_.kind == Kind::kEnd)
      return Fail(std::string("The text ends where ") + wanted + " is expected.");
    return Fail("Found (" + std::string(token_.text.substr(0, 80)) + ") where " + wanted +
                " is expected.");
  }
  void Advance() { token_ = lexer_.Next(); }
  bool Accept(char c) {
    if (!token_.Is(c)) return false;
    Advance();
    return true;
  }
  bool Expect(char c) {
    if (Accept(c)) return true;
    char wanted[] = {'(', c, ')', 0};
    return Unexpected(wanted);
  }
  bool Identifier(std::string_view* name) {
    if (token_.kind != Kind::kIdentifier) return Unexpected("a name");
    *name = token_.text;
    Advance();
    return true;
  }
  bool Integer(uint64_t* value) {
    if (token_.kind != Kind::kInteger) return Unexpected("an integer");
    *value = token_.bits;
    Advance();
    return true;
  }

  // [.align N] [.ptr ...] .type name [dims]; the space directive was read. Registers are not read
  // here.
  bool Declaration(Variable* variable);
  bool InitializerList(Variable* variable);
  bool InitializerItem(Variable* variable);
  bool ParameterList(std::vector<Variable>* list);

  Lexer lexer_;
  Token token_;
  ParseError* error_;
};

bool Parser::Declaration(Variable* variable) {
  variable->line = token_.line;
  bool have_type = false, aligned = false;
  int vector = 1;
  while (token_.kind == Kind::kDirective) {
    if (token_.text == ".align") {
      Advance();
      uint64_t alignment = 0;
      if (!Integer(&alignment)) return false;
      if (alignment == 0 || alignment > 4096 || (alignment & (alignment - 1)))
        return Fail("The alignment (" + std::to_string(alignment) +
                    ") is not a small power of two.");
      // After ".ptr" it describes the pointee, not the parameter.
      if (!have_type) variable->alignment = static_cast<uint32_t>(alignment), aligned = true;
    } else if (token_.text == ".attribute") {
      Advance();
      if (!Expect('(')) return false;
      while (!token_.Is(')')) {
        if (token_.kind == Kind::kEnd) return Unexpected("(\")\")");
        if (token_.text == ".managed") variable->managed = true;
        Advance();
      }
      Advance();
    } else if (have_type &&
               (token_.text == ".ptr" || token_.text == ".global" || token_.text == ".const" ||
                token_.text == ".shared" || token_.text == ".local")) {
      Advance();
    } else if (token_.text == ".v2" || token_.text == ".v4") {
      vector = token_.text == ".v2" ? 2 : 4;
      Advance();
    } else if (!have_type) {
      variable->type = ParseType(token_.text);
      if (variable->type.kind == 0) return Unexpected("a type");
      have_type = true;
      Advance();
    } else {
      return Unexpected("a name");
    }
  }
  if (!have_type) return Unexpected("a type");
  if (!Identifier(&variable->name)) return false;
  if (!aligned) variable->alignment = variable->type.bytes * static_cast<uint32_t>(vector);
  uint64_t count = static_cast<uint64_t>(vector);
  bool unsized = false;
  while (Accept('[')) {
    if (Accept(']')) {
      unsized = true;
      continue;
    }
    uint64_t dimension = 0;
    if (!Integer(&dimension) || !Expect(']')) return false;
    if (dimension != 0 && count > kMaxVariableBytes / dimension)
      return Fail("The variable (" + std::string(variable->name) + ") is too large.");
    count *= dimension;
  }
  variable->bytes = unsized ? 0 : count * variable->type.bytes;
  if (variable->bytes > kMaxVariableBytes)
    return Fail("The variable (" + std::string(variable->name) + ") is too large.");
  if (Accept('=')) {
    variable->has_initializer = true;
    if (token_.Is('{')) {
      if (!InitializerList(variable)) return false;
    } else if (!InitializerItem(variable)) {
      return false;
    }
    uint64_t bytes = variable->initializer.size() * variable->type.bytes;
    if (unsized) variable->bytes = bytes;
    if (bytes > variable->bytes)
      return Fail("The initializer of (" + std::string(variable->name) + ") is larger than it.");
  }
  return true;
}

bool Parser::InitializerList(Variable* variable) {
  Advance();  // {
  if (Accept('}')) return true;
  do {
    // An inner list may leave out its last elements, which shifts the rest; nvcc writes flat lists.
    if (token_.Is('{'))
      return Fail("Nested initializer lists, of (" + std::string(variable->name) +
                  "), are not supported.");
    if (!InitializerItem(variable)) return false;
  } while (Accept(','));
  return Expect('}');
}

bool Parser::InitializerItem(Variable* variable) {
  Initializer item;
  bool negative = Accept('-');
  if (token_.kind == Kind::kInteger) {
    item.bits = negative ? 0 - token_.bits : token_.bits;
    Advance();
  } else if (token_.kind == Kind::kF32 || token_.kind == Kind::kF64) {
    bool single = token_.kind == Kind::kF32;
    item.kind = single ? Initializer::Kind::kF32 : Initializer::Kind::kF64;
    item.bits = token_.bits;
    if (negative) item.bits ^= single ? uint64_t{1} << 31 : uint64_t{1} << 63;
    Advance();
  } else if (token_.kind == Kind::kIdentifier && !negative) {
    item.kind = Initializer::Kind::kSymbol;
    if (token_.text == "generic") {
      Advance();
      if (!Expect('(') || !Identifier(&item.symbol) || !Expect(')')) return false;
    } else if (!Identifier(&item.symbol)) {
      return false;
    }
    if (token_.Is('+') || token_.Is('-')) {
      bool minus = token_.Is('-');
      Advance();
      if (Accept('-')) minus = !minus;
      uint64_t offset = 0;
      if (!Integer(&offset)) return false;
      item.bits = minus ? 0 - offset : offset;
    }
  } else {
    return Unexpected("an initial value");
  }
  variable->initializer.push_back(item);
  return true;
}

bool Parser::ParameterList(std::vector<Variable>* list) {
  if (Accept(')')) return true;
  do {
    Variable variable;
    if (token_.IsWord(".param")) {
      variable.space = Space::kParam;
    } else if (token_.IsWord(".reg")) {
      return Fail("Parameters in registers are not supported.");
    } else {
      return Unexpected("(.param)");
    }
    Advance();
    if (!Declaration(&variable)) return false;
    list->push_back(variable);
  } while (Accept(','));
  return Expect(')');
}

class ModuleParser : public Parser {
 public:
  ModuleParser(std::string_view text, Module* module, ParseError* error)
      : Parser(text, 1, error), module_(module) {}
  bool Run();

 private:
  struct Linkage {
    bool external = false, weak = false, visible = false;
  };
  bool Item();
  bool ModuleVariable(Space space, const Linkage& linkage);
  bool FunctionItem(bool entry, const Linkage& linkage);
  bool Version();
  bool Dimensions(uint32_t* out);

  Module* module_;
};

bool ModuleParser::Version() {
  // "9.0" reads as a decimal literal.
  if (token_.kind != Kind::kF64 && token_.kind != Kind::kInteger) return Unexpected("a version");
  std::string_view text = token_.text;
  int value = 0;
  for (char c : text)
    if (c >= '0' && c <= '9') value = std::min(value * 10 + (c - '0'), 100000);
  if (text.find('.') == std::string_view::npos) value *= 10;
  module_->version = value;
  Advance();
  return true;
}

bool ModuleParser::Run() {
  while (token_.kind != Kind::kEnd)
    if (!Item()) return false;
  if (module_->version == 0) return FailAt(1, "The text has no .version directive.");
  return true;
}

bool ModuleParser::Item() {
  if (module_->version == 0 && !token_.IsWord(".version"))
    return Fail("The text does not begin with a .version directive.");
  Linkage linkage;
  for (;;) {
    if (token_.kind != Kind::kDirective) return Unexpected("a directive");
    std::string_view word = token_.text;
    int line = token_.line;
    if (word == ".loc" || word == ".file") {
      lexer_.SkipLine();
      Advance();
      return true;
    }
    Advance();
    if (word == ".version") return Version();
    if (word == ".target") {
      do {
        std::string_view name;
        if (!Identifier(&name)) return false;
        if (name.substr(0, 3) == "sm_") {
          int value = 0;
          for (char c : name.substr(3))
            if (c >= '0' && c <= '9') value = std::min(value * 10 + (c - '0'), 100000);
          module_->target = value;
        }
      } while (Accept(','));
      return true;
    }
    if (word == ".address_size") {
      uint64_t bits = 0;
      if (!Integer(&bits)) return false;
      if (bits != 64)
        return FailAt(line, "The address size (" + std::to_string(bits) + ") is not 64.");
      return true;
    }
    if (word == ".section") {
      // The name may be ".debug_info" or "debug_info".
      Advance();
      if (!token_.Is('{')) return Unexpected("({)");
      std::string_view block;
      if (!lexer_.TakeBlock(&block)) return Fail("A section has no end.");
      Advance();
      return true;
    }
    if (word == ".pragma") {
      while (!token_.Is(';')) {
        if (token_.kind == Kind::kEnd) return Unexpected("(;)");
        Advance();
      }
      Advance();
      return true;
    }
    if (word == ".visible") {
      linkage.visible = true;
    } else if (word == ".extern") {
      linkage.external = true;
    } else if (word == ".weak" || word == ".common") {
      linkage.weak = true;
    } else if (word == ".global") {
      return ModuleVariable(Space::kGlobal, linkage);
    } else if (word == ".const") {
      return ModuleVariable(Space::kConst, linkage);
    } else if (word == ".shared") {
      return ModuleVariable(Space::kShared, linkage);
    } else if (word == ".entry") {
      return FunctionItem(true, linkage);
    } else if (word == ".func") {
      return FunctionItem(false, linkage);
    } else {
      return FailAt(line, "The directive (" + std::string(word) + ") is not supported.");
    }
  }
}

bool ModuleParser::ModuleVariable(Space space, const Linkage& linkage) {
  do {
    Variable variable;
    variable.space = space;
    variable.external = linkage.external;
    variable.weak = linkage.weak;
    if (!Declaration(&variable)) return false;
    auto [at, fresh] = module_->variable_index.try_emplace(
        variable.name, static_cast<int32_t>(module_->variables.size()));
    if (fresh) {
      module_->variables.push_back(std::move(variable));
    } else {
      // A declaration may come before the definition.
      Variable& before = module_->variables[static_cast<size_t>(at->second)];
      if (before.external && !variable.external) {
        before = std::move(variable);
      } else if (!variable.external) {
        return Fail("The variable (" + std::string(variable.name) + ") is defined twice.");
      }
    }
  } while (Accept(','));
  return Expect(';');
}

bool ModuleParser::Dimensions(uint32_t* out) {
  out[0] = out[1] = out[2] = 1;
  for (int i = 0; i < 3; ++i) {
    uint64_t value = 0;
    if (!Integer(&value)) return false;
    if (value == 0 || value > 0x7fffffff) return Fail("The dimension is out of range.");
    out[i] = static_cast<uint32_t>(value);
    if (!Accept(',')) break;
  }
  return true;
}

bool ModuleParser::FunctionItem(bool entry, const Linkage& linkage) {
  Function function;
  function.entry = entry;
  function.external = linkage.external;
  function.weak = linkage.weak;
  function.visible = linkage.visible;
  function.line = token_.line;
  std::vector<Variable> list;
  if (token_.IsWord(".attribute")) {
    while (!token_.Is(')')) {
      if (token_.kind == Kind::kEnd) return Unexpected("(\")\")");
      Advance();
    }
    Advance();
  }
  if (!entry && Accept('(')) {
    if (!ParameterList(&list)) return false;
    for (Variable& v : list) {
      function.returns.push_back(static_cast<int32_t>(function.variables.size()));
      function.variables.push_back(std::move(v));
    }
    list.clear();
  }
  if (!Identifier(&function.name)) return false;
  if (Accept('(')) {
    if (!ParameterList(&list)) return false;
    uint64_t bytes = 0;
    for (const Variable& v : list) {
      bytes = ((bytes + v.alignment - 1) & ~uint64_t{v.alignment - 1}) + v.bytes;
      if (entry && bytes > kMaxParameterBytes)
        return Fail("The parameters of kernel (" + std::string(function.name) +
                    ") exceed the limit (" + std::to_string(kMaxParameterBytes) + ").");
    }
    for (Variable& v : list) {
      function.parameters.push_back(static_cast<int32_t>(function.variables.size()));
      function.variables.push_back(std::move(v));
    }
  }
  while (token_.kind == Kind::kDirective) {
    std::string_view word = token_.text;
    Advance();
    if (word == ".maxntid") {
      if (!Dimensions(function.max_threads)) return false;
    } else if (word == ".reqntid") {
      if (!Dimensions(function.required_threads)) return false;
    } else if (word == ".minnctapersm" || word == ".maxnctapersm" || word == ".maxnreg" ||
               word == ".maxclusterrank") {
      uint64_t ignored = 0;
      if (!Integer(&ignored)) return false;
    } else if (word == ".noreturn") {
    } else if (word == ".pragma") {
      while (!token_.Is(';') && token_.kind != Kind::kEnd) Advance();
      if (!Expect(';')) return false;
    } else {
      return Fail("The directive (" + std::string(word) + ") of function (" +
                  std::string(function.name) + ") is not supported.");
    }
  }
  if (token_.Is('{')) {
    function.has_body = true;
    function.body_line = lexer_.line();
    if (!lexer_.TakeBlock(&function.body))
      return Fail("The body of function (" + std::string(function.name) + ") has no end.");
    Advance();
  } else if (!Expect(';')) {
    return false;
  }
  auto [at, fresh] = module_->function_index.try_emplace(
      function.name, static_cast<int32_t>(module_->functions.size()));
  if (fresh) {
    module_->functions.push_back(std::move(function));
  } else {
    Function& before = module_->functions[static_cast<size_t>(at->second)];
    if (!before.has_body) {
      if (function.has_body) before = std::move(function);
    } else if (function.has_body) {
      return Fail("The function (" + std::string(function.name) + ") is defined twice.");
    }
  }
  return true;
}

class BodyParser : public Parser {
 public:
  BodyParser(Function* function, ParseError* error)
      : Parser(function->body, function->body_line, error), f_(function) {}
  bool Run();

 private:
  struct Scope {
    int32_t parent = -1;
    std::unordered_map<std::string_view, int32_t> registers;                    // single ones
    std::unordered_map<std::string_view, std::pair<int32_t, uint32_t>> ranges;  // %r<9>
    std::unordered_map<std::string_view, int32_t> variables;
    std::unordered_map<std::string_view, int32_t> labels;
  };
  bool Item();
  bool Registers();
  bool Instruction();
  bool Guard(Statement* statement);
  bool ParseOperand(Operand* operand, int depth);
  bool Word(Operand* operand);
  bool Address(Operand* operand, int depth);
  bool CallPrototype(std::string_view name);
  int32_t FindRegister(std::string_view name) const;
  int32_t FindVariable(std::string_view name) const;
  bool ResolveLabels();

  Function* f_;
  std::vector<Scope> scopes_;
  int32_t scope_ = 0;
  int depth_ = 0;
};

int32_t BodyParser::FindRegister(std::string_view name) const {
  size_t prefix = name.size();
  while (prefix > 0 && name[prefix - 1] >= '0' && name[prefix - 1] <= '9') --prefix;
  uint64_t number = 0;
  for (char c : name.substr(prefix)) number = std::min<uint64_t>(number * 10 + (c - '0'), 1u << 30);
  // "%r01" is not "%r1".
  bool numbered = prefix < name.size() && (name[prefix] != '0' || prefix + 1 == name.size());
  for (int32_t s = scope_; s >= 0; s = scopes_[s].parent) {
    const Scope& scope = scopes_[s];
    if (auto at = scope.registers.find(name); at != scope.registers.end()) return at->second;
    if (!numbered) continue;
    auto range = scope.ranges.find(name.substr(0, prefix));
    if (range != scope.ranges.end() && number < range->second.second)
      return range->second.first + static_cast<int32_t>(number);
  }
  return -1;
}

int32_t BodyParser::FindVariable(std::string_view name) const {
  for (int32_t s = scope_; s >= 0; s = scopes_[s].parent)
    if (auto at = scopes_[s].variables.find(name); at != scopes_[s].variables.end())
      return at->second;
  return -1;
}

bool BodyParser::Run() {
  scopes_.emplace_back();
  for (size_t i = 0; i < f_->variables.size(); ++i)
    scopes_[0].variables[f_->variables[i].name] = static_cast<int32_t>(i);
  while (token_.kind != Kind::kEnd)
    if (!Item()) return false;
  if (depth_ != 0) return Fail("A block has no end.");
  return ResolveLabels();
}

bool BodyParser::Item() {
  if (Accept(';')) return true;
  if (Accept('{')) {
    if (++depth_ > kMaxNesting) return Fail("Blocks nest too deeply.");
    Scope scope;
    scope.parent = scope_;
    scope_ = static_cast<int32_t>(scopes_.size());
    scopes_.push_back(std::move(scope));
    return true;
  }
  if (token_.Is('}')) {
    if (depth_ == 0) return Unexpected("an instruction");
    --depth_;
    scope_ = scopes_[scope_].parent;
    Advance();
    return true;
  }
  if (token_.kind == Kind::kDirective) {
    std::string_view word = token_.text;
    if (word == ".loc" || word == ".file") {
      lexer_.SkipLine();
      Advance();
      return true;
    }
    Advance();
    if (word == ".reg") return Registers();
    if (word == ".pragma") {
      while (!token_.Is(';') && token_.kind != Kind::kEnd) Advance();
      return Expect(';');
    }
    if (word == ".param" || word == ".local" || word == ".shared" || word == ".global" ||
        word == ".const") {
      Variable variable;
      variable.space = word == ".param"    ? Space::kParam
                       : word == ".local"  ? Space::kLocal
                       : word == ".shared" ? Space::kShared
                       : word == ".global" ? Space::kGlobal
                                           : Space::kConst;
      do {
        Variable each = variable;
        if (!Declaration(&each)) return false;
        scopes_[scope_].variables[each.name] = static_cast<int32_t>(f_->variables.size());
        f_->variables.push_back(std::move(each));
      } while (Accept(','));
      return Expect(';');
    }
    return Fail("The directive (" + std::string(word) + ") is not supported.");
  }
  if (token_.kind == Kind::kIdentifier) {
    if (!lexer_.AdjacentPair(':', ':')) {
      size_t position = lexer_.position();
      int line = lexer_.line();
      Token next = lexer_.Next();
      if (next.Is(':')) {
        std::string_view label = token_.text;
        Advance();
        if (token_.IsWord(".callprototype")) {
          Advance();
          return CallPrototype(label);
        }
        if (token_.IsWord(".branchtargets") || token_.IsWord(".calltargets")) {
          while (!token_.Is(';') && token_.kind != Kind::kEnd) Advance();
          return Expect(';');
        }
        if (!scopes_[scope_]
                 .labels.emplace(label, static_cast<int32_t>(f_->statements.size()))
                 .second)
          return Fail("The label (" + std::string(label) + ") is defined twice.");
        return true;
      }
      lexer_.Rewind(position, line);
    }
    return Instruction();
  }
  if (token_.Is('@')) return Instruction();
  return Unexpected("an instruction");
}

bool BodyParser::CallPrototype(std::string_view name) {
  Prototype prototype;
  if (Accept('(') && !ParameterList(&prototype.returns)) return false;
  if (!token_.IsWord("_")) return Unexpected("(_)");
  Advance();
  if (Accept('(') && !ParameterList(&prototype.parameters)) return false;
  while (token_.kind == Kind::kDirective) {  // .noreturn
    Advance();
    if (token_.kind == Kind::kInteger) Advance();
  }
  f_->prototypes[name] = std::move(prototype);
  return Expect(';');
}

bool BodyParser::Registers() {
  if (token_.IsWord(".v2") || token_.IsWord(".v4"))
    return Fail("Vector registers are not supported.");
  Type type = ParseType(token_.text);
  if (token_.kind != Kind::kDirective || type.kind == 0) return Unexpected("a type");
  Advance();
  do {
    std::string_view name;
    if (!Identifier(&name)) return false;
    uint64_t count = 1;
    bool range = Accept('<');
    if (range && (!Integer(&count) || !Expect('>'))) return false;
    const uint64_t most = kUnusedRegisters + f_->body.size();
    if (count > most || f_->registers.size() + count > most)
      return Fail("The function has too many registers.");
    int32_t first = static_cast<int32_t>(f_->registers.size());
    f_->registers.insert(f_->registers.end(), count, type);
    if (range) {
      scopes_[scope_].ranges[name] = {first, static_cast<uint32_t>(count)};
    } else {
      scopes_[scope_].registers[name] = first;
    }
  } while (Accept(','));
  return Expect(';');
}

bool BodyParser::Guard(Statement* statement) {
  if (!Accept('@')) return true;
  statement->guard_negated = Accept('!');
  std::string_view name;
  if (!Identifier(&name)) return false;
  statement->guard = FindRegister(name);
  if (statement->guard < 0 || f_->registers[statement->guard].kind != 'p')
    return Fail("The guard (" + std::string(name) + ") is not a declared predicate.");
  return true;
}

bool BodyParser::Instruction() {
  Statement statement;
  statement.scope = scope_;
  statement.line = token_.line;
  if (!Guard(&statement)) return false;
  if (token_.kind != Kind::kIdentifier) return Unexpected("an instruction");
  statement.line = token_.line;
  statement.mnemonic = lexer_.TakeMnemonic(token_);
  Advance();
  while (!token_.Is(';')) {
    Operand operand;
    if (!ParseOperand(&operand, 0)) return false;
    statement.operands.push_back(std::move(operand));
    if (!Accept(',') && !token_.Is(';')) return Unexpected("(,) or (;)");
  }
  Advance();
  f_->statements.push_back(std::move(statement));
  return true;
}

bool BodyParser::Word(Operand* operand) {
  std::string_view name = token_.text;
  if (name == "_") {
    operand->kind = Operand::Kind::kSink;
    Advance();
    return true;
  }
  int32_t reg = FindRegister(name);
  if (reg >= 0) {
    operand->kind = Operand::Kind::kRegister;
    operand->reg = reg;
    operand->name = name;
    Advance();
    return true;
  }
  int32_t variable = FindVariable(name);
  if (variable >= 0) {
    operand->kind = Operand::Kind::kVariable;
    operand->variable = variable;
    operand->name = name;
    Advance();
    return true;
  }
  if (name[0] == '%') {
    // A special register: %tid.x.
    name = lexer_.TakeMnemonic(token_);
    size_t dot = name.find('.');
    if (dot == std::string_view::npos && name.size() > 1 && name.back() >= '0' &&
        name.back() <= '9' && name.substr(0, 7) != "%envreg" && name.substr(0, 3) != "%pm" &&
        name != "%clock64" && name.find("smem") == std::string_view::npos)
      return Fail("The register (" + std::string(name) + ") is not declared.");
  }
  operand->kind = Operand::Kind::kSymbol;
  operand->name = name;
  Advance();
  return true;
}

bool BodyParser::Address(Operand* operand, int depth) {
  operand->kind = Operand::Kind::kAddress;
  Operand base;
  if (!ParseOperand(&base, depth + 1)) return false;
  if (base.kind == Operand::Kind::kInteger) {
    operand->value = base.value;
    base.value = 0;
  }
  // The word parser took "sym+4" as a symbol with an offset already.
  if (base.kind == Operand::Kind::kSymbol || base.kind == Operand::Kind::kVariable ||
      base.kind == Operand::Kind::kRegister) {
    operand->value = base.value;
    base.value = 0;
  }
  operand->elements.push_back(std::move(base));
  while (Accept(',')) {
    Operand more;
    if (!ParseOperand(&more, depth + 1)) return false;
    operand->elements.push_back(std::move(more));
  }
  return Expect(']');
}

bool BodyParser::ParseOperand(Operand* operand, int depth) {
  if (depth > 8) return Fail("Operands nest too deeply.");
  if (Accept('[')) return Address(operand, depth);
  if (token_.Is('{') || token_.Is('(')) {
    bool vector = token_.Is('{');
    operand->kind = vector ? Operand::Kind::kVector : Operand::Kind::kList;
    char close = vector ? '}' : ')';
    Advance();
    if (Accept(close)) return true;
    do {
      Operand element;
      if (!ParseOperand(&element, depth + 1)) return false;
      operand->elements.push_back(std::move(element));
    } while (Accept(','));
    return Expect(close);
  }
  if (token_.Is('!')) {
    Advance();
    operand->negated = true;
    if (token_.kind != Kind::kIdentifier) return Unexpected("a predicate");
    return Word(operand);
  }
  bool negative = Accept('-');
  if (token_.kind == Kind::kInteger) {
    operand->kind = Operand::Kind::kInteger;
    operand->value = static_cast<int64_t>(negative ? 0 - token_.bits : token_.bits);
    Advance();
    return true;
  }
  if (token_.kind == Kind::kF32 || token_.kind == Kind::kF64) {
    bool single = token_.kind == Kind::kF32;
    operand->kind = single ? Operand::Kind::kF32 : Operand::Kind::kF64;
    uint64_t bits = token_.bits;
    if (negative) bits ^= single ? uint64_t{1} << 31 : uint64_t{1} << 63;
    operand->value = static_cast<int64_t>(bits);
    Advance();
    return true;
  }
  if (token_.kind != Kind::kIdentifier) return Unexpected("an operand");
  operand->negated = negative;
  if (!Word(operand)) return false;
  if (token_.Is('|')) {
    Advance();
    Operand second;
    if (token_.kind != Kind::kIdentifier || !Word(&second)) return Unexpected("a predicate");
    if (second.kind == Operand::Kind::kSink) {
      operand->second = -2;
    } else if (second.kind == Operand::Kind::kRegister) {
      operand->second = second.reg;
    } else {
      return Fail("The second destination is not a register.");
    }
  }
  // sym+4, %r+-8
  while (token_.Is('+') || token_.Is('-')) {
    bool minus = token_.Is('-');
    Advance();
    if (Accept('-')) minus = !minus;
    uint64_t offset = 0;
    if (!Integer(&offset)) return false;
    operand->value += static_cast<int64_t>(minus ? 0 - offset : offset);
  }
  return true;
}

bool BodyParser::ResolveLabels() {
  for (Statement& statement : f_->statements) {
    if (statement.mnemonic.substr(0, 3) != "bra" ||
        (statement.mnemonic.size() > 3 && statement.mnemonic[3] != '.'))
      continue;
    if (statement.operands.size() != 1 || statement.operands[0].kind != Operand::Kind::kSymbol)
      return FailAt(statement.line, "A branch has no label.");
    std::string_view label = statement.operands[0].name;
    for (int32_t s = statement.scope; s >= 0 && statement.target < 0; s = scopes_[s].parent)
      if (auto at = scopes_[s].labels.find(label); at != scopes_[s].labels.end())
        statement.target = at->second;
    if (statement.target < 0)
      return FailAt(statement.line, "The label (" + std::string(label) + ") is not defined.");
  }
  return true;
}

}  // namespace

bool ParseModule(std::string_view text, Module* module, ParseError* error) {
  if (!text.empty() && text.find('\0') != std::string_view::npos)
    text = text.substr(0, text.find('\0'));
  return ModuleParser(text, module, error).Run();
}

bool ParseBody(Function* function, ParseError* error) {
  if (function->parsed) return true;
  function->registers.clear();
  function->statements.clear();
  function->variables.resize(function->returns.size() + function->parameters.size());
  if (!BodyParser(function, error).Run()) return false;
  function->parsed = true;
  return true;
}

}  // namespace simgpu::ptx
