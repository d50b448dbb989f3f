#include "simgpu/exec/context.h"
#include "simgpu/exec/decoder.h"
#include "simgpu/exec/ops_atomic.h"
#include "simgpu/exec/ops_control.h"

namespace simgpu::exec {

using ptx::Space;

namespace {

// The modifiers of a memory access that matter; unknown ones are refused.
struct Access {
  Space space = Space::kNone;
  ptx::Type type;
  int vector = 1;
  bool waiting = false;  // ordered or volatile
  bool fence = false;    // sequentially consistent
};

bool ParseAccess(const std::vector<std::string_view>& words, Access* access) {
  for (size_t k = 1; k < words.size(); ++k) {
    std::string_view w = words[k];
    if (w == "global")
      access->space = Space::kGlobal;
    else if (w == "const")
      access->space = Space::kConst;
    else if (w == "shared" || w == "shared::cta")
      access->space = Space::kShared;
    else if (w == "local")
      access->space = Space::kLocal;
    else if (w == "param" || w == "param::entry" || w == "param::func")
      access->space = Space::kParam;
    else if (w == "v2")
      access->vector = 2;
    else if (w == "v4")
      access->vector = 4;
    else if (w == "volatile" || w == "relaxed" || w == "acquire" || w == "release" || w == "mmio")
      access->waiting = true;
    else if (w == "weak" || w == "cta" || w == "gpu" || w == "sys" || w == "cluster" || w == "ca" ||
             w == "cg" || w == "cs" || w == "lu" || w == "cv" || w == "nc" || w == "wb" ||
             w == "wt" || w == "unified" || w.substr(0, 4) == "L1::" ||
             (w.substr(0, 4) == "L2::" && w != "L2::cache_hint")) {
    } else if (ptx::Type type = ptx::ParseType(w);
               type.kind && type.kind != 'p' && k + 1 == words.size()) {
      access->type = type;
    } else {
      return false;
    }
  }
  return access->type.kind != 0 && access->type.bytes <= 8;
}

MemoryType MemoryTypeOf(const ptx::Type& type) {
  bool sign = type.kind == 's';
  switch (type.bytes) {
    case 1:
      return sign ? MemoryType::kS8 : MemoryType::kU8;
    case 2:
      return sign ? MemoryType::kS16 : MemoryType::kB16;
    case 4:
      return MemoryType::kB32;
    default:
      return MemoryType::kB64;
  }
}

MemorySpace MemorySpaceOf(Space space) {
  switch (space) {
    case Space::kGlobal:
    case Space::kConst:
      return MemorySpace::kGlobal;
    case Space::kShared:
      return MemorySpace::kShared;
    case Space::kLocal:
    case Space::kParam:
      return MemorySpace::kLocal;
    default:
      return MemorySpace::kGeneric;
  }
}

}  // namespace

bool Decoder::AddressOf(const Operand& operand, Space space, uint32_t* slot, int64_t* offset,
                        bool* wide) {
  if (operand.kind != Operand::Kind::kAddress || operand.elements.size() != 1)
    return Refuse("has an operand that is not an address");
  const Operand& base = operand.elements[0];
  *offset = operand.value;
  *wide = true;
  bool narrow_space = space == Space::kShared || space == Space::kLocal;
  switch (base.kind) {
    case Operand::Kind::kRegister: {
      if (base.negated) return Refuse("has a negated address");
      const ptx::Type& type = f_.registers[static_cast<size_t>(base.reg)];
      if (type.kind == 'p' || (type.bytes != 4 && type.bytes != 8))
        return Refuse("has an address of the wrong width");
      *slot = RegisterSlot(base.reg);
      if (type.bytes == 4) {
        if (narrow_space) {
          *wide = false;
        } else {
          uint32_t temporary = Slot(8);
          Inst& i = Emit(ExtendZero);
          i.a = *slot;
          i.d = temporary;
          *slot = temporary;
        }
      }
      return true;
    }
    case Operand::Kind::kInteger:
      *slot = ConstantSlot(8, static_cast<uint64_t>(operand.value));
      *offset = 0;
      return true;
    case Operand::Kind::kSymbol:
    case Operand::Kind::kVariable:
      return Source(base, 'l', slot);
    default:
      return Refuse("has an address that is not understood");
  }
}

bool Decoder::Load() {
  Access access;
  if (s_->operands.size() != 2 || !ParseAccess(words_, &access)) return Refuse("is not supported");
  const Operand& target = s_->operands[0];
  const Operand& address = s_->operands[1];
  if (address.kind != Operand::Kind::kAddress || address.elements.size() != 1)
    return Refuse("has an operand that is not an address");
  std::vector<const Operand*> targets;
  if (access.vector > 1) {
    if (target.kind != Operand::Kind::kVector ||
        target.elements.size() != static_cast<size_t>(access.vector))
      return Refuse("has a destination of the wrong size");
    for (const Operand& element : target.elements) targets.push_back(&element);
  } else {
    targets.push_back(&target);
  }
  MemoryType type = MemoryTypeOf(access.type);

  const Operand& base = address.elements[0];
  bool entry_parameter = access.space == Space::kParam && f_.entry &&
                         base.kind == Operand::Kind::kVariable &&
                         static_cast<size_t>(base.variable) < f_.parameters.size();
  uint32_t slot = 0;
  int64_t offset = 0;
  bool wide = true;
  if (entry_parameter) {
    const ptx::Variable& variable = f_.variables[static_cast<size_t>(base.variable)];
    uint64_t bytes = uint64_t{access.type.bytes} * static_cast<uint64_t>(access.vector);
    if (address.value < 0 || static_cast<uint64_t>(address.value) + bytes > variable.bytes)
      return Refuse("reads outside a parameter");
    offset = address.value + code_->variable_offsets[static_cast<size_t>(base.variable)];
  } else {
    // A parameter's address in a register: the kernel's are generic, a function's local.
    if (access.space == Space::kParam && base.kind == Operand::Kind::kRegister)
      access.space = f_.entry ? Space::kNone : Space::kLocal;
    if (!AddressOf(address, access.space, &slot, &offset, &wide)) return false;
  }
  uint32_t slots[4] = {};
  for (size_t k = 0; k < targets.size(); ++k)
    if (!LooseTarget(*targets[k], access.type.bytes, &slots[k])) return false;
  if (entry_parameter) {
    Inst& i = Emit(LoadParameter);
    i.imm = offset;
    i.b = static_cast<uint32_t>(access.vector);
    i.target = static_cast<int32_t>(type);
    i.d = slots[0], i.e = slots[1], i.g = slots[2], i.x = slots[3];
  } else {
    Handler fn = set_.load(MemorySpaceOf(access.space), wide, type, access.vector);
    if (!fn) return Refuse("is not supported");
    Inst& i = Emit(fn);
    i.a = slot;
    i.imm = offset;
    i.target = static_cast<int32_t>(code_->insts.size() % kCachedRanges);
    i.flags = access.waiting ? static_cast<uint32_t>(kPolls) : 0u;
    i.d = slots[0], i.e = slots[1], i.g = slots[2], i.x = slots[3];
  }
  WidenTargets(access.type.kind == 's');
  return true;
}

bool Decoder::Store() {
  Access access;
  if (s_->operands.size() != 2 || !ParseAccess(words_, &access)) return Refuse("is not supported");
  const Operand& source = s_->operands[1];
  std::vector<const Operand*> sources;
  if (access.vector > 1) {
    if (source.kind != Operand::Kind::kVector ||
        source.elements.size() != static_cast<size_t>(access.vector))
      return Refuse("has a source of the wrong size");
    for (const Operand& element : source.elements) sources.push_back(&element);
  } else {
    sources.push_back(&source);
  }
  uint32_t slot = 0;
  int64_t offset = 0;
  bool wide = true;
  const Operand& address = s_->operands[0];
  if (access.space == Space::kConst) return Refuse("writes constant memory");
  if (address.kind == Operand::Kind::kAddress && access.space == Space::kParam) {
    const Operand& base = address.elements[0];
    if (base.kind == Operand::Kind::kVariable && f_.entry &&
        static_cast<size_t>(base.variable) < f_.parameters.size())
      return Refuse("writes a parameter of the kernel");
  }
  if (!AddressOf(address, access.space, &slot, &offset, &wide)) return false;
  uint32_t slots[4] = {};
  for (size_t k = 0; k < sources.size(); ++k) {
    const Operand& each = *sources[k];
    bool float_constant = each.kind == Operand::Kind::kF32 || each.kind == Operand::Kind::kF64;
    if (float_constant) {
      if (!Source(each, access.type.bytes == 8 ? 'd' : 'f', &slots[k])) return false;
    } else if (!LooseSource(each, access.type.bytes, &slots[k])) {
      return false;
    }
  }
  Handler fn =
      set_.store(MemorySpaceOf(access.space), wide, MemoryTypeOf(access.type), access.vector);
  if (!fn) return Refuse("is not supported");
  Inst& i = Emit(fn);
  i.a = slot;
  i.imm = offset;
  i.target = static_cast<int32_t>(code_->insts.size() % kCachedRanges);
  i.d = slots[0], i.e = slots[1], i.g = slots[2], i.x = slots[3];
  return true;
}

bool Decoder::Atomic(bool reduction) {
  AtomicRequest request;
  request.reduction = reduction;
  Space space = Space::kNone;
  ptx::Type type;
  for (size_t k = 1; k < words_.size(); ++k) {
    std::string_view w = words_[k];
    if (w == "global")
      space = Space::kGlobal;
    else if (w == "shared" || w == "shared::cta")
      space = Space::kShared;
    else if (w == "relaxed" || w == "acquire" || w == "release" || w == "acq_rel" || w == "cta" ||
             w == "gpu" || w == "sys" || w == "cluster" || w == "noftz") {
    } else if (k + 1 == words_.size()) {
      request.type = w;
      type = ptx::ParseType(w);
    } else if (request.operation.empty()) {
      request.operation = w;
    } else {
      return Refuse("is not supported");
    }
  }
  if (type.kind == 0 || type.kind == 'p' || type.bytes > 8) return Refuse("is not supported");
  request.space = MemorySpaceOf(space);
  Handler fn = AtomicHandler(request);
  if (!fn) return Refuse("is not supported");
  bool cas = request.operation == "cas";
  size_t count = (reduction ? 2u : 3u) + (cas ? 1u : 0u);
  if (s_->operands.size() != count) return Refuse("has the wrong number of operands");
  uint32_t address = 0;
  int64_t offset = 0;
  bool wide = true;
  size_t at = reduction ? 0 : 1;
  if (!AddressOf(s_->operands[at], space, &address, &offset, &wide)) return false;
  if (!wide) {
    uint32_t temporary = Slot(8);
    Inst& i = Emit(ExtendZero);
    i.a = address;
    i.d = temporary;
    address = temporary;
  }
  uint32_t b = 0, c = 0, d = 0;
  const Operand& value = s_->operands[at + 1];
  char letter = type.kind == 'f' && type.bytes == 4   ? 'f'
                : type.kind == 'f' && type.bytes == 8 ? 'd'
                : type.bytes == 8                     ? 'l'
                : type.bytes == 2                     ? 's'
                                                      : 'i';
  if (!Source(value, letter, &b)) return false;
  if (cas && !Source(s_->operands[at + 2], letter, &c)) return false;
  if (reduction) {
    d = Slot(type.bytes == 8 ? 8 : 4);
  } else if (!Target(s_->operands[0], letter, &d)) {
    return false;
  }
  Inst& i = Emit(fn);
  i.a = address;
  i.b = b;
  i.c = c;
  i.d = d;
  i.imm = offset;
  i.flags = cas || request.operation == "exch" ? kPolls : reduction ? 0u : kMayPoll;
  i.target = static_cast<int32_t>(code_->insts.size() % kCachedRanges);
  return true;
}

}  // namespace simgpu::exec
