// Which programs get which GPUs of one server: the sharing of a GPU into slots.
//
// Each offered GPU has the same number of slots, each slot the same amount of memory. A program
// takes one slot on each of as many GPUs as it asks for and gives them back when it ends. Of the
// GPUs with a free slot those with the fewest programs are taken, so that programs share a GPU only
// when no other one is free. Pure decisions: no time, no processes, no I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/result.h"

namespace penstock::pool {

struct GpuMemory {
  uint64_t total = 0;     // bytes
  uint64_t reserved = 0;  // what one context takes before the program has allocated anything
};

struct SlotPlan {
  std::vector<uint32_t> gpus;    // ordinals that are offered
  uint32_t slots_per_gpu = 1;    // at least 1
  uint64_t memory_per_slot = 0;  // bytes; 0: no limit but the GPU's
};

// An error if the plan names a GPU that is not there or twice, or promises more memory than a GPU
// has: slots x (memory per slot + what a context takes).
Status CheckPlan(const SlotPlan& plan, const std::vector<GpuMemory>& gpus);

class Slots {
 public:
  explicit Slots(SlotPlan plan);

  // The GPUs of a program that asks for so many, in ascending order; nothing if they are not free.
  std::optional<std::vector<uint32_t>> Take(uint32_t count);
  void Release(const std::vector<uint32_t>& gpus);

  // GPUs with a slot that is free.
  uint32_t free_gpus() const;
  uint32_t offered() const { return static_cast<uint32_t>(plan_.gpus.size()); }
  bool offers(uint32_t gpu) const;
  uint32_t taken(uint32_t gpu) const;  // slots, of an offered GPU
  const SlotPlan& plan() const { return plan_; }

 private:
  SlotPlan plan_;
  std::vector<uint32_t> taken_;  // by place in plan_.gpus
};

}  // namespace penstock::pool
