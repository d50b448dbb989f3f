// Seeded damage, for tests that feed a reader what it should refuse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace simgpu_test {

// How many mutations a test tries: the given number, or SIMGPU_MUTATIONS for a longer run by hand.
inline int Mutations(int usual) {
  const char* wish = std::getenv("SIMGPU_MUTATIONS");
  return wish != nullptr ? std::atoi(wish) : usual;
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  size_t Below(size_t bound) { return bound == 0 ? 0 : random_() % bound; }

  // Text: what an editor, a broken tool or an enemy does to it.
  void Text(std::string* text) {
    for (size_t k = 1 + Below(3); k > 0 && !text->empty(); --k) TextOnce(text);
  }
  // Bytes: flips, and fields of 1, 2, 4 or 8 bytes that become extreme.
  void Bytes(std::string* bytes, size_t first, size_t end) {
    for (size_t k = 1 + Below(3); k > 0; --k) {
      const size_t at = first + Below(end - first);
      if (Below(2) == 0) {
        (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << Below(8)));
      } else {
        const size_t width = size_t{1} << Below(4);
        const uint64_t value = Extreme();
        std::memcpy(bytes->data() + at, &value, std::min(width, end - at));
      }
    }
  }

 private:
  uint64_t Extreme() {
    static constexpr uint64_t kValues[] = {0,
                                           1,
                                           3,
                                           63,
                                           65535,
                                           1u << 20,
                                           0x7fffffff,
                                           0x80000000,
                                           0xffffffff,
                                           uint64_t{1} << 32,
                                           uint64_t{1} << 40,
                                           INT64_MAX,
                                           uint64_t{1} << 63,
                                           UINT64_MAX - 63,
                                           UINT64_MAX};
    return kValues[Below(sizeof(kValues) / sizeof(kValues[0]))];
  }
  static bool IsWordPart(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '%' || c == '$' || c == '.';
  }
  // [begin, end) of a word of the text, perhaps empty.
  std::pair<size_t, size_t> Word(const std::string& text) {
    size_t begin = Below(text.size());
    while (begin < text.size() && !IsWordPart(text[begin])) ++begin;
    while (begin > 0 && begin < text.size() && IsWordPart(text[begin - 1])) --begin;
    size_t end = begin;
    while (end < text.size() && IsWordPart(text[end])) ++end;
    return {begin, end};
  }
  std::pair<size_t, size_t> Line(const std::string& text) {
    const size_t at = Below(text.size());
    size_t begin = text.rfind('\n', at);
    begin = begin == std::string::npos ? 0 : begin;
    const size_t end = text.find('\n', begin + 1);
    return {begin, end == std::string::npos ? text.size() : end};
  }
  void TextOnce(std::string* text) {
    const size_t at = Below(text->size());
    switch (Below(10)) {
      case 0:
        text->resize(at);
        break;
      case 1:
        (*text)[at] = static_cast<char>(Below(256));
        break;
      case 2: {
        static constexpr char kMarks[] = "{}()[];:,.@%$=+-!|<>\"/*0 9aZ\n";
        (*text)[at] = kMarks[Below(sizeof(kMarks) - 1)];
        break;
      }
      case 3: {  // a number becomes extreme
        const size_t digit = text->find_first_of("0123456789", at);
        if (digit == std::string::npos) break;
        size_t end = digit;
        while (end < text->size() && (*text)[end] >= '0' && (*text)[end] <= '9') ++end;
        text->replace(digit, end - digit, std::to_string(Extreme()));
        break;
      }
      case 4: {  // a line goes
        const auto [begin, end] = Line(*text);
        text->erase(begin, end - begin);
        break;
      }
      case 5: {  // a line stands elsewhere too
        const auto [begin, end] = Line(*text);
        const std::string line = text->substr(begin, end - begin);
        text->insert(Line(*text).first, line);
        break;
      }
      case 6: {  // a word becomes another word
        const auto [begin, end] = Word(*text);
        const auto [other, other_end] = Word(*text);
        const std::string word = text->substr(other, other_end - other);
        text->replace(begin, end - begin, word);
        break;
      }
      case 7:  // a piece goes
        text->erase(at, Below(80));
        break;
      case 8: {  // a mark, very often
        static constexpr char kMarks[] = "{([-!@+,;.9f";
        text->insert(at, std::string(Below(3000), kMarks[Below(sizeof(kMarks) - 1)]));
        break;
      }
      default: {  // a word goes
        const auto [begin, end] = Word(*text);
        text->erase(begin, end - begin);
      }
    }
  }

  std::mt19937 random_;
};

}  // namespace simgpu_test
