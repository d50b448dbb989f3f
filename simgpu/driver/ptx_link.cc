#include "simgpu/driver/ptx_link.h"

#include <cstdlib>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace simgpu {
namespace {

bool IsNameStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool IsNamePart(char c) {
  return IsNameStart(c) || (c >= '0' && c <= '9');
}

enum class TokenKind { kEnd, kDirective, kName, kNumber, kString, kSymbol };

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string_view text;
  size_t begin = 0;
};

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}
  size_t position() const { return at_; }

  Token Next() {
    SkipBlank();
    Token token;
    token.begin = at_;
    if (at_ >= text_.size()) return token;
    const char c = text_[at_];
    if (c == '"') {
      ++at_;
      while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
      if (at_ < text_.size()) ++at_;
      token.kind = TokenKind::kString;
    } else if (IsNameStart(c)) {
      while (at_ < text_.size() && IsNamePart(text_[at_])) ++at_;
      token.kind = TokenKind::kName;
    } else if (c >= '0' && c <= '9') {
      // Numbers with their suffixes (0f3F800000, 9.0): never names.
      while (at_ < text_.size() && (IsNamePart(text_[at_]) || text_[at_] == '.')) ++at_;
      token.kind = TokenKind::kNumber;
    } else if (c == '.' && at_ + 1 < text_.size() && IsNameStart(text_[at_ + 1])) {
      ++at_;
      while (at_ < text_.size() && (IsNamePart(text_[at_]) || text_[at_] == ':')) ++at_;
      token.kind = TokenKind::kDirective;
    } else {
      ++at_;
      token.kind = TokenKind::kSymbol;
    }
    if (at_ > text_.size()) at_ = text_.size();
    token.text = text_.substr(token.begin, at_ - token.begin);
    return token;
  }

  Token Peek() {
    const size_t saved = at_;
    const Token token = Next();
    at_ = saved;
    return token;
  }

 private:
  void SkipBlank() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\0') {
        ++at_;
      } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '*') {
        const size_t end = text_.find("*/", at_ + 2);
        at_ = end == std::string_view::npos ? text_.size() : end + 2;
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

enum class Linkage { kLocal, kVisible, kWeak, kExtern, kCommon };
enum class StatementKind { kHeader, kEntry, kFunction, kVariable, kOther };

struct Statement {
  StatementKind kind = StatementKind::kOther;
  Linkage linkage = Linkage::kLocal;
  bool definition = false;  // of a function: it has a body
  std::string name;
  std::string_view text;
};

// What follows .version, .target, .address_size and .file has no terminator: it is read by shape.
void SkipHeaderOperands(Lexer& lexer) {
  lexer.Next();
  for (;;) {
    const Token next = lexer.Peek();
    const bool goes_on = next.text == "," || next.kind == TokenKind::kString;
    if (!goes_on) return;
    lexer.Next();
    if (next.text == ",") lexer.Next();
  }
}

// The next statement at module level; false at the end of the text.
bool NextStatement(Lexer& lexer, std::string_view text, Statement* statement) {
  *statement = {};
  Token token = lexer.Next();
  if (token.kind == TokenKind::kEnd) return false;
  const size_t begin = token.begin;
  auto finish = [&] {
    statement->text = text.substr(begin, lexer.position() - begin);
    return true;
  };
  if (token.text == ".version" || token.text == ".target" || token.text == ".address_size" ||
      token.text == ".file") {
    if (token.text != ".file") statement->kind = StatementKind::kHeader;
    SkipHeaderOperands(lexer);
    return finish();
  }
  int parentheses = 0;
  int braces = 0;
  bool is_code = false;
  bool is_section = false;
  for (; token.kind != TokenKind::kEnd; token = lexer.Next()) {
    const std::string_view t = token.text;
    if (braces == 0 && parentheses == 0) {
      if (t == ".visible") statement->linkage = Linkage::kVisible;
      if (t == ".weak") statement->linkage = Linkage::kWeak;
      if (t == ".extern") statement->linkage = Linkage::kExtern;
      if (t == ".common") statement->linkage = Linkage::kCommon;
      if (t == ".entry") statement->kind = StatementKind::kEntry;
      if (t == ".func") statement->kind = StatementKind::kFunction;
      if (t == ".global" || t == ".const" || t == ".shared" || t == ".local" || t == ".tex" ||
          t == ".surf" || t == ".texref" || t == ".surfref" || t == ".samplerref") {
        if (statement->kind == StatementKind::kOther) statement->kind = StatementKind::kVariable;
      }
      if (t == ".section") is_section = true;
      is_code =
          statement->kind == StatementKind::kEntry || statement->kind == StatementKind::kFunction;
      if (token.kind == TokenKind::kName && statement->name.empty() &&
          statement->kind != StatementKind::kOther) {
        statement->name = std::string(t);
      }
      if (t == ";") return finish();
    }
    if (t == "(") ++parentheses;
    if (t == ")") --parentheses;
    if (t == "{") ++braces;
    if (t == "}" && --braces == 0 && (is_code || is_section)) {
      statement->definition = is_code;
      return finish();
    }
  }
  return finish();
}

std::vector<Statement> Statements(std::string_view text) {
  std::vector<Statement> statements;
  Lexer lexer(text);
  Statement statement;
  while (NextStatement(lexer, text, &statement)) statements.push_back(statement);
  return statements;
}

// The statement with local names of its text replaced.
void AppendRenamed(std::string_view text,
                   const std::unordered_map<std::string_view, std::string>& names,
                   std::string* output) {
  Lexer lexer(text);
  size_t copied = 0;
  for (Token token = lexer.Next(); token.kind != TokenKind::kEnd; token = lexer.Next()) {
    if (token.kind != TokenKind::kName) continue;
    const auto found = names.find(token.text);
    if (found == names.end()) continue;
    output->append(text.substr(copied, token.begin - copied));
    output->append(found->second);
    copied = token.begin + token.text.size();
  }
  output->append(text.substr(copied));
}

// ".version 9.0" and the like: the number, scaled, for choosing the newest.
double HeaderNumber(std::string_view text) {
  const size_t digit = text.find_first_of("0123456789");
  return digit == std::string_view::npos ? 0 : atof(std::string(text.substr(digit)).c_str());
}

// nvcc adds NVIDIA's device runtime (for kernels that launch kernels) to every -rdc program. It is
// a library: a text that nothing else refers to stays out.
std::vector<std::string_view> WithoutUnusedRuntime(const std::vector<std::string>& texts) {
  std::vector<std::string_view> kept;
  std::unordered_set<std::string> wanted;
  for (const std::string& text : texts) {
    if (IsDeviceRuntime(text)) continue;
    kept.push_back(text);
    if (texts.size() == 1) break;
    for (const Statement& s : Statements(text)) {
      if (s.linkage == Linkage::kExtern) wanted.insert(s.name);
    }
  }
  for (const std::string& text : texts) {
    if (!IsDeviceRuntime(text)) continue;
    bool used = kept.empty();
    for (const Statement& s : Statements(text)) {
      used = used || (s.linkage == Linkage::kVisible && wanted.contains(s.name));
    }
    if (used) kept.push_back(text);
  }
  return kept;
}

}  // namespace

