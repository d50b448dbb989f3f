// Warps, blocks and the scheduler.
//
// Divergence is a tree of splits. A leaf is a set of lanes with one pc. A branch whose lanes
// disagree turns the leaf into a join at the branch's immediate post-dominator, with a leaf for
// each side; leaves that reach the join park there until all have come. Joins serve speed only.
// Independent threads may wait for each other (sm_70 promises them progress), so a leaf that has
// branched backwards for longer than its budget first releases what is parked at some join (those
// lanes run ahead as a leaf of their own) and then gives way to the other leaves, and the warp to
// the other warps. Any interleaving is a legal one.
//
// A call is a join too: the caller's leaf becomes a join at the return point and the callee runs as
// its child in a new frame. `ret` and `exit` take lanes out of a leaf at any depth.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "simgpu/exec/code.h"
#include "simgpu/exec/context.h"

namespace simgpu::exec {

struct AlignedDelete {
  void operator()(std::byte* p) const;
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;
AlignedBytes AllocateAligned(size_t bytes);  // throws std::bad_alloc, as containers do

struct Frame {
  const Code* code = nullptr;
  AlignedBytes registers;
  uint64_t local_base = 0;
  Frame* caller = nullptr;
  int32_t call_node = -1;
  const CallSite* site = nullptr;
  uint32_t references = 0;  // nodes in it and frames called from it
};

struct Node {
  enum class State : uint8_t {
    kFree,
    kRun,
    kJoin,      // inner node; becomes a leaf when its children are done
    kBarrier,   // waits at bar
    kWarpSync,  // waits for lanes of its warp
  } state = State::kFree;
  bool is_call = false;
  uint8_t barrier = 0;
  bool forced = false;  // kWarpSync: go on with the lanes there are
  const Inst* pc = nullptr;
  const Inst* rpc = nullptr;
  uint32_t mask = 0;
  uint32_t joined = 0;
  uint32_t need = 0;  // kWarpSync: lanes it waits for
  int32_t parent = -1;
  int32_t kids = 0;
  Frame* frame = nullptr;
};

struct Warp {
  uint32_t index = 0;
  uint32_t existing = 0;  // lanes of the block that it has
  uint32_t live = 0;
  int32_t current = -1;
  std::vector<Node> nodes;
  std::vector<int32_t> free_nodes;
  std::vector<std::unique_ptr<Frame>> frames;  // all ever made
  std::vector<std::vector<Frame*>> idle;       // by Code::index
  Frame* root = nullptr;
  AlignedBytes local;  // lazily touched: lane l at l * stride
  uint32_t tid[3][kLanes] = {};
};

struct Barrier {
  uint32_t arrived = 0;
  uint32_t expected = 0;  // 0: all live threads
  uint32_t reduce_and = ~0u, reduce_or = 0, reduce_popc = 0;
};
constexpr uint32_t kBarriers = 16;

struct Block {
  uint32_t id[3] = {};
  uint64_t linear = 0;
  uint32_t live_threads = 0;
  std::vector<Warp> warps;
  AlignedBytes shared;
  Barrier barriers[kBarriers];
  uint32_t idle_passes = 0;
};

}  // namespace simgpu::exec
