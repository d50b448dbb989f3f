// Where do the sides of a branch meet? At its immediate post-dominator: the first instruction that
// every path from it must pass. Found with the iterative algorithm of Cooper, Harvey and Kennedy on
// the reversed flow graph, whose root is a virtual exit.
#include <algorithm>

#include "simgpu/exec/decode.h"
#include "simgpu/exec/ops_control.h"

namespace simgpu::exec {

void FindJoins(Code* code) {
  std::vector<Inst>& insts = code->insts;
  size_t count = insts.size();
  auto is_branch = [](const Inst& i) { return i.fn == Branch || i.fn == BranchAlways; };
  auto ends = [&](const Inst& i) { return i.fn == Return || i.fn == Exit || i.fn == Trap; };
  // Basic blocks.
  std::vector<char> leader(count + 1, 0);
  leader[0] = 1;
  for (size_t k = 0; k < count; ++k) {
    if (is_branch(insts[k])) leader[static_cast<size_t>(insts[k].target)] = 1;
    if (is_branch(insts[k]) || ends(insts[k])) leader[k + 1] = 1;
  }
  std::vector<int32_t> block_of(count), start;
  for (size_t k = 0; k < count; ++k) {
    if (leader[k]) start.push_back(static_cast<int32_t>(k));
    block_of[k] = static_cast<int32_t>(start.size()) - 1;
  }
  size_t blocks = start.size();
  int32_t exit = static_cast<int32_t>(blocks);
  std::vector<std::vector<int32_t>> successors(blocks), predecessors(blocks + 1);
  auto edge = [&](size_t from, int32_t to) {
    successors[from].push_back(to);
    predecessors[static_cast<size_t>(to)].push_back(static_cast<int32_t>(from));
  };
  for (size_t b = 0; b < blocks; ++b) {
    size_t last = (b + 1 < blocks ? static_cast<size_t>(start[b + 1]) : count) - 1;
    const Inst& i = insts[last];
    int32_t next = last + 1 < count ? block_of[last + 1] : exit;
    if (i.fn == BranchAlways && !i.guard) {
      edge(b, block_of[static_cast<size_t>(i.target)]);
    } else if (is_branch(i)) {
      edge(b, block_of[static_cast<size_t>(i.target)]);
      edge(b, next);
    } else if (ends(i)) {
      edge(b, exit);
      if (i.guard) edge(b, next);
    } else {
      edge(b, next);
    }
  }
  // Post-order of the reversed graph from the exit.
  std::vector<int32_t> order(blocks + 1, -1), sequence;
  std::vector<std::pair<int32_t, size_t>> stack{{exit, 0}};
  std::vector<char> seen(blocks + 1, 0);
  seen[static_cast<size_t>(exit)] = 1;
  while (!stack.empty()) {
    auto& [node, at] = stack.back();
    const auto& before = predecessors[static_cast<size_t>(node)];
    if (at < before.size()) {
      int32_t next = before[at++];
      if (!seen[static_cast<size_t>(next)]) {
        seen[static_cast<size_t>(next)] = 1;
        stack.push_back({next, 0});
      }
    } else {
      order[static_cast<size_t>(node)] = static_cast<int32_t>(sequence.size());
      sequence.push_back(node);
      stack.pop_back();
    }
  }
  std::vector<int32_t> dominator(blocks + 1, -1);
  dominator[static_cast<size_t>(exit)] = exit;
  bool changed = true;
  while (changed) {
    changed = false;
    for (size_t k = sequence.size(); k-- > 0;) {
      int32_t node = sequence[k];
      if (node == exit) continue;
      int32_t chosen = -1;
      for (int32_t s : successors[static_cast<size_t>(node)]) {
        if (dominator[static_cast<size_t>(s)] < 0) continue;
        if (chosen < 0) {
          chosen = s;
          continue;
        }
        int32_t x = chosen, y = s;
        while (x != y) {
          while (order[static_cast<size_t>(x)] < order[static_cast<size_t>(y)])
            x = dominator[static_cast<size_t>(x)];
          while (order[static_cast<size_t>(y)] < order[static_cast<size_t>(x)])
            y = dominator[static_cast<size_t>(y)];
        }
        chosen = x;
      }
      if (chosen != dominator[static_cast<size_t>(node)]) {
        dominator[static_cast<size_t>(node)] = chosen;
        changed = true;
      }
    }
  }
  for (size_t k = 0; k < count; ++k) {
    if (insts[k].fn != Branch) continue;
    int32_t join = dominator[static_cast<size_t>(block_of[k])];
    insts[k].join = join < 0 || join == exit ? -1 : start[static_cast<size_t>(join)];
  }
}

}  // namespace simgpu::exec
