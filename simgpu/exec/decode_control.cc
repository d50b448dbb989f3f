#include <algorithm>

#include "simgpu/exec/decoder.h"
#include "simgpu/exec/ops_control.h"
#include "simgpu/exec/ops_warp.h"

namespace simgpu::exec {

bool Decoder::Simple(Handler fn, const Words& modifiers) {
  for (size_t k = 1; k < words_.size(); ++k)
    if (std::find(modifiers.begin(), modifiers.end(), words_[k]) == modifiers.end())
      return Refuse("is not supported");
  Inst& i = Emit(fn);
  if (fn == Nanosleep) i.flags = kPolls;
  return true;
}

bool Decoder::BranchStatement() {
  if (words_.size() > 2 || (words_.size() == 2 && words_[1] != "uni"))
    return Refuse("is not supported");
  uint32_t predicate = guard_;
  guard_ = 0;
  Inst& i = Emit(predicate ? Branch : BranchAlways);
  i.a = predicate & ~kGuardNegated;
  i.b = predicate & kGuardNegated;
  i.target = s_->target;  // a statement, until all are decoded
  return true;
}

// bar.sync a{, b}; bar.arrive a, b; bar.red.and.pred p, a{, b}, {!}c
bool Decoder::Barrier() {
  std::string_view kind;
  bool predicate = false, number = false;
  uint32_t flags = 0;
  for (size_t k = 1; k < words_.size(); ++k) {
    std::string_view w = words_[k];
    if (w == "cta" || w == "aligned") continue;
    if (kind.empty())
      kind = w;
    else if (w == "and")
      flags = kAnd;
    else if (w == "or")
      flags = kOr;
    else if (w == "popc")
      flags = kXor;
    else if (w == "pred")
      predicate = true;
    else if (w == "u32")
      number = true;
    else
      return Refuse("is not supported");
  }
  const auto& operands = s_->operands;
  if (kind == "sync" || kind == "arrive") {
    if (operands.empty() || operands.size() > 2 || flags) return Refuse("is not understood");
    uint32_t id = 0, count = 0;
    if (!Source(operands[0], 'i', &id)) return false;
    if (operands.size() == 2 && !Source(operands[1], 'i', &count)) return false;
    if (kind == "arrive" && operands.size() != 2) return Refuse("has no thread count");
    Inst& i = Emit(kind == "sync" ? BarrierSync : BarrierArrive);
    i.a = id;
    i.b = count;
    return true;
  }
  if (kind != "red" || !flags || operands.size() < 3 || operands.size() > 4)
    return Refuse("is not supported");
  if ((flags == kXor) != number || (flags != kXor) != predicate) return Refuse("is not understood");
  uint32_t d = 0, id = 0, count = 0, p = 0;
  if (!Target(operands[0], number ? 'i' : 'p', &d) || !Source(operands[1], 'i', &id)) return false;
  if (operands.size() == 4 && !Source(operands[2], 'i', &count)) return false;
  if (!Source(operands.back(), 'p', &p)) return false;
  Inst& i = Emit(BarrierSync);
  i.d = d;
  i.a = id;
  i.b = count;
  i.c = p;
  i.flags = flags;
  return true;
}

bool Decoder::WarpBarrier() {
  uint32_t members = 0;
  if (s_->mnemonic != "bar.warp.sync" || s_->operands.size() != 1)
    return Refuse("is not understood");
  if (!Source(s_->operands[0], 'i', &members)) return false;
  Inst& i = Emit(WarpSync);
  i.b = members;
  return true;
}

bool Decoder::CallStatement() {
  // call{.uni} {(results),} target {, (arguments)} {, prototype}
  CallSite site;
  size_t at = 0;
  const auto& operands = s_->operands;
  auto lists = [&](const Operand& list, std::vector<LocalSlot>* out) {
    for (const Operand& element : list.elements) {
      if (element.kind != Operand::Kind::kVariable)
        return Refuse("passes what is not a .param variable");
      const ptx::Variable& variable = f_.variables[static_cast<size_t>(element.variable)];
      if (variable.space != ptx::Space::kParam)
        return Refuse("passes what is not a .param variable");
      out->push_back({code_->variable_offsets[static_cast<size_t>(element.variable)],
                      static_cast<uint32_t>(variable.bytes)});
    }
    return true;
  };
  if (at < operands.size() && operands[at].kind == Operand::Kind::kList)
    if (!lists(operands[at++], &site.results)) return false;
  if (at >= operands.size()) return Refuse("names no function");
  const Operand& target = operands[at++];
  if (at < operands.size() && operands[at].kind == Operand::Kind::kList)
    if (!lists(operands[at++], &site.arguments)) return false;

  uint32_t handles = 0;
  Handler fn = Call;
  if (target.kind == Operand::Kind::kSymbol) {
    int32_t index = -1;
    const ptx::Function* function = FunctionByName(target.name, &index);
    if (!function) return Fail("The function (" + std::string(target.name) + ") is not declared.");
    site.builtin = function->has_body ? Builtin::kNone : BuiltinByName(target.name);
    if (site.builtin == Builtin::kNone) {
      if (!function->has_body)
        return Fail("The function (" + std::string(target.name) + ") is not defined.");
      site.callee = index;
      if (site.arguments.size() != function->parameters.size() ||
          site.results.size() > function->returns.size())
        return Refuse("does not match the function's parameters");
    }
  } else {
    if (!Source(target, 'l', &handles)) return false;
    fn = CallIndirect;
  }
  Inst& i = Emit(fn);
  i.a = handles;
  i.x = static_cast<uint32_t>(code_->calls.size());
  code_->calls.push_back(std::move(site));
  return true;
}

bool Decoder::Shuffle() {
  // shfl.sync.mode.b32 d|p, a, b, c, membermask
  if (words_.size() != 4 || words_[1] != "sync" || words_[3] != "b32" || s_->operands.size() != 5)
    return Refuse("is not supported");
  Handler fn = ShuffleHandler(words_[2]);
  if (!fn) return Refuse("is not supported");
  uint32_t a, b, c, members, d, p = 0;
  const Operand& target = s_->operands[0];
  if (!Source(s_->operands[1], 'i', &a) || !Source(s_->operands[2], 'i', &b) ||
      !Source(s_->operands[3], 'i', &c) || !Source(s_->operands[4], 'i', &members) ||
      !Target(target, 'i', &d))
    return false;
  if (target.second >= 0) {
    if (f_.registers[static_cast<size_t>(target.second)].kind != 'p')
      return Refuse("has a second destination that is not a predicate");
    p = RegisterSlot(target.second);
  }
  Inst& i = Emit(fn);
  i.d = d, i.a = a, i.b = b, i.c = c, i.e = members, i.g = p;
  i.flags = kForceable;
  return true;
}

bool Decoder::Vote() {
  // vote.sync.mode.pred d, {!}a, membermask; also vote.mode.sync, and old forms without sync
  bool sync = false;
  std::string_view mode;
  for (size_t k = 1; k < words_.size(); ++k) {
    if (words_[k] == "sync")
      sync = true;
    else if (mode.empty())
      mode = words_[k];
    else if (words_[k] != "pred" && words_[k] != "b32")
      return Refuse("is not supported");
  }
  Handler fn = VoteHandler(mode);
  if (!fn || s_->operands.size() != (sync ? 3u : 2u)) return Refuse("is not supported");
  uint32_t d, a, members = 0;
  if (!Source(s_->operands[1], 'p', &a)) return false;
  if (sync && !Source(s_->operands[2], 'i', &members)) return false;
  if (!Target(s_->operands[0], mode == "ballot" ? 'i' : 'p', &d)) return false;
  Inst& i = Emit(fn);
  i.d = d, i.a = a, i.e = members;
  i.flags = kForceable;
  return true;
}

bool Decoder::Match() {
  // match.any.sync.type d, a, membermask; match.all.sync.type d|p, a, membermask
  bool all = false, wide = false, sync = false;
  for (size_t k = 1; k < words_.size(); ++k) {
    if (words_[k] == "all")
      all = true;
    else if (words_[k] == "sync")
      sync = true;
    else if (words_[k] == "b64")
      wide = true;
    else if (words_[k] != "any" && words_[k] != "b32")
      return Refuse("is not supported");
  }
  if (!sync || s_->operands.size() != 3) return Refuse("is not supported");
  uint32_t d, a, members, p = 0;
  const Operand& target = s_->operands[0];
  if (!Source(s_->operands[1], wide ? 'l' : 'i', &a) || !Source(s_->operands[2], 'i', &members) ||
      !Target(target, 'i', &d))
    return false;
  if (target.second >= 0) {
    if (f_.registers[static_cast<size_t>(target.second)].kind != 'p')
      return Refuse("has a second destination that is not a predicate");
    p = RegisterSlot(target.second);
  }
  Inst& i = Emit(MatchHandler(all, wide));
  i.d = d, i.a = a, i.e = members, i.g = p;
  i.flags = kForceable;
  return true;
}

bool Decoder::Redux() {
  // redux.sync.op.type d, a, membermask
  if (words_.size() != 4 || words_[1] != "sync" || s_->operands.size() != 3)
    return Refuse("is not supported");
  Handler fn = ReduxHandler(words_[2], words_[3]);
  if (!fn) return Refuse("is not supported");
  uint32_t d, a, members;
  if (!Source(s_->operands[1], 'i', &a) || !Source(s_->operands[2], 'i', &members) ||
      !Target(s_->operands[0], 'i', &d))
    return false;
  Inst& i = Emit(fn);
  i.d = d, i.a = a, i.e = members;
  i.flags = kForceable;
  return true;
}

bool Decoder::ActiveMask() {
  uint32_t d;
  if (s_->operands.size() != 1 || !Target(s_->operands[0], 'i', &d))
    return Refuse("is not understood");
  Inst& i = Emit(exec::ActiveMask);
  i.d = d;
  return true;
}

}  // namespace simgpu::exec
