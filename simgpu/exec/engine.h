// Runs one launch on the calling thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "simgpu/exec/executor.h"
#include "simgpu/exec/warp.h"

namespace simgpu::exec {

class LaunchEngine {
 public:
  LaunchEngine(const KernelImage& image, const KernelInfo& info, const ptx::Module& module,
               MemoryMap& memory, const LaunchRequest& request);
  ~LaunchEngine();
  LaunchResult Run();

  // For handlers.
  void Diverge(uint32_t taken, const Inst* target, const Inst* join);
  // A leaf branches backwards over `distance` instructions; true if it must give way.
  void SpendBudget(int32_t cost);
  // Lanes of the leaf become a leaf of their own at pc.
  void SplitOff(uint32_t mask, const Inst* pc);
  void Exit(uint32_t mask);
  void Return(uint32_t mask);
  void Call(const Inst& i, uint32_t mask, const CallSite& site, const Code& callee);
  // True if the lanes may go on at once; else they wait and the leaf is done.
  void ArriveAtBarrier(const Inst& i, uint32_t mask, uint32_t id, uint32_t count, bool wait);
  // True if all lanes that `need` names are here; else the leaf waits, to run this instruction
  // again with whoever came.
  bool GatherLanes(const Inst& i, uint32_t mask, uint32_t need);
  void SetFault(Fault fault, const Inst* i, uint32_t lane, std::string text);

  const Code* CodeOfHandle(uint64_t handle) const;
  const LaunchRequest& request() const { return request_; }
  MemoryMap& memory() { return memory_; }
  const KernelImage& image() const { return image_; }
  Context& context() { return c_; }
  // Zeroed device memory of a cooperative launch, else 0.
  uint64_t workspace() const { return workspace_; }

 private:
  std::unique_ptr<Block> MakeBlock();
  void StartBlock(Block* block, uint64_t linear);
  bool RunWarp(Block* block, Warp* warp);  // true if anything ran
  void Enter(Warp* warp, int32_t node);
  void Leave();
  void FinishNode(Warp* warp, int32_t node);
  int32_t NewNode(Warp* warp);
  void FreeNode(Warp* warp, int32_t node);
  Frame* NewFrame(Warp* warp, const Code& code);
  void DropFrame(Warp* warp, Frame* frame);
  bool ReleaseParked(Warp* warp);
  bool NextLeaf(Warp* warp);
  void CheckBarrier(Block* block, uint32_t id);
  bool ResolveWarpSync(Warp* warp, bool force);
  void MergeLeaves(Warp* warp, const std::vector<int32_t>& leaves);
  void RemoveLanes(uint32_t mask);
  bool BlockDone(const Block& block) const { return block.live_threads == 0; }
  bool Stopped();
  void RefreshRanges();
  LaunchResult Deadlock(Block* block);

  const KernelImage& image_;
  const KernelInfo& info_;
  const ptx::Module& module_;
  MemoryMap& memory_;
  const LaunchRequest& request_;
  Context c_;
  LaunchResult result_;
  std::vector<std::unique_ptr<Block>> pool_;
  std::vector<std::byte> parameters_;
  uint64_t workspace_ = 0;
  uint64_t local_stride_ = 0;
  uint64_t shared_bytes_ = 0;
  uint32_t threads_ = 0, warps_ = 0;
  uint64_t generation_ = 0;
};

}  // namespace simgpu::exec