std::vector<std::string> KernelNames(std::string_view ptx) {
  std::vector<std::string> names;
  Lexer lexer(ptx);
  Statement statement;
  while (NextStatement(lexer, ptx, &statement)) {
    if (statement.kind == StatementKind::kEntry && statement.definition) {
      names.push_back(statement.name);
    }
  }
  return names;
}

bool IsDeviceRuntime(std::string_view ptx) {
  return ptx.find("__CNPRT_VERSION_NUMBER__") != std::string_view::npos;
}

bool LinkPtx(const std::vector<std::string>& all_texts, std::string* linked, std::string* error) {
  const std::vector<std::string_view> texts = WithoutUnusedRuntime(all_texts);
  if (texts.size() == 1) {
    *linked = texts[0];
    return true;
  }
  std::vector<std::vector<Statement>> units;
  std::string_view version;
  std::string_view target;
  std::unordered_set<std::string> defined;  // in any text
  for (const std::string_view text : texts) {
    units.push_back(Statements(text));
    for (const Statement& s : units.back()) {
      if (s.kind == StatementKind::kHeader) {
        std::string_view* const best = s.text.starts_with(".version")  ? &version
                                       : s.text.starts_with(".target") ? &target
                                                                       : nullptr;
        if (best != nullptr && HeaderNumber(s.text) > HeaderNumber(*best)) *best = s.text;
      }
      const bool is_definition =
          s.definition || (s.kind == StatementKind::kVariable && s.linkage != Linkage::kExtern);
      if (is_definition && s.linkage != Linkage::kLocal) defined.insert(s.name);
    }
  }
  *linked = std::string(version) + "\n" + std::string(target) + "\n.address_size 64\n";
  std::unordered_map<std::string, Linkage> emitted;
  std::unordered_set<std::string> declared;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    std::unordered_map<std::string_view, std::string> renamed;
    if (unit > 0) {
      for (const Statement& s : units[unit]) {
        const bool local = s.linkage == Linkage::kLocal && s.kind != StatementKind::kEntry;
        if (local && !s.name.empty()) {
          renamed.emplace(s.name, s.name + "__tu" + std::to_string(unit));
        }
      }
    }
    for (const Statement& s : units[unit]) {
      if (s.kind == StatementKind::kHeader || s.text.starts_with(".file") ||
          s.text.starts_with(".section")) {
        continue;
      }
      if (!s.name.empty() && s.linkage == Linkage::kExtern) {
        // Dynamic shared memory is extern and defined nowhere: one declaration stays.
        if (defined.contains(s.name) || !declared.insert(s.name).second) continue;
      } else if (!s.name.empty() &&
                 (s.linkage != Linkage::kLocal || s.kind == StatementKind::kEntry)) {
        const bool forward = s.kind != StatementKind::kVariable && !s.definition;
        if (!forward) {
          const auto [earlier, fresh] = emitted.emplace(s.name, s.linkage);
          if (!fresh) {
            const bool may_repeat = s.linkage == Linkage::kWeak || s.linkage == Linkage::kCommon ||
                                    earlier->second == Linkage::kWeak ||
                                    earlier->second == Linkage::kCommon;
            if (may_repeat) continue;
            *error = "The symbol (" + s.name + ") is defined in two of the linked PTX texts.";
            return false;
          }
        }
      }
      if (renamed.empty()) {
        linked->append(s.text);
      } else {
        AppendRenamed(s.text, renamed, linked);
      }
      linked->push_back('\n');
    }
  }
  return true;
}

}  // namespace simgpu
