#include "simgpu/ptx/lexer.h"

#include <cstdlib>
#include <cstring>
#include <string>

namespace simgpu::ptx {
namespace {

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}
bool IsWordStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool IsWordPart(char c) {
  return IsWordStart(c) || IsDigit(c);
}
int HexDigit(char c) {
  if (IsDigit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

void Lexer::SkipBlank() {
  while (at_ < text_.size()) {
    char c = text_[at_];
    if (c == '\n') {
      ++line_;
      ++at_;
    } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v' || c == '\0') {
      ++at_;
    } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    } else if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '*') {
      at_ += 2;
      while (at_ + 1 < text_.size() && !(text_[at_] == '*' && text_[at_ + 1] == '/')) {
        if (text_[at_] == '\n') ++line_;
        ++at_;
      }
      at_ = at_ + 2 <= text_.size() ? at_ + 2 : text_.size();
    } else {
      return;
    }
  }
}

Token Lexer::Number() {
  Token token;
  token.line = line_;
  size_t begin = at_;
  auto peek = [&](size_t i) { return begin + i < text_.size() ? text_[begin + i] : '\0'; };
  auto finish = [&](Token::Kind kind, size_t end) {
    token.kind = kind;
    at_ = end;
    token.text = text_.substr(begin, end - begin);
    // A number that runs into a word ("12abc") is no number.
    if (at_ < text_.size() && IsWordPart(text_[at_])) token.kind = Token::Kind::kBad;
    return token;
  };
  if (peek(0) == '0' && (peek(1) == 'f' || peek(1) == 'F' || peek(1) == 'd' || peek(1) == 'D')) {
    bool single = peek(1) == 'f' || peek(1) == 'F';
    size_t digits = single ? 8 : 16;
    for (size_t i = 0; i < digits; ++i) {
      int digit = HexDigit(peek(2 + i));
      if (digit < 0) return finish(Token::Kind::kBad, begin + 2 + i);
      token.bits = token.bits << 4 | static_cast<uint64_t>(digit);
    }
    return finish(single ? Token::Kind::kF32 : Token::Kind::kF64, begin + 2 + digits);
  }
  size_t end = begin;
  int base = 10;
  if (peek(0) == '0' && (peek(1) == 'x' || peek(1) == 'X')) {
    base = 16;
    end += 2;
  } else if (peek(0) == '0' && (peek(1) == 'b' || peek(1) == 'B')) {
    base = 2;
    end += 2;
  } else if (peek(0) == '0' && IsDigit(peek(1))) {
    base = 8;
    end += 1;
  }
  size_t first = end;
  while (end < text_.size()) {
    int digit = HexDigit(text_[end]);
    if (digit < 0 || digit >= base) break;
    uint64_t before = token.bits;
    token.bits = token.bits * static_cast<uint64_t>(base) + static_cast<uint64_t>(digit);
    if (before > UINT64_MAX / static_cast<uint64_t>(base)) return finish(Token::Kind::kBad, end);
    ++end;
  }
  if (end == first && base != 8) return finish(Token::Kind::kBad, end);
  if ((base == 10 || base == 8) && end < text_.size() &&
      (text_[end] == '.' || text_[end] == 'e' || text_[end] == 'E')) {
    // A decimal floating-point literal; they are always f64.
    std::string copy(text_.substr(begin, 64));
    char* stop = nullptr;
    double value = strtod(copy.c_str(), &stop);
    memcpy(&token.bits, &value, 8);
    return finish(Token::Kind::kF64, begin + static_cast<size_t>(stop - copy.c_str()));
  }
  if (end < text_.size() && text_[end] == 'U') ++end;
  return finish(Token::Kind::kInteger, end);
}

Token Lexer::Next() {
  SkipBlank();
  Token token;
  token.line = line_;
  if (at_ >= text_.size()) return token;
  size_t begin = at_;
  char c = text_[at_];
  if (IsDigit(c)) return Number();
  if (IsWordStart(c) || (c == '.' && at_ + 1 < text_.size() && IsWordStart(text_[at_ + 1]))) {
    ++at_;
    while (at_ < text_.size() && IsWordPart(text_[at_])) ++at_;
    token.text = text_.substr(begin, at_ - begin);
    token.kind = c == '.' ? Token::Kind::kDirective : Token::Kind::kIdentifier;
    return token;
  }
  if (c == '"') {
    size_t end = text_.find('"', at_ + 1);
    if (end == std::string_view::npos) {
      at_ = text_.size();
      token.kind = Token::Kind::kBad;
      return token;
    }
    token.kind = Token::Kind::kString;
    token.text = text_.substr(begin + 1, end - begin - 1);
    at_ = end + 1;
    return token;
  }
  ++at_;
  token.text = text_.substr(begin, 1);
  token.kind = strchr("()[]{}<>,;:=+-!@|*.&~^", c) ? Token::Kind::kPunctuation : Token::Kind::kBad;
  token.punctuation = c;
  return token;
}

std::string_view Lexer::TakeMnemonic(const Token& first) {
  size_t begin = at_ - first.text.size();
  while (at_ < text_.size()) {
    if (text_[at_] == '.' || IsWordPart(text_[at_])) {
      ++at_;
    } else if (AdjacentPair(':', ':')) {
      at_ += 2;
    } else {
      break;
    }
  }
  return text_.substr(begin, at_ - begin);
}

void Lexer::SkipLine() {
  while (at_ < text_.size() && text_[at_] != '\n') ++at_;
}

bool Lexer::TakeBlock(std::string_view* block) {
  size_t begin = at_;
  int depth = 1;
  for (;;) {
    // Between tokens of interest anything goes, so scan characters; only comments and strings can
    // hide a brace.
    SkipBlank();
    if (at_ >= text_.size()) return false;
    char c = text_[at_];
    if (c == '"') {
      size_t end = text_.find('"', at_ + 1);
      if (end == std::string_view::npos) return false;
      at_ = end + 1;
      continue;
    }
    ++at_;
    if (c == '{') ++depth;
    if (c == '}' && --depth == 0) {
      *block = text_.substr(begin, at_ - 1 - begin);
      return true;
    }
  }
}

}  // namespace simgpu::ptx
