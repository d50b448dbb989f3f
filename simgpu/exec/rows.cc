// The instruction table: rows with their patterns expanded, by mnemonic.
#include <cstdlib>
#include <string>

#include "simgpu/exec/decode.h"

namespace simgpu::exec {

// Rows whose handlers are compiled once (ops_half.cc).
extern const Rows kOnceRows;

namespace {

// Appends every mnemonic that a pattern stands for.
void Expand(const char* pattern, const std::string& prefix, std::vector<std::string>* out) {
  std::string text = prefix;
  for (const char* p = pattern; *p; ++p) {
    if (*p != '[' && *p != '(') {
      text += *p;
      continue;
    }
    char close = *p == '[' ? ']' : ')';
    const char* end = p;
    while (*end != close) ++end;
    if (*p == '[') Expand(end + 1, text, out);
    std::string choice;
    for (const char* q = p + 1; q <= end; ++q) {
      if (*q == '|' || q == end) {
        Expand(end + 1, text + choice, out);
        choice.clear();
      } else {
        choice += *q;
      }
    }
    return;
  }
  out->push_back(text);
}

RowTable BuildTable(const HandlerSet& set) {
  RowTable table;
  std::vector<std::string> names;
  for (const Rows* rows : {&set.integer, &set.bits, &set.f32, &set.f64, &set.compare, &kOnceRows}) {
    for (size_t k = 0; k < rows->count; ++k) {
      names.clear();
      Expand(rows->rows[k].pattern, "", &names);
      // The first row wins: fast forms stand before general ones.
      for (std::string& name : names) table.emplace(std::move(name), &rows->rows[k]);
    }
  }
  return table;
}

struct FlagName {
  std::string_view name;
  uint32_t flag;
};
constexpr FlagName kFlagNames[] = {
    {"rn", kRn},         {"rz", kRz},           {"rm", kRm},
    {"rp", kRp},         {"ftz", kFtz},         {"sat", kSat},
    {"rni", kRni},       {"rzi", kRzi},         {"rmi", kRmi},
    {"rpi", kRpi},       {"and", kAnd},         {"or", kOr},
    {"xor", kXor},       {"NaN", kNan},         {"cc", kCarryOut},
    {"abs", kAbs},       {"xorsign", kXorSign}, {"shiftamt", kShiftAmount},
    {"approx", kApprox}, {"wrap", kWrap},       {"relu", kRelu},
    {"full", kFull},
};

}  // namespace

const RowTable& RowsOf(const HandlerSet& handlers) {
  if (&handlers == &v3::Handlers()) {
    static const RowTable table = BuildTable(v3::Handlers());
    return table;
  }
  static const RowTable table = BuildTable(v2::Handlers());
  return table;
}

uint32_t ModifierFlags(std::string_view mnemonic) {
  uint32_t flags = 0;
  size_t at = mnemonic.find('.');
  while (at != std::string_view::npos) {
    size_t end = mnemonic.find('.', at + 1);
    std::string_view word =
        mnemonic.substr(at + 1, end == std::string_view::npos ? end : end - at - 1);
    for (const FlagName& each : kFlagNames)
      if (each.name == word) flags |= each.flag;
    at = end;
  }
  return flags;
}

const HandlerSet& BestHandlers() {
  // SIMGPU_ISA=v2 asks for the older set, to test it.
  static const bool modern = [] {
    const char* wish = std::getenv("SIMGPU_ISA");
    if (wish && std::string_view(wish) == "v2") return false;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
  }();
  return modern ? v3::Handlers() : v2::Handlers();
}

}  // namespace simgpu::exec
