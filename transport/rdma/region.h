// Memory that is registered on every device of a session.
//
// Which keys it has can change while it is in use: a rail that comes back on another device brings
// new ones. So the local keys are atomics, which the bulk engine reads without a lock, and each
// change of the peer's key makes a new MemoryKey beside the old ones, whose readers keep a sound
// (if older) text. That is a few hundred bytes at each change of a rail's device, which is rare.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "common/unique_fd.h"
#include "transport/rdma/domain.h"
#include "transport/transport.h"

namespace penstock::transport::rdma {

class RdmaRegion : public MemoryRegion {
 public:
  ~RdmaRegion() override;  // ends the peer's access; may come after the connection's end

  std::byte* address() const override { return reinterpret_cast<std::byte*>(address_); }
  size_t size() const override { return bytes_; }
  const MemoryKey& key() const override { return *key_.load(std::memory_order_acquire); }

  const Domain* domain() const { return domain_.get(); }
  bool is_device_memory() const { return device_memory_.dmabuf.valid(); }
  // The local key on the device of a rail; false if it has none there. No lock.
  bool LocalKey(uint32_t rail, uint32_t* lkey) const {
    const uint64_t word = local_keys_[rail].load(std::memory_order_acquire);
    *lkey = static_cast<uint32_t>(word);
    return (word & kValid) != 0;
  }

 private:
  friend class Domain;
  static constexpr uint64_t kValid = uint64_t{1} << 32;
  struct DeviceMemory {
    UniqueFd dmabuf;
    uint64_t offset = 0;
  };

  RdmaRegion(std::shared_ptr<Domain> domain, uint64_t address, size_t bytes, Access access);
  ibv_mr* On(const Domain::Device* device) const;
  void RenewKeys();  // under the domain's mutex, except before the region is in its list

  const std::shared_ptr<Domain> domain_;
  const uint64_t address_;
  const size_t bytes_;
  const Access access_;
  DeviceMemory device_memory_;  // a GPU's, if dmabuf is valid
  std::vector<std::pair<const Domain::Device*, ibv_mr*>> registrations_;
  std::array<std::atomic<uint64_t>, kMaxRails> local_keys_{};
  std::list<MemoryKey> keys_;
  std::atomic<const MemoryKey*> key_;
};

}  // namespace penstock::transport::rdma
