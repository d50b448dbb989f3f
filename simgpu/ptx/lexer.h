// Cuts PTX text into tokens. Comments vanish; the line of each token is kept for messages.
#pragma once

#include <cstdint>
#include <string_view>

namespace simgpu::ptx {

struct Token {
  enum class Kind : uint8_t {
    kEnd,
    kIdentifier,  // name, %reg, $label, _
    kDirective,   // .reg
    kInteger,
    kF32,
    kF64,
    kString,
    kPunctuation,  // one character
    kBad,
  };
  Kind kind = Kind::kEnd;
  char punctuation = 0;
  int line = 0;
  uint64_t bits = 0;      // value of a number
  std::string_view text;  // as written

  bool Is(char c) const { return kind == Kind::kPunctuation && punctuation == c; }
  bool IsWord(std::string_view word) const {
    return (kind == Kind::kIdentifier || kind == Kind::kDirective) && text == word;
  }
};

class Lexer {
 public:
  Lexer(std::string_view text, int line) : text_(text), line_(line) {}

  Token Next();
  // The rest of a mnemonic whose first word was just read: ".global.nc.f32".
  std::string_view TakeMnemonic(const Token& first);
  // Passes over everything up to the end of the line (.loc and .file have no other end).
  void SkipLine();
  // Right after '{' was read: the text up to the matching '}', which is consumed too. False if
  // there is none.
  bool TakeBlock(std::string_view* block);

  size_t position() const { return at_; }
  int line() const { return line_; }
  void Rewind(size_t position, int line) {
    at_ = position;
    line_ = line;
  }
  // The next character is this one, with nothing between.
  bool Adjacent(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool AdjacentPair(char a, char b) const {
    return at_ + 1 < text_.size() && text_[at_] == a && text_[at_ + 1] == b;
  }

 private:
  void SkipBlank();
  Token Number();

  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace simgpu::ptx
