#include "simgpu/exec/decode.h"

#include <cstring>
#include <utility>

#include "simgpu/exec/decoder.h"
#include "simgpu/exec/ops_control.h"

namespace simgpu::exec {

using ptx::Space;

namespace {
// Registers of one function for a warp: 256 Ki of them of 64 bits, more than any compiler writes.
constexpr uint32_t kMaxFrameBytes = 64u << 20;
}  // namespace

bool Decoder::Fail(std::string message) {
  if (error_->message.empty()) {
    error_->line = s_ ? s_->line : f_.line;
    error_->message = std::move(message);
  }
  return false;
}

bool Decoder::Refuse(const char* why) {
  return Fail("The instruction (" + std::string(s_->mnemonic) + ") of function (" +
              std::string(f_.name) + ") " + why + ".");
}

Inst& Decoder::Emit(Handler fn) {
  Inst i;
  i.fn = fn;
  i.guard = guard_;
  i.line = static_cast<uint32_t>(s_->line);
  code_->insts.push_back(i);
  return code_->insts.back();
}

uint32_t Decoder::Slot(uint32_t bytes) {
  uint32_t size = bytes == 1 ? 4 : bytes * kLanes;
  uint32_t alignment = bytes == 1 ? 4 : 64;
  bytes_ = (bytes_ + alignment - 1) & ~(alignment - 1);
  uint32_t at = bytes_;
  if (bytes_ <= kMaxFrameBytes) bytes_ += size;  // Run refuses what went over
  return at;
}

// In order of first use, so that what is used together lies together.
uint32_t Decoder::RegisterSlot(int32_t reg) {
  uint32_t& slot = register_slots_[static_cast<size_t>(reg)];
  if (slot == 0) {
    const ptx::Type& type = f_.registers[static_cast<size_t>(reg)];
    slot = Slot(type.kind == 'p' ? 1 : type.bytes == 8 ? 8 : 4);
  }
  return slot;
}

uint32_t Decoder::ConstantSlot(uint8_t bytes, uint64_t value) {
  if (bytes == 4) value = static_cast<uint32_t>(value);
  uint32_t& slot = constant_slots_[{bytes, value}];
  if (slot == 0) {
    slot = Slot(bytes);
    code_->constants.push_back({slot, bytes, false, value});
  }
  return slot;
}

uint32_t Decoder::PredicateConstant(bool value) {
  uint32_t& slot = constant_slots_[{uint8_t{1}, uint64_t{value}}];
  if (slot == 0) {
    slot = Slot(1);
    code_->constants.push_back({slot, 4, true, value});
  }
  return slot;
}

namespace {
int LetterBytes(char letter) {
  switch (letter) {
    case 's':
    case 'h':
      return 2;
    case 'l':
    case 'd':
      return 8;
    case 'p':
      return 1;
    default:
      return 4;
  }
}
// Does a register of this type serve an operand of this kind? Types do not matter, widths do.
bool Fits(const ptx::Type& type, char letter) {
  if (letter == 'p') return type.kind == 'p';
  return type.kind != 'p' && type.bytes == LetterBytes(letter);
}
}  // namespace

bool Decoder::Predicate(const Operand& operand, uint32_t* slot) {
  if (operand.kind == Operand::Kind::kInteger) {
    *slot = PredicateConstant(operand.value != 0);
    return true;
  }
  if (operand.kind != Operand::Kind::kRegister ||
      f_.registers[static_cast<size_t>(operand.reg)].kind != 'p')
    return Refuse("has an operand that is not a predicate");
  *slot = RegisterSlot(operand.reg);
  if (operand.negated) {
    uint32_t temporary = Slot(1);
    Inst& i = Emit(rows_.at("not.pred")->fn);
    i.a = *slot;
    i.d = temporary;
    *slot = temporary;
  }
  return true;
}

bool Decoder::Source(const Operand& operand, char letter, uint32_t* slot) {
  if (letter == 'p') return Predicate(operand, slot);
  bool wide = LetterBytes(letter) == 8;
  switch (operand.kind) {
    case Operand::Kind::kRegister:
      if (!Fits(f_.registers[static_cast<size_t>(operand.reg)], letter))
        return Fail("The register (" + std::string(operand.name) + ") has the wrong width for (" +
                    std::string(s_->mnemonic) + ").");
      if (operand.negated) return Refuse("has a negated operand, which is not supported");
      if (operand.value != 0) return Refuse("has an operand that is a sum");
      *slot = RegisterSlot(operand.reg);
      return true;
    case Operand::Kind::kInteger:
      if (letter == 'f' || letter == 'd') return Refuse("has an integer where a float is needed");
      *slot = ConstantSlot(wide ? 8 : 4, static_cast<uint64_t>(operand.value));
      return true;
    case Operand::Kind::kF32:
    case Operand::Kind::kF64: {
      uint64_t bits = static_cast<uint64_t>(operand.value);
      bool single = operand.kind == Operand::Kind::kF32;
      if (letter == 'f' && !single) {
        double value;
        memcpy(&value, &bits, 8);
        float narrow = static_cast<float>(value);
        uint32_t narrow_bits;
        memcpy(&narrow_bits, &narrow, 4);
        bits = narrow_bits;
      } else if (letter == 'd' && single) {
        uint32_t narrow_bits = static_cast<uint32_t>(bits);
        float value;
        memcpy(&value, &narrow_bits, 4);
        double extended = value;
        memcpy(&bits, &extended, 8);
      } else if ((letter == 'i' && !single) || (letter == 'l' && single) || letter == 's' ||
                 letter == 'h') {
        return Refuse("has a floating-point constant of the wrong width");
      }
      *slot = ConstantSlot(wide ? 8 : 4, bits);
      return true;
    }
    case Operand::Kind::kSymbol:
    case Operand::Kind::kVariable:
      return Symbol(operand, letter, slot);
    default:
      return Refuse("has an operand of a kind that it cannot have");
  }
}

const ptx::Function* Decoder::FunctionByName(std::string_view name, int32_t* index) const {
  auto at = module_.function_index.find(name);
  if (at == module_.function_index.end()) return nullptr;
  *index = at->second;
  return &module_.functions[static_cast<size_t>(at->second)];
}

bool Decoder::Symbol(const Operand& operand, char letter, uint32_t* slot) {
  bool wide = LetterBytes(letter) == 8;
  if (letter != 'i' && letter != 'l') return Refuse("has a symbol where it needs a number");
  uint64_t offset = static_cast<uint64_t>(operand.value);
  const ptx::Variable* variable = nullptr;
  if (operand.kind == Operand::Kind::kVariable) {
    variable = &f_.variables[static_cast<size_t>(operand.variable)];
    if (variable->space == Space::kLocal || variable->space == Space::kParam) {
      if (!wide) return Refuse("takes an address in a 32-bit operand");
      bool entry_parameter =
          f_.entry && static_cast<size_t>(operand.variable) < f_.parameters.size();
      uint32_t temporary = Slot(8);
      Inst& i = Emit(entry_parameter ? ParameterAddress : LocalAddress);
      i.d = temporary;
      i.imm = static_cast<int64_t>(offset);
      if (entry_parameter) {
        i.imm += code_->variable_offsets[static_cast<size_t>(operand.variable)];
      } else {
        i.imm += code_->variable_offsets[static_cast<size_t>(operand.variable)];
      }
      *slot = temporary;
      return true;
    }
    if (variable->space != Space::kShared)
      return Fail("The variable (" + std::string(operand.name) +
                  ") in a function's scope is not supported.");
  } else {
    if (operand.name[0] == '%' &&
        module_.variable_index.find(operand.name) == module_.variable_index.end())
      return SpecialRegister(operand.name, letter, slot);
    int32_t index = -1;
    if (operand.name == "WARP_SZ") {
      *slot = ConstantSlot(wide ? 8 : 4, kLanes);
      return true;
    }
    if (FunctionByName(operand.name, &index)) {
      if (!wide) return Refuse("takes an address in a 32-bit operand");
      *slot = ConstantSlot(8, FunctionHandle(index));
      return true;
    }
    auto at = module_.variable_index.find(operand.name);
    if (at == module_.variable_index.end())
      return Fail("The name (" + std::string(operand.name) + ") is not declared.");
    variable = &module_.variables[static_cast<size_t>(at->second)];
    if (variable->space != Space::kShared) {
      if (!wide) return Refuse("takes an address in a 32-bit operand");
      *slot = ConstantSlot(8, addresses_[static_cast<size_t>(at->second)] + offset);
      return true;
    }
  }
  uint64_t base = image_.dynamic_shared_offset;
  if (variable->bytes != 0) base = image_.shared_offsets.at(variable);
  *slot = ConstantSlot(wide ? 8 : 4, base + offset);
  return true;
}

bool Decoder::SpecialRegister(std::string_view name, char letter, uint32_t* slot) {
  struct Entry {
    std::string_view name;
    Special special;
    bool vector = false;
    bool wide = false;
  };
  static constexpr Entry kEntries[] = {
      {"%tid", Special::kTid, true},
      {"%ntid", Special::kNtid, true},
      {"%ctaid", Special::kCtaid, true},
      {"%nctaid", Special::kNctaid, true},
      {"%laneid", Special::kLaneid},
      {"%warpid", Special::kWarpid},
      {"%nwarpid", Special::kNwarpid},
      {"%smid", Special::kSmid},
      {"%nsmid", Special::kNsmid},
      {"%gridid", Special::kGridid, false, true},
      {"%lanemask_eq", Special::kLanemaskEq},
      {"%lanemask_le", Special::kLanemaskLe},
      {"%lanemask_lt", Special::kLanemaskLt},
      {"%lanemask_ge", Special::kLanemaskGe},
      {"%lanemask_gt", Special::kLanemaskGt},
      {"%clock", Special::kClock},
      {"%clock_hi", Special::kClockHi},
      {"%clock64", Special::kClock64, false, true},
      {"%globaltimer", Special::kGlobaltimer, false, true},
      {"%globaltimer_lo", Special::kGlobaltimerLo},
      {"%globaltimer_hi", Special::kGlobaltimerHi},
      {"%dynamic_smem_size", Special::kDynamicShared},
      {"%total_smem_size", Special::kTotalShared},
      {"%envreg1", Special::kEnvreg1},
      {"%envreg2", Special::kEnvreg2},
  };
  size_t dot = name.find('.');
  std::string_view base = name.substr(0, dot);
  for (const Entry& entry : kEntries) {
    if (entry.name != base) continue;
    uint32_t component = 0;
    Special special = entry.special;
    if (entry.vector) {
      std::string_view part = dot == std::string_view::npos ? "" : name.substr(dot + 1);
      if (part == "x" || part == "y" || part == "z") {
        component = static_cast<uint32_t>(part[0] - 'x');
      } else if (part == "w") {
        special = Special::kZero;
      } else {
        break;
      }
    } else if (dot != std::string_view::npos) {
      break;
    }
    bool wide = LetterBytes(letter) == 8;
    if (letter == 's' || letter == 'h' || (entry.wide && !wide && special != Special::kGridid))
      return Refuse("reads a special register in an operand of the wrong width");
    uint32_t temporary = Slot(wide ? 8 : 4);
    Inst& i = Emit(wide ? ReadSpecial64 : ReadSpecial);
    i.d = temporary;
    i.x = static_cast<uint32_t>(special);
    i.e = component;
    *slot = temporary;
    return true;
  }
  return Fail("The register (" + std::string(name) + ") is not declared or not supported.");
}

bool Decoder::Target(const Operand& operand, char letter, uint32_t* slot) {
  if (operand.kind == Operand::Kind::kSink) {
    *slot = Slot(letter == 'p' ? 1 : LetterBytes(letter) == 8 ? 8 : 4);
    return true;
  }
  if (operand.kind != Operand::Kind::kRegister || operand.negated)
    return Refuse("has a destination that is not a register");
  if (!Fits(f_.registers[static_cast<size_t>(operand.reg)], letter))
    return Fail("The register (" + std::string(operand.name) + ") has the wrong width for (" +
                std::string(s_->mnemonic) + ").");
  *slot = RegisterSlot(operand.reg);
  return true;
}

bool Decoder::LooseSource(const Operand& operand, int bytes, uint32_t* slot) {
  if (operand.kind == Operand::Kind::kRegister) {
    const ptx::Type& type = f_.registers[static_cast<size_t>(operand.reg)];
    if (type.kind == 'p') return Refuse("has a predicate where it needs a number");
    if (type.bytes < bytes) return Refuse("has a register narrower than its type");
    if (operand.negated || operand.value != 0) return Refuse("has an operand that is not plain");
    if (type.bytes == 8 && bytes < 8) {
      uint32_t temporary = Slot(4);
      Inst& i = Emit(Narrow);
      i.a = RegisterSlot(operand.reg);
      i.d = temporary;
      *slot = temporary;
      return true;
    }
    *slot = RegisterSlot(operand.reg);
    return true;
  }
  return Source(operand, bytes == 8 ? 'l' : 'i', slot);
}

bool Decoder::LooseTarget(const Operand& operand, int bytes, uint32_t* slot) {
  if (operand.kind == Operand::Kind::kSink) {
    *slot = Slot(bytes == 8 ? 8 : 4);
    return true;
  }
  if (operand.kind != Operand::Kind::kRegister)
    return Refuse("has a destination that is not a register");
  const ptx::Type& type = f_.registers[static_cast<size_t>(operand.reg)];
  if (type.kind == 'p' || type.bytes < bytes)
    return Refuse("has a destination narrower than its type");
  *slot = RegisterSlot(operand.reg);
  if (type.bytes == 8 && bytes < 8) {
    uint32_t temporary = Slot(4);
    widen_.push_back({temporary, *slot});
    *slot = temporary;
  }
  return true;
}

void Decoder::WidenTargets(bool sign) {
  for (auto [temporary, target] : widen_) {
    Inst& i = Emit(sign ? ExtendSign : ExtendZero);
    i.a = temporary;
    i.d = target;
  }
  widen_.clear();
}

bool Decoder::Generic(const Row& row) {
  uint32_t flags = ModifierFlags(s_->mnemonic);
  uint32_t slots[6] = {};
  uint32_t second = 0;
  size_t at = 0, filled = 0;
  char target_letter = 0;
  for (const char* letter = row.shape; *letter; ++letter) {
    if (*letter == 'c' && !(flags & (kAnd | kOr | kXor))) continue;
    if (at >= s_->operands.size()) return Refuse("has too few operands");
    const Operand& operand = s_->operands[at++];
    bool target = *letter >= 'A' && *letter <= 'Z';
    char kind = target ? static_cast<char>(*letter - 'A' + 'a') : *letter == 'c' ? 'p' : *letter;
    if (target) {
      target_letter = kind;
      if (!Target(operand, kind, &slots[filled])) return false;
      if (operand.second != -1) {
        if (kind != 'p') return Refuse("has a second destination");
        if (operand.second >= 0) {
          if (f_.registers[static_cast<size_t>(operand.second)].kind != 'p')
            return Refuse("has a second destination that is not a predicate");
          second = RegisterSlot(operand.second);
        }
      }
    } else if (!Source(operand, kind, &slots[filled])) {
      return false;
    }
    ++filled;
  }
  if (at != s_->operands.size()) return Refuse("has too many operands");
  (void)target_letter;
  bool carry =
      (flags & kCarryOut) || words_[0] == "addc" || words_[0] == "subc" || words_[0] == "madc";
  if (carry) {
    if (!carry_slot_) carry_slot_ = Slot(1);
    second = carry_slot_;
  }
  Inst& i = Emit(row.fn);
  i.flags = flags;
  i.d = slots[0];
  i.a = slots[1];
  i.b = slots[2];
  i.c = slots[3];
  i.e = second ? second : slots[4];
  return true;
}

bool Decoder::Move() {
  if (s_->operands.size() != 2 || words_.size() != 2) return Refuse("is not understood");
  ptx::Type type = ptx::ParseType(words_[1]);
  const Operand& target = s_->operands[0];
  const Operand& source = s_->operands[1];
  if (type.kind == 'p') {
    uint32_t a, d;
    if (!Predicate(source, &a) || !Target(target, 'p', &d)) return false;
    Inst& i = Emit(set_.move_predicate);
    i.a = a;
    i.d = d;
    return true;
  }
  if (type.kind == 0 || type.bytes == 1 || type.bytes > 8) return Refuse("is not supported");
  if (target.kind == Operand::Kind::kVector) return Unpack(target, source, type.bytes);
  if (source.kind == Operand::Kind::kVector) return Pack(target, source, type.bytes);
  char letter = type.bytes == 8 ? 'l' : type.bytes == 2 ? 's' : 'i';
  // A decimal literal is an f64 that takes the width of the type.
  if (type.kind == 'f' && type.bytes >= 4 &&
      (source.kind == Operand::Kind::kF32 || source.kind == Operand::Kind::kF64))
    letter = type.bytes == 8 ? 'd' : 'f';
  uint32_t a, d;
  if (!Source(source, letter, &a) || !Target(target, letter, &d)) return false;
  Inst& i = Emit(type.bytes == 8 ? set_.move64 : set_.move32);
  i.a = a;
  i.d = d;
  return true;
}

bool Decoder::Pack(const Operand& target, const Operand& source, int bytes) {
  size_t count = source.elements.size();
  if ((count != 2 && count != 4) || bytes / static_cast<int>(count) < 1)
    return Refuse("packs a number of parts that does not fit");
  int part = bytes / static_cast<int>(count);
  std::vector<uint32_t> slots;
  for (const Operand& element : source.elements) {
    uint32_t slot;
    if (!LooseSource(element, part, &slot)) return false;
    slots.push_back(slot);
  }
  auto pair = [&](uint32_t low, uint32_t high, int bits, uint32_t d) {
    Inst& i = Emit(Pack32);
    i.a = low;
    i.b = high;
    i.imm = bits;
    i.d = d;
  };
  uint32_t d;
  if (!Target(target, bytes == 8 ? 'l' : bytes == 2 ? 's' : 'i', &d)) return false;
  if (count == 4) {
    uint32_t low = Slot(4), high = Slot(4);
    pair(slots[0], slots[1], part * 8, low);
    pair(slots[2], slots[3], part * 8, high);
    slots = {low, high};
    part *= 2;
  }
  if (bytes == 8) {
    Inst& i = Emit(Pack64);
    i.a = slots[0];
    i.b = slots[1];
    i.d = d;
  } else {
    pair(slots[0], slots[1], part * 8, d);
  }
  return true;
}

bool Decoder::Unpack(const Operand& target, const Operand& source, int bytes) {
  size_t count = target.elements.size();
  if ((count != 2 && count != 4) || bytes / static_cast<int>(count) < 1)
    return Refuse("unpacks a number of parts that does not fit");
  int part = bytes / static_cast<int>(count);
  uint32_t a;
  if (!Source(source, bytes == 8 ? 'l' : bytes == 2 ? 's' : 'i', &a)) return false;
  // The source may be a destination too: read all before writing any.
  std::vector<std::pair<uint32_t, uint32_t>> moves;
  for (size_t k = 0; k < count; ++k) {
    const Operand& element = target.elements[k];
    if (element.kind == Operand::Kind::kSink) continue;
    uint32_t d;
    if (!Target(element, part == 4 ? 'i' : 's', &d)) return false;
    uint32_t temporary = d == a ? Slot(4) : d;
    if (temporary != d) moves.push_back({temporary, d});
    Inst& i = Emit(bytes == 8 ? Unpack64 : Unpack32);
    i.a = a;
    i.d = temporary;
    i.imm = static_cast<int64_t>(k) * part * 8;
    i.b = part == 4 ? ~0u : (1u << (part * 8)) - 1;
  }
  for (auto [from, to] : moves) {
    Inst& i = Emit(set_.move32);
    i.a = from;
    i.d = to;
  }
  return true;
}

bool Decoder::Cvta() {
  if (s_->operands.size() != 2) return Refuse("has the wrong number of operands");
  bool to = words_.size() > 1 && words_[1] == "to";
  std::string_view space = words_.size() > (to ? 2u : 1u) ? words_[to ? 2 : 1] : "";
  if (words_.back() != "u64") return Refuse("is not supported");
  uint32_t a, d;
  if (!Source(s_->operands[1], 'l', &a) || !Target(s_->operands[0], 'l', &d)) return false;
  Handler fn = nullptr;
  if (space == "global" || space == "const" || space == "param") fn = set_.move64;
  if (space.substr(0, 6) == "shared") fn = to ? GenericToShared : SharedToGeneric;
  if (space == "local") fn = to ? GenericToLocal : LocalToGeneric;
  if (!fn) return Refuse("is not supported");
  Inst& i = Emit(fn);
  i.a = a;
  i.d = d;
  return true;
}

bool Decoder::IsSpacep() {
  if (s_->operands.size() != 2 || words_.size() != 2) return Refuse("is not understood");
  std::string_view name = words_[1];
  Space space = name == "global"                ? Space::kGlobal
                : name.substr(0, 6) == "shared" ? Space::kShared
                : name == "local"               ? Space::kLocal
                : name == "const"               ? Space::kConst
                : name.substr(0, 5) == "param"  ? Space::kParam
                                                : Space::kNone;
  if (space == Space::kNone) return Refuse("is not supported");
  uint32_t a, d;
  if (!Source(s_->operands[1], 'l', &a) || !Target(s_->operands[0], 'p', &d)) return false;
  Inst& i = Emit(IsSpace);
  i.a = a;
  i.d = d;
  i.x = static_cast<uint32_t>(space);
  return true;
}

bool Decoder::Convert() {
  if (s_->operands.size() != 2 || words_.size() < 3) return Refuse("is not understood");
  static constexpr std::pair<std::string_view, int> kTypes[] = {
      {"u8", kCvtU8},   {"s8", kCvtS8},   {"u16", kCvtU16}, {"s16", kCvtS16},
      {"u32", kCvtU32}, {"s32", kCvtS32}, {"u64", kCvtU64}, {"s64", kCvtS64},
      {"f16", kCvtF16}, {"f32", kCvtF32}, {"f64", kCvtF64}};
  int target = -1, source = -1;
  for (auto [name, type] : kTypes) {
    if (name == words_[words_.size() - 2]) target = type;
    if (name == words_[words_.size() - 1]) source = type;
  }
  if (target < 0 || source < 0) return Refuse("is not supported");
  uint32_t flags = 0;
  for (size_t k = 1; k + 2 < words_.size(); ++k) {
    uint32_t flag = ModifierFlags("x." + std::string(words_[k]));
    if (!(flag & (kRn | kRz | kRm | kRp | kRni | kRzi | kRmi | kRpi | kFtz | kSat)))
      return Refuse("is not supported");
    flags |= flag;
  }
  ptx::Type from = ptx::ParseType(words_.back());
  ptx::Type to = ptx::ParseType(words_[words_.size() - 2]);
  bool float_from = from.kind == 'f', float_to = to.kind == 'f';
  bool integer_rounding = flags & (kRni | kRzi | kRmi | kRpi);
  bool float_rounding = flags & (kRn | kRz | kRm | kRp);
  // A missing or misplaced rounding is an error in PTX, and guessing one would be a wrong value.
  if (float_from && !float_to && !integer_rounding) return Refuse("lacks an integer rounding");
  if (!float_from && float_to && !float_rounding) return Refuse("lacks a rounding");
  if (float_from && float_to && to.bytes < from.bytes && !float_rounding)
    return Refuse("lacks a rounding");
  if (!float_from && !float_to && (integer_rounding || float_rounding))
    return Refuse("has a rounding that it cannot have");
  if (float_from && float_to && to.bytes > from.bytes && (integer_rounding || float_rounding))
    return Refuse("has a rounding that it cannot have");
  Handler fn = set_.convert(target, source);
  if (!fn) return Refuse("is not supported");
  uint32_t a, d;
  const Operand& value = s_->operands[1];
  if (from.kind == 'f' &&
      (value.kind == Operand::Kind::kF32 || value.kind == Operand::Kind::kF64)) {
    if (!Source(value, from.bytes == 8 ? 'd' : 'f', &a)) return false;
  } else if (!LooseSource(value, from.bytes, &a)) {
    return false;
  }
  if (!LooseTarget(s_->operands[0], to.bytes, &d)) return false;
  Inst& i = Emit(fn);
  i.flags = flags;
  i.a = a;
  i.d = d;
  WidenTargets(to.kind == 's');
  return true;
}

bool Decoder::Decode(const Statement& statement) {
  s_ = &statement;
  guard_ = 0;
  if (statement.guard >= 0)
    guard_ = RegisterSlot(statement.guard) | (statement.guard_negated ? kGuardNegated : 0);
  words_.clear();
  for (size_t at = 0; at != std::string_view::npos;) {
    size_t end = statement.mnemonic.find('.', at);
    words_.push_back(statement.mnemonic.substr(at, end == std::string_view::npos ? end : end - at));
    at = end == std::string_view::npos ? end : end + 1;
  }
  std::string_view base = words_[0];
  if (auto row = rows_.find(std::string(statement.mnemonic)); row != rows_.end())
    return Generic(*row->second);
  if (base == "ld" || base == "ldu") return Load();
  if (base == "st") return Store();
  if (base == "mov") return Move();
  if (base == "cvt") return Convert();
  if (base == "cvta") return Cvta();
  if (base == "bra") return BranchStatement();
  if (base == "ret") return Simple(Return, {"uni"});
  if (base == "exit") return Simple(Exit, {});
  if (base == "trap") return Simple(Trap, {});
  if (base == "brkpt") return Simple(Nothing, {});
  if (base == "call") return CallStatement();
  if (base == "bar" && words_.size() > 1 && words_[1] == "warp") return WarpBarrier();
  if (base == "bar" || base == "barrier") return Barrier();
  if (base == "membar")
    return Simple(words_.back() == "cta" ? Nothing : FenceSc, {"cta", "gl", "sys"});
  if (base == "fence")
    return Simple(FenceSc, {"sc", "acq_rel", "acquire", "release", "cta", "gpu", "sys", "cluster"});
  if (base == "nanosleep") return Simple(Nanosleep, {"u32"});
  // Hints.
  if (base == "prefetch" || base == "prefetchu" || base == "pmevent")
    return Simple(Nothing, words_);
  if (base == "discard" || base == "applypriority") return Simple(Nothing, words_);
  if (base == "isspacep") return IsSpacep();
  if (base == "atom") return Atomic(false);
  if (base == "red") return Atomic(true);
  if (base == "shfl") return Shuffle();
  if (base == "vote") return Vote();
  if (base == "match") return Match();
  if (base == "redux") return Redux();
  if (base == "activemask") return ActiveMask();
  return Refuse("is not supported");
}

bool Decoder::Run() {
  register_slots_.assign(f_.registers.size(), 0);
  std::vector<int32_t> first(f_.statements.size() + 1);
  for (size_t k = 0; k < f_.statements.size(); ++k) {
    first[k] = static_cast<int32_t>(code_->insts.size());
    if (!Decode(f_.statements[k])) return false;
  }
  // Falling off the end returns.
  first[f_.statements.size()] = static_cast<int32_t>(code_->insts.size());
  Statement end;
  end.mnemonic = "ret";
  end.line = f_.statements.empty() ? f_.line : f_.statements.back().line;
  if (!Decode(end)) return false;
  s_ = nullptr;
  if (bytes_ > kMaxFrameBytes)
    return Fail("The function (" + std::string(f_.name) + ") uses too many registers.");

  auto is_branch = [](const Inst& i) { return i.fn == Branch || i.fn == BranchAlways; };
  for (Inst& i : code_->insts)
    if (is_branch(i)) i.target = first[static_cast<size_t>(i.target)];
  FindJoins(code_);
  code_->frame_bytes = (bytes_ + 63) & ~63u;
  return true;
}

namespace {

// What a backward branch costs of its warp's slice: the length of the loop, times more if the loop
// may be waiting for another thread, which it should give way to soon.
void PriceBranches(KernelImage* image) {
  constexpr uint32_t kPollCost = 256, kMayPollCost = 16;
  auto polls = [&](const Code& code, const Inst& i) {
    uint32_t flags = i.flags & (kPolls | kMayPoll);
    if (i.fn == Call && code.calls[i.x].callee >= 0)
      flags |= image->by_function.at(code.calls[i.x].callee)->polls;
    return flags;
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (Code& code : image->codes) {
      uint32_t all = code.polls;
      for (const Inst& i : code.insts) all |= polls(code, i);
      changed |= all != code.polls;
      code.polls = all;
    }
  }
  for (Code& code : image->codes) {
    for (size_t k = 0; k < code.insts.size(); ++k) {
      Inst& i = code.insts[k];
      if ((i.fn != Branch && i.fn != BranchAlways) || i.target > static_cast<int32_t>(k)) continue;
      uint32_t length = static_cast<uint32_t>(k) - static_cast<uint32_t>(i.target) + 1;
      uint32_t flags = 0;
      // A long loop is doing something.
      for (size_t j = static_cast<size_t>(i.target); j <= k && length <= 256; ++j)
        flags |= polls(code, code.insts[j]);
      i.x = length * (flags & kPolls ? kPollCost : flags & kMayPoll ? kMayPollCost : 1);
    }
  }
}

}  // namespace

bool DecodeImage(const ptx::Module& module, const VariableAddresses& addresses,
                 const HandlerSet& handlers, KernelImage* image, DecodeError* error) {
  for (Code& code : image->codes)
    if (!Decoder(module, addresses, handlers, *image, &code, error).Run()) return false;
  PriceBranches(image);
  return true;
}

}  // namespace simgpu::exec
