#include "transport/shm/bulk_servant.h"

#include <sched.h>

#include <cstring>
#include <string>

#include "transport/shm/futex.h"
#include "transport/shm/order.h"
#include "transport/thread.h"

namespace penstock::transport::shm {
namespace {

constexpr int kYields = 32;

bool IsSound(const BulkRequest& request, uint32_t slot_bytes) {
  return (request.op == kBulkGet || request.op == kBulkPut) && request.bytes > 0 &&
         request.bytes <= slot_bytes && request.offset >= request.move_offset &&
         request.move_bytes >= request.bytes &&
         request.offset - request.move_offset <= request.move_bytes - request.bytes;
}

}  // namespace

void BulkServant::EnsureStarted() {
  std::lock_guard lock(start_mutex_);
  if (started_ || link_.closed()) return;
  started_ = StartThread(thread_, "penstock-bulk", [this] { Run(); });
  if (!started_) link_.Close("The system has no thread for bulk moves.", LogLevel::kError);
}

void BulkServant::Stop() {
  Kick();
  std::lock_guard lock(start_mutex_);
  if (thread_.joinable()) thread_.join();
}

void BulkServant::Kick() {
  WakeUp(segment_.words().bulk[kClient]);
}

void BulkServant::Run() {
  BulkWords& words = segment_.words().bulk[kClient];
  int idle = 0;
  while (!link_.closed()) {
    if (ServeNext()) {
      idle = 0;
    } else if (idle < kYields) {
      ++idle;
      sched_yield();
    } else {
      const uint32_t seen = words.changes.load(std::memory_order_seq_cst);
      words.sleeping.store(1, std::memory_order_seq_cst);
      const BulkDescriptor& next = segment_.descriptor(served_ % kBulkSlots);
      if (next.request.load(std::memory_order_seq_cst) != served_ + 1 && !link_.closed()) {
        SleepWhile(words, seen);
      }
      words.sleeping.store(0, std::memory_order_relaxed);
    }
  }
}

bool BulkServant::ServeNext() {
  const uint32_t slot = served_ % kBulkSlots;
  BulkDescriptor& descriptor = segment_.descriptor(slot);
  if (Observe(descriptor.request) != served_ + 1) return false;
  BulkRequest request;
  std::memcpy(&request, &descriptor.body, sizeof request);
  BulkReply reply = kBulkRefused;
  if (!Serve(request, slot, &reply)) return false;
  ++served_;
  __atomic_store_n(&descriptor.status, static_cast<uint32_t>(reply), __ATOMIC_RELAXED);
  Publish(descriptor.reply, served_, std::memory_order_seq_cst);
  WakeUp(segment_.words().bulk[kServer]);
  return true;
}

bool BulkServant::Serve(const BulkRequest& request, uint32_t slot, BulkReply* reply) {
  if (!IsSound(request, segment_.slot_bytes())) {
    link_.Close("The peer breaks the bulk protocol: request (" + std::to_string(request.op) +
                    ") of " + std::to_string(request.bytes) + " bytes.",
                LogLevel::kWarning);
    return false;
  }
  const Access wanted = request.op == kBulkGet ? Access::kPeerReads : Access::kPeerWrites;
  const KeyBlob key = {kKeyKind, request.key_slot, request.key_generation, 0, request.key_secret};
  const auto region = regions_->Find(key, request.move_offset, request.move_bytes, wanted);
  if (region == nullptr) return true;
  std::lock_guard touching(region->mutex);
  if (!region->alive) return true;
  std::byte* const here = region->address + request.offset;
  if (request.op == kBulkGet) {
    std::memcpy(segment_.slot(slot), here, request.bytes);
    bytes_sent_.fetch_add(request.bytes, std::memory_order_relaxed);
  } else {
    std::memcpy(here, segment_.slot(slot), request.bytes);
    bytes_received_.fetch_add(request.bytes, std::memory_order_relaxed);
  }
  *reply = kBulkOk;
  return true;
}

}  // namespace penstock::transport::shm
