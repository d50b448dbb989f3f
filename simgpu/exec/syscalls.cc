#include "simgpu/exec/syscalls.h"

#include <cstdio>
#include <cstring>
#include <string>

#include "simgpu/exec/decode.h"
#include "simgpu/exec/engine.h"
#include "simgpu/exec/heap.h"

namespace simgpu::exec {
namespace {

constexpr uint32_t kMaxText = 1 << 16;

// Copies from a generic address as a kernel's load would; false after a fault.
bool Read(Context& c, const Inst& i, uint32_t lane, uint64_t address, void* out, uint32_t bytes) {
  uint64_t addresses[kLanes] = {};
  addresses[lane] = address;
  if (!CheckGeneric(c, i, 1u << lane, addresses, bytes, false)) return false;
  memcpy(out, reinterpret_cast<const void*>(address), bytes);
  return true;
}

bool ReadText(Context& c, const Inst& i, uint32_t lane, uint64_t address, std::string* out) {
  out->clear();
  for (uint32_t k = 0; k < kMaxText; ++k) {
    char each;
    if (!Read(c, i, lane, address + k, &each, 1)) return false;
    if (each == 0) return true;
    *out += each;
  }
  return true;
}

uint64_t Argument(const Context& c, const CallSite& site, size_t k, uint32_t lane) {
  uint64_t value = 0;
  if (k < site.arguments.size())
    memcpy(&value, c.local + c.local_stride * lane + c.frame->local_base + site.arguments[k].offset,
           site.arguments[k].bytes < 8 ? site.arguments[k].bytes : 8);
  return value;
}

template <typename T>
void Append(std::string* text, const std::string& spec, T value) {
  char small[128];
  int size = snprintf(small, sizeof(small), spec.c_str(), value);
  if (size < 0) return;
  if (static_cast<size_t>(size) < sizeof(small)) {
    *text += small;
    return;
  }
  std::string large(static_cast<size_t>(size) + 1, '\0');
  snprintf(large.data(), large.size(), spec.c_str(), value);
  large.pop_back();
  *text += large;
}

// Formats like C. The arguments lie packed with natural alignment: int 4 bytes, long, pointer and
// double 8.
class Printer {
 public:
  Printer(Context& c, const Inst& i, uint32_t lane, uint64_t arguments)
      : c_(c), i_(i), lane_(lane), at_(arguments) {}
  // The number of conversions made, or -1 after a fault.
  int Run(const std::string& format, std::string* text);

 private:
  template <typename T>
  bool Take(T* value) {
    at_ = (at_ + sizeof(T) - 1) & ~uint64_t{sizeof(T) - 1};
    if (!Read(c_, i_, lane_, at_, value, sizeof(T))) return false;
    at_ += sizeof(T);
    return true;
  }
  bool Convert(std::string spec, char kind, int length, std::string* text);

