// The decoder's working state; its methods are spread over decode*.cc by kind of instruction.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "simgpu/exec/decode.h"

namespace simgpu::exec {

// The words of a mnemonic: "ld.global.u32" is ld, global, u32.
using Words = std::vector<std::string_view>;

class Decoder {
 public:
  Decoder(const ptx::Module& module, const VariableAddresses& addresses, const HandlerSet& handlers,
          const KernelImage& image, Code* code, DecodeError* error)
      : module_(module),
        addresses_(addresses),
        set_(handlers),
        rows_(RowsOf(handlers)),
        image_(image),
        code_(code),
        f_(*code->function),
        error_(error) {}
  bool Run();

 private:
  using Operand = ptx::Operand;
  using Statement = ptx::Statement;

  bool Fail(std::string message);
  bool Refuse(const char* why);  // names the statement
  bool Decode(const Statement& statement);

  // decode.cc: the common case
  bool Generic(const Row& row);
  bool Move();
  bool Pack(const Operand& target, const Operand& source, int bytes);
  bool Unpack(const Operand& target, const Operand& source, int bytes);
  bool Cvta();
  bool Convert();
  bool IsSpacep();
  // decode_memory.cc
  bool Load();
  bool Store();
  bool Atomic(bool reduction);
  bool AddressOf(const Operand& operand, ptx::Space space, uint32_t* slot, int64_t* offset,
                 bool* wide);
  // decode_control.cc
  bool BranchStatement();
  bool Barrier();
  bool WarpBarrier();
  bool CallStatement();
  // Of these modifiers only.
  bool Simple(Handler fn, const Words& modifiers);
  bool Shuffle();
  bool Vote();
  bool Match();
  bool Redux();
  bool ActiveMask();

  Inst& Emit(Handler fn);
  uint32_t Slot(uint32_t bytes);  // bytes of a cell; 1 for a predicate
  uint32_t RegisterSlot(int32_t reg);
  uint32_t ConstantSlot(uint8_t bytes, uint64_t value);
  uint32_t PredicateConstant(bool value);
  // A source operand of the kind a shape letter names. False after a failure.
  bool Source(const Operand& operand, char letter, uint32_t* slot);
  bool Predicate(const Operand& operand, uint32_t* slot);
  bool Symbol(const Operand& operand, char letter, uint32_t* slot);
  bool SpecialRegister(std::string_view name, char letter, uint32_t* slot);
  bool Target(const Operand& operand, char letter, uint32_t* slot);
  // For ld, st and cvt a register may be wider than the type. A source is cut down; a destination
  // is computed in a temporary of which Widen makes the register.
  bool LooseSource(const Operand& operand, int bytes, uint32_t* slot);
  bool LooseTarget(const Operand& operand, int bytes, uint32_t* slot);
  void WidenTargets(bool sign);
  const ptx::Function* FunctionByName(std::string_view name, int32_t* index) const;

  const ptx::Module& module_;
  const VariableAddresses& addresses_;
  const HandlerSet& set_;
  const RowTable& rows_;
  const KernelImage& image_;
  Code* code_;
  const ptx::Function& f_;
  DecodeError* error_;

  const Statement* s_ = nullptr;
  Words words_;
  uint32_t guard_ = 0;
  uint32_t bytes_ = 64;  // of the frame so far; no operand lies at 0
  std::vector<uint32_t> register_slots_;
  std::map<std::pair<uint8_t, uint64_t>, uint32_t> constant_slots_;
  std::vector<std::pair<uint32_t, uint32_t>> widen_;  // temporary, register
  uint32_t carry_slot_ = 0;
};

}  // namespace simgpu::exec
