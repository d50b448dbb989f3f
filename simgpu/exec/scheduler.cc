#include <xmmintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "simgpu/exec/engine.h"

namespace simgpu::exec {
namespace {

// What a warp may spend on backward branches before others run. Long enough that an ordinary loop
// keeps its lanes together; loops that look like waiting pay a multiple (decode.cc), so that a lock
// changes hands in microseconds.
int32_t Slice() {
  // SIMGPU_SLICE=1 gives way at every backward branch, to test that nothing leans on luck.
  static const int32_t slice = [] {
    const char* wish = std::getenv("SIMGPU_SLICE");
    int value = wish ? std::atoi(wish) : 0;
    return value > 0 ? value : 32768;
  }();
  return slice;
}
// A block whose every turn ends with a spent budget may be waiting for a block that has not begun:
// after so many turns the next block becomes resident.
constexpr uint32_t kPatience = 16;
constexpr size_t kResidentBlocks = 256;

uint32_t Count(uint32_t mask) {
  return static_cast<uint32_t>(__builtin_popcount(mask));
}

}  // namespace

void AlignedDelete::operator()(std::byte* p) const {
  std::free(p);
}

AlignedBytes AllocateAligned(size_t bytes) {
  bytes = std::max<size_t>((bytes + 63) & ~size_t{63}, 64);
  AlignedBytes memory(static_cast<std::byte*>(std::aligned_alloc(64, bytes)));
  if (!memory) throw std::bad_alloc();  // Kernel::Launch makes it the launch's fault
  return memory;
}

LaunchEngine::LaunchEngine(const KernelImage& image, const KernelInfo& info,
                           const ptx::Module& module, MemoryMap& memory,
                           const LaunchRequest& request)
    : image_(image), info_(info), module_(module), memory_(memory), request_(request) {
  threads_ = request.block[0] * request.block[1] * request.block[2];
  warps_ = (threads_ + kLanes - 1) / kLanes;
  shared_bytes_ = request.dynamic_shared_bytes
                      ? image.dynamic_shared_offset + request.dynamic_shared_bytes
                      : uint64_t{image.static_shared_bytes};
  constexpr uint64_t kRecursionBytes = 64 * 1024;
  local_stride_ = (image.local_bytes + 15) & ~uint64_t{15};
  if (image.calls_unbounded) local_stride_ += kRecursionBytes;
  parameters_.resize(std::max<size_t>(info.parameter_bytes, 1));
  if (info.parameter_bytes && request.parameters)
    memcpy(parameters_.data(), request.parameters, info.parameter_bytes);
  c_.engine = this;
  c_.parameters = parameters_.data();
  c_.parameter_bytes = info.parameter_bytes;
  c_.local_stride = local_stride_;
  c_.shared_bytes = shared_bytes_;
}

LaunchEngine::~LaunchEngine() {
  if (workspace_) memory_.FreeVariable(workspace_);
}

std::unique_ptr<Block> LaunchEngine::MakeBlock() {
  auto block = std::make_unique<Block>();
  block->shared = AllocateAligned(shared_bytes_ + 64);
  memset(block->shared.get(), 0, shared_bytes_ + 64);
  block->warps.resize(warps_);
  for (uint32_t w = 0; w < warps_; ++w) {
    Warp& warp = block->warps[w];
    warp.index = w;
    for (uint32_t l = 0; l < kLanes; ++l) {
      uint32_t t = w * kLanes + l;
      if (t < threads_) warp.existing |= 1u << l;
      warp.tid[0][l] = t % request_.block[0];
      warp.tid[1][l] = t / request_.block[0] % request_.block[1];
      warp.tid[2][l] = t / request_.block[0] / request_.block[1];
    }
    warp.idle.resize(image_.codes.size());
    if (local_stride_) warp.local = AllocateAligned(local_stride_ * kLanes);
    warp.root = NewFrame(&warp, image_.codes[0]);
    warp.root->references = 1;  // kept from block to block
  }
  return block;
}

void LaunchEngine::StartBlock(Block* block, uint64_t linear) {
  block->linear = linear;
  block->id[0] = static_cast<uint32_t>(linear % request_.grid[0]);
  block->id[1] = static_cast<uint32_t>(linear / request_.grid[0] % request_.grid[1]);
  block->id[2] = static_cast<uint32_t>(linear / request_.grid[0] / request_.grid[1]);
  block->live_threads = threads_;
  block->idle_passes = 0;
  for (Barrier& barrier : block->barriers) barrier = Barrier();
  for (Warp& warp : block->warps) {
    warp.live = warp.existing;
    warp.nodes.clear();
    warp.free_nodes.clear();
    int32_t n = NewNode(&warp);
    Node& node = warp.nodes[static_cast<size_t>(n)];
    node.state = Node::State::kRun;
    node.pc = image_.codes[0].insts.data();
    node.mask = warp.existing;
    node.frame = warp.root;
    ++warp.root->references;
    warp.current = n;
  }
}

int32_t LaunchEngine::NewNode(Warp* warp) {
  if (!warp->free_nodes.empty()) {
    int32_t n = warp->free_nodes.back();
    warp->free_nodes.pop_back();
    warp->nodes[static_cast<size_t>(n)] = Node();
    return n;
  }
  warp->nodes.emplace_back();
  return static_cast<int32_t>(warp->nodes.size()) - 1;
}

void LaunchEngine::FreeNode(Warp* warp, int32_t n) {
  Node& node = warp->nodes[static_cast<size_t>(n)];
  Frame* frame = node.frame;
  node.state = Node::State::kFree;
  node.frame = nullptr;
  node.mask = 0;
  warp->free_nodes.push_back(n);
  DropFrame(warp, frame);
}

Frame* LaunchEngine::NewFrame(Warp* warp, const Code& code) {
  std::vector<Frame*>& idle = warp->idle[static_cast<size_t>(code.index)];
  if (!idle.empty()) {
    Frame* frame = idle.back();
    idle.pop_back();
    return frame;
  }
  auto frame = std::make_unique<Frame>();
  frame->code = &code;
  frame->registers = AllocateAligned(code.frame_bytes);
  std::byte* base = frame->registers.get();
  memset(base, 0, code.frame_bytes);
  for (const Constant& constant : code.constants) {
    if (constant.predicate) {
      *reinterpret_cast<uint32_t*>(base + constant.offset) = constant.value ? ~0u : 0u;
    } else if (constant.bytes == 8) {
      auto* cells = reinterpret_cast<uint64_t*>(base + constant.offset);
      std::fill(cells, cells + kLanes, constant.value);
    } else {
      auto* cells = reinterpret_cast<uint32_t*>(base + constant.offset);
      std::fill(cells, cells + kLanes, static_cast<uint32_t>(constant.value));
    }
  }
  warp->frames.push_back(std::move(frame));
  return warp->frames.back().get();
}

void LaunchEngine::DropFrame(Warp* warp, Frame* frame) {
  while (frame && --frame->references == 0) {
    warp->idle[static_cast<size_t>(frame->code->index)].push_back(frame);
    frame = frame->caller;
  }
}

void LaunchEngine::Enter(Warp* warp, int32_t n) {
  Node& node = warp->nodes[static_cast<size_t>(n)];
  warp->current = n;
  c_.registers = node.frame->registers.get();
  c_.frame = node.frame;
  c_.code = node.frame->code->insts.data();
  c_.local_base = node.frame->local_base;
  c_.pc = node.pc;
  c_.rpc = node.rpc;
  c_.mask = node.mask;
  c_.event = Event::kNone;
}

void LaunchEngine::Leave() {
  Node& node = c_.warp->nodes[static_cast<size_t>(c_.warp->current)];
  node.pc = c_.pc;
  node.mask = c_.mask;
}

void LaunchEngine::FinishNode(Warp* warp, int32_t n) {
  for (;;) {
    int32_t parent = warp->nodes[static_cast<size_t>(n)].parent;
    FreeNode(warp, n);
    if (parent < 0) return;
    Node& join = warp->nodes[static_cast<size_t>(parent)];
    if (--join.kids > 0) return;
    join.mask = join.joined & warp->live;
    join.joined = 0;
    join.is_call = false;
    if (join.mask) {
      join.state = Node::State::kRun;
      return;
    }
    n = parent;
  }
}

void LaunchEngine::Diverge(uint32_t taken, const Inst* target, const Inst* join) {
  Warp* warp = c_.warp;
  uint32_t rest = c_.mask & ~taken;
  const Inst* next = c_.pc;
  int32_t n = warp->current;
  int32_t parent;
  const Inst* rpc;
  if (join == nullptr || join == c_.rpc) {
    parent = warp->nodes[static_cast<size_t>(n)].parent;
    rpc = c_.rpc;
    if (rpc && (target == rpc || next == rpc)) {
      // One side is at the join already.
      warp->nodes[static_cast<size_t>(parent)].joined |= target == rpc ? taken : rest;
      c_.mask = target == rpc ? rest : taken;
      c_.pc = target == rpc ? next : target;
      return;
    }
    int32_t sibling = NewNode(warp);
    Node& node = warp->nodes[static_cast<size_t>(sibling)];
    node.state = Node::State::kRun;
    node.pc = target;
    node.mask = taken;
    node.rpc = rpc;
    node.parent = parent;
    node.frame = c_.frame;
    ++c_.frame->references;
    if (parent >= 0) ++warp->nodes[static_cast<size_t>(parent)].kids;
    c_.mask = rest;
    return;
  }
  // This node becomes the join, and its sides its children.
  {
    Node& node = warp->nodes[static_cast<size_t>(n)];
    node.state = Node::State::kJoin;
    node.pc = join;
    node.joined = 0;
    node.kids = 0;
  }
  int32_t first = -1;
  for (int side = 0; side < 2; ++side) {
    const Inst* pc = side == 0 ? next : target;
    uint32_t mask = side == 0 ? rest : taken;
    if (pc == join) {
      warp->nodes[static_cast<size_t>(n)].joined |= mask;
      continue;
    }
    int32_t child = NewNode(warp);
    Node& node = warp->nodes[static_cast<size_t>(child)];
    node.state = Node::State::kRun;
    node.pc = pc;
    node.mask = mask;
    node.rpc = join;
    node.parent = n;
    node.frame = c_.frame;
    ++c_.frame->references;
    ++warp->nodes[static_cast<size_t>(n)].kids;
    if (first < 0) first = child;
  }
  if (first < 0) {  // a branch to the next instruction
    Node& node = warp->nodes[static_cast<size_t>(n)];
    node.state = Node::State::kRun;
    c_.pc = join;
    return;
  }
  Event event = c_.event;
  Enter(warp, first);
  c_.event = event;
}

void LaunchEngine::SpendBudget(int32_t cost) {
  c_.budget -= cost;
  if (c_.budget <= 0) c_.event = Event::kYield;
}

void LaunchEngine::RemoveLanes(uint32_t mask) {
  c_.mask &= ~mask;
  if (c_.mask) return;
  FinishNode(c_.warp, c_.warp->current);
  c_.warp->current = -1;
  c_.event = Event::kLeafDone;
}

void LaunchEngine::Exit(uint32_t mask) {
  c_.warp->live &= ~mask;
  c_.live = c_.warp->live;
  c_.block->live_threads -= Count(mask);
  RemoveLanes(mask);
  for (uint32_t id = 0; id < kBarriers; ++id) CheckBarrier(c_.block, id);
}

void LaunchEngine::Return(uint32_t mask) {
  Frame* frame = c_.frame;
  if (!frame->caller) {
    Exit(mask);
    return;
  }
  const CallSite& site = *frame->site;
  const Code& code = *frame->code;
  for (size_t k = 0; k < site.results.size() && k < code.results.size(); ++k) {
    uint32_t bytes = std::min(site.results[k].bytes, code.results[k].bytes);
    for (uint32_t m = mask; m; m &= m - 1) {
      std::byte* lane = c_.local + c_.local_stride * static_cast<uint32_t>(__builtin_ctz(m));
      memcpy(lane + frame->caller->local_base + site.results[k].offset,
             lane + frame->local_base + code.results[k].offset, bytes);
    }
  }
  c_.warp->nodes[static_cast<size_t>(frame->call_node)].joined |= mask;
  RemoveLanes(mask);
}

void LaunchEngine::Call(const Inst& i, uint32_t mask, const CallSite& site, const Code& callee) {
  Warp* warp = c_.warp;
  uint64_t base = c_.frame->local_base + c_.frame->code->local_bytes;
  if (base + callee.local_bytes > c_.local_stride) {
    SetFault(Fault::kIllegalAddress, &i, static_cast<uint32_t>(__builtin_ctz(mask)),
             "the call stack exceeds its size (" + std::to_string(c_.local_stride) + ")");
    return;
  }
  for (size_t k = 0; k < site.arguments.size() && k < callee.parameters.size(); ++k) {
    uint32_t bytes = std::min(site.arguments[k].bytes, callee.parameters[k].bytes);
    for (uint32_t m = mask; m; m &= m - 1) {
      std::byte* lane = c_.local + c_.local_stride * static_cast<uint32_t>(__builtin_ctz(m));
      memcpy(lane + base + callee.parameters[k].offset,
             lane + c_.frame->local_base + site.arguments[k].offset, bytes);
    }
  }
  int32_t n = warp->current;
  int32_t child = NewNode(warp);
  Frame* frame = NewFrame(warp, callee);
  frame->local_base = base;
  frame->caller = c_.frame;
  frame->call_node = n;
  frame->site = &site;
  frame->references = 1;
  ++c_.frame->references;
  Node& node = warp->nodes[static_cast<size_t>(n)];
  node.state = Node::State::kJoin;
  node.is_call = true;
  node.pc = c_.pc;
  node.joined = c_.mask & ~mask;
  node.kids = 1;
  Node& inner = warp->nodes[static_cast<size_t>(child)];
  inner.state = Node::State::kRun;
  inner.pc = callee.insts.data();
  inner.mask = mask;
  inner.parent = n;
  inner.frame = frame;
  Enter(warp, child);
  SpendBudget(8);
}

bool LaunchEngine::ReleaseParked(Warp* warp) {
  for (size_t n = 0; n < warp->nodes.size(); ++n) {
    if (warp->nodes[n].state != Node::State::kJoin || !(warp->nodes[n].joined & warp->live))
      continue;
    int32_t leaf = NewNode(warp);
    Node& join = warp->nodes[n];
    Node& node = warp->nodes[static_cast<size_t>(leaf)];
    node.state = Node::State::kRun;
    node.pc = join.pc;
    node.rpc = join.rpc;
    node.mask = join.joined & warp->live;
    node.parent = join.parent;
    node.frame = join.frame;
    ++join.frame->references;
    if (join.parent >= 0) ++warp->nodes[static_cast<size_t>(join.parent)].kids;
    join.joined = 0;
    warp->current = leaf;
    return true;
  }
  return false;
}

// Puts a runnable leaf into warp->current, the next one in turn.
bool LaunchEngine::NextLeaf(Warp* warp) {
  size_t count = warp->nodes.size();
  size_t start = warp->current < 0 ? 0 : static_cast<size_t>(warp->current) + 1;
  for (size_t k = 0; k < count; ++k) {
    size_t n = (start + k) % count;
    if (warp->nodes[n].state == Node::State::kRun) {
      warp->current = static_cast<int32_t>(n);
      return true;
    }
  }
  return false;
}

bool LaunchEngine::RunWarp(Block* block, Warp* warp) {
  if (!warp->live) return false;
  c_.block = block;
  c_.warp = warp;
  c_.live = warp->live;
  c_.shared = block->shared.get();
  c_.local = warp->local.get();
  c_.budget = Slice();
  bool ran = false;
  if (warp->current >= 0 &&
      warp->nodes[static_cast<size_t>(warp->current)].state != Node::State::kRun)
    warp->current = -1;
  for (;;) {
    if (warp->current < 0 && !NextLeaf(warp)) {
      // Lanes at a join may have to run ahead: those that they wait for wait for them.
      if (ResolveWarpSync(warp, false) || ReleaseParked(warp)) {
        if (c_.event == Event::kFault) return true;
        continue;
      }
      return ran;
    }
    ran = true;
    Enter(warp, warp->current);
    do {
      const Inst* i = c_.pc;
      if (i == c_.rpc) {
        int32_t n = warp->current;
        warp->nodes[static_cast<size_t>(warp->nodes[static_cast<size_t>(n)].parent)].joined |=
            c_.mask;
        FinishNode(warp, n);
        warp->current = -1;
        c_.event = Event::kLeafDone;
        break;
      }
      c_.pc = i + 1;
      uint32_t mask = c_.mask;
      if (i->guard) {
        uint32_t p = *c_.At<const uint32_t>(i->guard & ~kGuardNegated);
        mask &= i->guard & kGuardNegated ? ~p : p;
        if (!mask) continue;
      }
      i->fn(c_, *i, mask);
    } while (c_.event == Event::kNone);
    if (c_.event == Event::kFault) return true;
    if (c_.event == Event::kYield) {
      Leave();
      if (!ReleaseParked(warp)) NextLeaf(warp);
      return true;
    }
    warp->current = warp->current >= 0 && warp->nodes[static_cast<size_t>(warp->current)].state ==
                                              Node::State::kRun
                        ? warp->current
                        : -1;
    if (!warp->live) return true;
  }
}

void LaunchEngine::SplitOff(uint32_t mask, const Inst* pc) {
  Warp* warp = c_.warp;
  int32_t other = NewNode(warp);
  Node& from = warp->nodes[static_cast<size_t>(warp->current)];
  Node& node = warp->nodes[static_cast<size_t>(other)];
  node.state = Node::State::kRun;
  node.pc = pc;
  node.rpc = c_.rpc;
  node.mask = mask;
  node.parent = from.parent;
  node.frame = c_.frame;
  ++c_.frame->references;
  if (from.parent >= 0) ++warp->nodes[static_cast<size_t>(from.parent)].kids;
  c_.mask &= ~mask;
}

void LaunchEngine::ArriveAtBarrier(const Inst&, uint32_t mask, uint32_t id, uint32_t count,
                                   bool wait) {
  Barrier& barrier = c_.block->barriers[id];
  if (count) barrier.expected = count;
  // A warp arrives with all lanes that execute the barrier; each counts as one thread.
  barrier.arrived += Count(mask);
  if (wait) {
    Warp* warp = c_.warp;
    int32_t n = warp->current;
    uint32_t rest = c_.mask & ~mask;
    // Of a predicated barrier the others go on.
    if (rest) SplitOff(rest, c_.pc);
    Node& node = warp->nodes[static_cast<size_t>(n)];
    c_.mask = mask;
    Leave();
    node.state = Node::State::kBarrier;
    node.barrier = static_cast<uint8_t>(id);
    c_.event = Event::kLeafDone;
  }
  CheckBarrier(c_.block, id);
}

void LaunchEngine::CheckBarrier(Block* block, uint32_t id) {
  Barrier& barrier = block->barriers[id];
  if (barrier.arrived == 0) return;
  // With a count, exited threads are not waited for either.
  uint32_t expected =
      barrier.expected ? std::min(barrier.expected, block->live_threads) : block->live_threads;
  if (barrier.arrived < expected) return;
  for (Warp& warp : block->warps) {
    std::vector<int32_t> released;
    for (size_t n = 0; n < warp.nodes.size(); ++n) {
      Node& node = warp.nodes[n];
      if (node.state == Node::State::kBarrier && node.barrier == id) {
        node.state = Node::State::kRun;
        released.push_back(static_cast<int32_t>(n));
        const Inst& i = node.pc[-1];
        if (i.flags & (kAnd | kOr | kXor)) {
          std::byte* registers = node.frame->registers.get();
          if (i.flags & kXor) {  // .popc
            auto* d = reinterpret_cast<uint32_t*>(registers + i.d);
            for (uint32_t m = node.mask; m; m &= m - 1) d[__builtin_ctz(m)] = barrier.reduce_popc;
          } else {
            uint32_t value = i.flags & kAnd ? barrier.reduce_and : barrier.reduce_or;
            auto* d = reinterpret_cast<uint32_t*>(registers + i.d);
            *d = (*d & ~node.mask) | (value & node.mask);
          }
        }
      }
    }
    MergeLeaves(&warp, released);
  }
  barrier = Barrier();
}

// Leaves with the same future become one again.
void LaunchEngine::MergeLeaves(Warp* warp, const std::vector<int32_t>& leaves) {
  for (size_t j = 1; j < leaves.size(); ++j) {
    Node& other = warp->nodes[static_cast<size_t>(leaves[j])];
    for (size_t k = 0; k < j; ++k) {
      Node& kept = warp->nodes[static_cast<size_t>(leaves[k])];
      if (kept.state != Node::State::kRun || other.pc != kept.pc || other.rpc != kept.rpc ||
          other.parent != kept.parent || other.frame != kept.frame)
        continue;
      kept.mask |= other.mask;
      if (other.parent >= 0) --warp->nodes[static_cast<size_t>(other.parent)].kids;
      if (warp->current == leaves[j]) warp->current = -1;
      FreeNode(warp, leaves[j]);
      break;
    }
  }
}

bool LaunchEngine::GatherLanes(const Inst& i, uint32_t mask, uint32_t need) {
  need &= c_.live;
  if (c_.gathered || (need & ~mask) == 0) return true;
  Warp* warp = c_.warp;
  int32_t n = warp->current;
  uint32_t rest = c_.mask & ~mask;
  if (rest) SplitOff(rest, c_.pc);
  c_.pc = &i;
  c_.mask = mask;
  Leave();
  Node& node = warp->nodes[static_cast<size_t>(n)];
  node.state = Node::State::kWarpSync;
  node.need = need;
  c_.event = Event::kLeafDone;
  return false;
}

bool LaunchEngine::ResolveWarpSync(Warp* warp, bool force) {
  uint32_t have = 0;
  std::vector<int32_t> waiting;
  for (size_t n = 0; n < warp->nodes.size(); ++n)
    if (warp->nodes[n].state == Node::State::kWarpSync) {
      have |= warp->nodes[n].mask;
      waiting.push_back(static_cast<int32_t>(n));
    }
  bool any = false;
  for (int32_t n : waiting) {
    Node* node = &warp->nodes[static_cast<size_t>(n)];
    if (node->state != Node::State::kWarpSync) continue;
    uint32_t need = node->need & warp->live;
    if (need & ~have) {
      if (!force || !(node->pc->flags & kForceable)) continue;
    }
    // All who stand at this instruction run it together.
    const Inst* i = node->pc;
    Frame* frame = node->frame;
    uint32_t mask = 0;
    std::vector<int32_t> group;
    for (int32_t m : waiting) {
      Node& other = warp->nodes[static_cast<size_t>(m)];
      if (other.state == Node::State::kWarpSync && other.pc == i && other.frame == frame &&
          (m == n || (other.mask & need) != 0)) {
        mask |= other.mask;
        group.push_back(m);
      }
    }
    Enter(warp, n);
    c_.mask = mask;
    c_.pc = i + 1;
    c_.gathered = true;
    i->fn(c_, *i, mask);
    c_.gathered = false;
    if (c_.event == Event::kFault) return true;
    warp->current = -1;
    for (int32_t m : group) {
      Node& other = warp->nodes[static_cast<size_t>(m)];
      other.state = Node::State::kRun;
      other.pc = i + 1;
    }
    MergeLeaves(warp, group);
    any = true;
    if (force) return true;
  }
  return any;
}

const Code* LaunchEngine::CodeOfHandle(uint64_t handle) const {
  uint64_t index = (handle - kFunctionHandleBase) >> 4;
  if (handle < kFunctionHandleBase || index >= module_.functions.size() || (handle & 15) != 0)
    return nullptr;
  auto at = image_.by_function.find(static_cast<int32_t>(index));
  return at == image_.by_function.end() ? nullptr : at->second;
}

void LaunchEngine::SetFault(Fault fault, const Inst* i, uint32_t lane, std::string text) {
  c_.event = Event::kFault;
  if (result_.fault != Fault::kNone) return;
  auto triple = [](uint32_t x, uint32_t y, uint32_t z) {
    return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
  };
  result_.fault = fault;
  result_.message = "Kernel (" + info_.name + ")";
  if (c_.block)
    result_.message += ", block " + triple(c_.block->id[0], c_.block->id[1], c_.block->id[2]);
  if (c_.warp)
    result_.message +=
        ", thread " + triple(c_.warp->tid[0][lane], c_.warp->tid[1][lane], c_.warp->tid[2][lane]);
  if (i) result_.message += ", PTX line (" + std::to_string(i->line) + ")";
  result_.message += ": " + text + ".";
}

bool LaunchEngine::Stopped() {
  if (!request_.stop || !request_.stop->load(std::memory_order_relaxed)) return false;
  c_.warp = nullptr;
  SetFault(Fault::kStopped, nullptr, 0, "the launch was stopped");
  return true;
}

void LaunchEngine::RefreshRanges() {
  uint64_t generation = memory_.generation();
  if (generation == generation_) return;
  generation_ = generation;
  for (CachedRange& range : c_.ranges) range = CachedRange();
}

LaunchResult LaunchEngine::Deadlock(Block* block) {
  c_.block = block;
  for (Warp& warp : block->warps)
    for (Node& node : warp.nodes)
      if (node.mask &&
          (node.state == Node::State::kBarrier || node.state == Node::State::kWarpSync)) {
        c_.warp = &warp;
        bool barrier = node.state == Node::State::kBarrier;
        SetFault(Fault::kDeadlock, barrier ? node.pc - 1 : node.pc,
                 static_cast<uint32_t>(__builtin_ctz(node.mask)),
                 std::string("no thread of the block can go on; this one waits at a ") +
                     (barrier ? "barrier" : "warp barrier"));
        return result_;
      }
  SetFault(Fault::kDeadlock, nullptr, 0, "no thread of the block can go on");
  return result_;
}

LaunchResult LaunchEngine::Run() {
  // The program that called us may have changed the rounding mode or flush denormals.
  uint32_t control = _mm_getcsr();
  _mm_setcsr(0x1f80);
  struct Restore {
    uint32_t control;
    ~Restore() { _mm_setcsr(control); }
  } restore{control};

  uint64_t total = uint64_t{request_.grid[0]} * request_.grid[1] * request_.grid[2];
  uint64_t started = 0;
  std::vector<Block*> resident;
  std::vector<Block*> spare;
  auto start = [&] {
    if (spare.empty()) {
      pool_.push_back(MakeBlock());
      spare.push_back(pool_.back().get());
    }
    Block* block = spare.back();
    spare.pop_back();
    StartBlock(block, started++);
    resident.push_back(block);
  };
  if (request_.cooperative) {
    workspace_ = memory_.AllocateVariable(256, 256, false);
    while (started < total) start();
  } else if (total) {
    start();
  }
  generation_ = memory_.generation();
  size_t turn = 0;
  while (!resident.empty()) {
    turn %= resident.size();
    Block* block = resident[turn];
    bool any = false, yielded = false;
    RefreshRanges();
    for (Warp& warp : block->warps) {
      if (!RunWarp(block, &warp)) continue;
      if (c_.event == Event::kFault) return result_;
      any = true;
      if (c_.event == Event::kYield) {
        yielded = true;
        RefreshRanges();
        if (Stopped()) return result_;
      }
    }
    // Also where no warp spends its budget: a loop over a barrier gives way at each.
    if (Stopped()) return result_;
    if (BlockDone(*block)) {
      spare.push_back(block);
      if (started < total) {
        resident.erase(resident.begin() + static_cast<ptrdiff_t>(turn));
        start();
        std::swap(resident[turn], resident.back());
      } else {
        resident.erase(resident.begin() + static_cast<ptrdiff_t>(turn));
      }
      continue;
    }
    if (!any) {
      bool forced = false;
      for (Warp& warp : block->warps) {
        c_.block = block;
        c_.warp = &warp;
        c_.live = warp.live;
        c_.shared = block->shared.get();
        c_.local = warp.local.get();
        if (warp.live && ResolveWarpSync(&warp, true)) {
          forced = true;
          break;
        }
      }
      if (c_.event == Event::kFault) return result_;
      if (!forced) return Deadlock(block);
      continue;
    }
    if (yielded) {
      ++block->idle_passes;
      if (!request_.cooperative && block->idle_passes >= kPatience && started < total &&
          resident.size() < kResidentBlocks) {
        block->idle_passes = 0;
        start();
      }
      ++turn;
    }
  }
  return result_;
}

}  // namespace simgpu::exec