  Context& c_;
  const Inst& i_;
  uint32_t lane_;
  uint64_t at_;
};

int Printer::Run(const std::string& format, std::string* text) {
  int count = 0;
  for (size_t k = 0; k < format.size();) {
    if (format[k] != '%') {
      *text += format[k++];
      continue;
    }
    size_t begin = k++;
    if (k < format.size() && format[k] == '%') {
      *text += '%';
      ++k;
      continue;
    }
    std::string spec = "%";
    auto number = [&] {
      // A width of a million characters is nobody's wish.
      int digits = 0;
      while (k < format.size() && format[k] >= '0' && format[k] <= '9') {
        if (digits++ < 4) spec += format[k];
        ++k;
      }
    };
    auto star_or_number = [&] {
      if (k < format.size() && format[k] == '*') {
        int32_t value = 0;
        ++k;
        if (!Take(&value)) return false;
        spec += std::to_string(value > 9999 ? 9999 : value < -9999 ? -9999 : value);
        return true;
      }
      number();
      return true;
    };
    while (k < format.size() && strchr("-+ #0", format[k])) {
      if (spec.size() < 8) spec += format[k];
      ++k;
    }
    if (!star_or_number()) return -1;
    if (k < format.size() && format[k] == '.') {
      spec += format[k++];
      if (!star_or_number()) return -1;
    }
    int length = 0;  // 8 for l, ll, z, j, t; -1 for h, -2 for hh
    while (k < format.size() && strchr("hlLzjt", format[k])) {
      length = format[k] == 'h' ? length - 1 : 8;
      ++k;
    }
    if (k >= format.size()) {
      *text += format.substr(begin);
      break;
    }
    char kind = format[k++];
    if (!strchr("diouxXcsfFeEgGaAp", kind)) {
      *text += format.substr(begin, k - begin);
      continue;
    }
    if (!Convert(std::move(spec), kind, length, text)) return -1;
    ++count;
  }
  return count;
}

bool Printer::Convert(std::string spec, char kind, int length, std::string* text) {
  if (kind == 's') {
    uint64_t pointer = 0;
    std::string value;
    if (!Take(&pointer)) return false;
    if (pointer == 0)
      value = "(null)";
    else if (!ReadText(c_, i_, lane_, pointer, &value))
      return false;
    Append(text, spec + "s", value.c_str());
  } else if (kind == 'p') {
    uint64_t pointer = 0;
    if (!Take(&pointer)) return false;
    Append(text, spec + "p", reinterpret_cast<void*>(pointer));
  } else if (strchr("fFeEgGaA", kind)) {
    double value = 0;
    if (!Take(&value)) return false;
    Append(text, spec + kind, value);
  } else if (kind == 'c') {
    int32_t value = 0;
    if (!Take(&value)) return false;
    if (value == 0)
      *text += '\0';
    else
      Append(text, spec + "c", value);
  } else if (length == 8) {
    long long value = 0;
    if (!Take(&value)) return false;
    Append(text, spec + "ll" + kind, value);
  } else {
    int32_t value = 0;
    if (!Take(&value)) return false;
    if (length < 0) spec += length == -1 ? "h" : "hh";
    Append(text, spec + kind, value);
  }
  return true;
}

void Print(Context& c, const Inst& i, uint32_t mask, const CallSite& site) {
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t lane = static_cast<uint32_t>(__builtin_ctz(m));
    std::string format, text;
    if (!ReadText(c, i, lane, Argument(c, site, 0, lane), &format)) return;
    int count = Printer(c, i, lane, Argument(c, site, 1, lane)).Run(format, &text);
    if (count < 0) return;
    if (c.engine->request().print) c.engine->request().print(c.engine->request().print_user, text);
    if (!site.results.empty() && site.results[0].bytes >= 4)
      memcpy(c.local + c.local_stride * lane + c.frame->local_base + site.results[0].offset, &count,
             4);
  }
}

void Assert(Context& c, const Inst& i, uint32_t mask, const CallSite& site) {
  uint32_t lane = static_cast<uint32_t>(__builtin_ctz(mask));
  std::string condition, file, function;
  if (!ReadText(c, i, lane, Argument(c, site, 0, lane), &condition) ||
      !ReadText(c, i, lane, Argument(c, site, 1, lane), &file) ||
      !ReadText(c, i, lane, Argument(c, site, 3, lane), &function))
    return;
  uint32_t line = static_cast<uint32_t>(Argument(c, site, 2, lane));
  // What the CUDA driver prints, for each thread that failed.
  if (c.engine->request().print_error) {
    for (uint32_t m = mask; m; m &= m - 1) {
      uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
      std::string text =
          file + ":" + std::to_string(line) + ": " + function + ": block: [" +
          std::to_string(c.block->id[0]) + "," + std::to_string(c.block->id[1]) + "," +
          std::to_string(c.block->id[2]) + "], thread: [" + std::to_string(c.warp->tid[0][l]) +
          "," + std::to_string(c.warp->tid[1][l]) + "," + std::to_string(c.warp->tid[2][l]) +
          "] Assertion `" + condition + "` failed.\n";
      c.engine->request().print_error(c.engine->request().print_user, text);
    }
  }
  c.engine->SetFault(
      Fault::kAssert, &i, lane,
      "the assertion (" + condition + ") of " + file + ":" + std::to_string(line) + " fails");
}

// In the order of the lanes.
void Malloc(Context& c, uint32_t mask, const CallSite& site) {
  DeviceHeap* const heap = c.engine->memory().heap();
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t lane = static_cast<uint32_t>(__builtin_ctz(m));
    uint64_t bytes = Argument(c, site, 0, lane);
    uint64_t address = heap ? heap->Allocate(c.engine->memory(), bytes) : 0;
    if (!site.results.empty() && site.results[0].bytes >= 8)
      memcpy(c.local + c.local_stride * lane + c.frame->local_base + site.results[0].offset,
             &address, 8);
  }
}

void Free(Context& c, const Inst& i, uint32_t mask, const CallSite& site) {
  DeviceHeap* const heap = c.engine->memory().heap();
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t lane = static_cast<uint32_t>(__builtin_ctz(m));
    uint64_t address = Argument(c, site, 0, lane);
    if (address == 0 || (heap && heap->Free(address))) continue;
    char text[80];
    snprintf(text, sizeof(text), "free of address (0x%llx), which malloc has not returned",
             static_cast<unsigned long long>(address));
    c.engine->SetFault(Fault::kTrap, &i, lane, text);
    return;
  }
}

}  // namespace

Builtin BuiltinByName(std::string_view name) {
  if (name == "vprintf") return Builtin::kPrint;
  if (name == "__assertfail") return Builtin::kAssert;
  if (name == "malloc") return Builtin::kMalloc;
  if (name == "free") return Builtin::kFree;
  return Builtin::kNone;
}

void RunBuiltin(Context& c, const Inst& i, uint32_t mask, const CallSite& site) {
  switch (site.builtin) {
    case Builtin::kPrint:
      Print(c, i, mask, site);
      break;
    case Builtin::kAssert:
      Assert(c, i, mask, site);
      break;
    case Builtin::kMalloc:
      Malloc(c, mask, site);
      break;
    case Builtin::kFree:
      Free(c, i, mask, site);
      break;
    default:
      break;
  }
}

}  // namespace simgpu::exec
