#include "server/worker/pins.h"

#include <algorithm>

#include "common/clock.h"
#include "common/log.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

constexpr int64_t kSweepNs = 100'000'000;

}  // namespace

bool Pins::Usable(const std::shared_ptr<ContextState>& context,
                  const transport::ReachedMemory& memory) {
  for (const Place& pin : pins_) {
    if (pin->base == memory.base) return pin->state == State::kPinned;
  }
  auto pin = std::make_shared<Pin>();
  pin->base = memory.base;
  pin->bytes = memory.bytes;
  pin->keep = memory.keep;
  pin->context = context;
  pins_.push_back(pin);
  Begin(context, pin);
  return false;
}

// The executor also destroys contexts, so while this job runs its context lives.
void Pins::Begin(const std::shared_ptr<ContextState>& context, const Place& pin) {
  const Driver& driver = worker_.driver();
  auto result = std::make_shared<CUresult>(CUDA_ERROR_UNKNOWN);
  worker_.executor().Run(
      [&driver, context, pin, result] {
        *result = driver.cuCtxSetCurrent(context->context);
        if (*result != CUDA_SUCCESS) return;
        *result = driver.cuMemHostRegister_v2(pin->base, pin->bytes, CU_MEMHOSTREGISTER_PORTABLE);
        driver.cuCtxSetCurrent(nullptr);
      },
      [this, &driver, pin, result] {
        if (std::find(pins_.begin(), pins_.end(), pin) == pins_.end()) return;  // context gone
        pin->state = *result == CUDA_SUCCESS ? State::kPinned : State::kRefused;
        if (*result == CUDA_SUCCESS) return;
        LOG_WARNING("transfer",
                    "The driver does not pin memory that the client shares (%zu bytes): %s. Copies "
                    "from and to it are copied once more.",
                    pin->bytes, ErrorName(driver, *result));
      });
}

void Pins::End(const Place& pin) {
  const auto context = pin->context.lock();
  if (pin->state != State::kPinned || context == nullptr || !context->alive) return;
  const Driver& driver = worker_.driver();
  worker_.executor().Run(
      [&driver, context, pin] {
        if (driver.cuCtxSetCurrent(context->context) != CUDA_SUCCESS) return;
        driver.cuMemHostUnregister(pin->base);
        driver.cuCtxSetCurrent(nullptr);
      },
      [pin] {});  // whose end unmaps the memory
}

void Pins::Sweep() {
  if (pins_.empty()) return;
  const int64_t now = NowNanoseconds();
  if (now - swept_ns_ < kSweepNs) return;
  swept_ns_ = now;
  std::erase_if(pins_, [this](const Place& pin) {
    if (pin->state == State::kPinning || pin->keep.use_count() > 1) return false;
    End(pin);
    return true;
  });
}

void Pins::DropContext(const ContextState& context) {
  std::erase_if(pins_, [&](const Place& pin) {
    const auto own = pin->context.lock();
    return own == nullptr || own.get() == &context;
  });
}

}  // namespace penstock::server
