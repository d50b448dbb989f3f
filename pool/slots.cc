#include "pool/slots.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

namespace penstock::pool {

Status CheckPlan(const SlotPlan& plan, const std::vector<GpuMemory>& gpus) {
  std::set<uint32_t> seen;
  for (const uint32_t gpu : plan.gpus) {
    if (gpu >= gpus.size()) {
      return Fail(Code::kInvalidArgument, "The pool offers GPU (" + std::to_string(gpu) +
                                              "), and this server has (" +
                                              std::to_string(gpus.size()) + ").");
    }
    if (!seen.insert(gpu).second) {
      return Fail(Code::kInvalidArgument,
                  "The pool offers GPU (" + std::to_string(gpu) + ") twice.");
    }
    const GpuMemory& memory = gpus[gpu];
    const uint64_t share = memory.total / plan.slots_per_gpu;
    if (share < memory.reserved || plan.memory_per_slot > share - memory.reserved) {
      const uint64_t fits = share > memory.reserved ? share - memory.reserved : 0;
      return Fail(Code::kInvalidArgument, "GPU (" + std::to_string(gpu) + ") cannot hold (" +
                                              std::to_string(plan.slots_per_gpu) + ") slots of (" +
                                              std::to_string(plan.memory_per_slot) +
                                              ") bytes: with (" + std::to_string(memory.reserved) +
                                              ") bytes for each context, (" + std::to_string(fits) +
                                              ") fit.");
    }
  }
  return {};
}

Slots::Slots(SlotPlan plan) : plan_(std::move(plan)), taken_(plan_.gpus.size(), 0) {}

std::optional<std::vector<uint32_t>> Slots::Take(uint32_t count) {
  std::vector<size_t> places;
  for (size_t place = 0; place < taken_.size(); ++place) {
    if (taken_[place] < plan_.slots_per_gpu) places.push_back(place);
  }
  if (count == 0 || places.size() < count) return std::nullopt;
  std::stable_sort(places.begin(), places.end(),
                   [this](size_t a, size_t b) { return taken_[a] < taken_[b]; });
  places.resize(count);
  std::vector<uint32_t> gpus;
  for (const size_t place : places) {
    ++taken_[place];
    gpus.push_back(plan_.gpus[place]);
  }
  std::sort(gpus.begin(), gpus.end());
  return gpus;
}

void Slots::Release(const std::vector<uint32_t>& gpus) {
  for (const uint32_t gpu : gpus) {
    const auto found = std::find(plan_.gpus.begin(), plan_.gpus.end(), gpu);
    if (found != plan_.gpus.end()) --taken_[found - plan_.gpus.begin()];
  }
}

uint32_t Slots::free_gpus() const {
  return static_cast<uint32_t>(std::count_if(taken_.begin(), taken_.end(), [this](uint32_t taken) {
    return taken < plan_.slots_per_gpu;
  }));
}

bool Slots::offers(uint32_t gpu) const {
  return std::find(plan_.gpus.begin(), plan_.gpus.end(), gpu) != plan_.gpus.end();
}

uint32_t Slots::taken(uint32_t gpu) const {
  const auto found = std::find(plan_.gpus.begin(), plan_.gpus.end(), gpu);
  return found == plan_.gpus.end() ? 0 : taken_[found - plan_.gpus.begin()];
}

}  // namespace penstock::pool
