// The devices that one session uses, with a protection domain of its own on each, and the memory
// that it has registered there.
//
// A region is registered on every device of the session. The client's regions may be read or
// written by the peer (exactly as Register's access says, never more); the server's never: its
// protection domains hold no memory with any remote access, so a hostile client has nothing to
// reach, whatever it sends.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "common/result.h"
#include "transport/rdma/verbs.h"
#include "transport/rdma/wire.h"
#include "transport/transport.h"

namespace penstock::transport::rdma {

class RdmaRegion;

class Domain : public std::enable_shared_from_this<Domain> {
 public:
  struct Device {
    ibv_context* context = nullptr;  // rdma_cm's own for this device; not closed by us
    ibv_pd* pd = nullptr;
    std::string name;
  };

  // `peer_access`: the client's side. False: the server's, whose regions are for local use only.
  Domain(std::shared_ptr<Verbs> verbs, bool peer_access);
  ~Domain();  // after every queue pair and region

  Verbs& verbs() const { return *verbs_; }
  const std::shared_ptr<Verbs>& shared_verbs() const { return verbs_; }
  // The protection domain on the device of this context; made, and every region registered there,
  // when the device is new.
  Result<Device*> Use(ibv_context* context);
  // Which device rail r runs on; keys carry that device's rkey for it.
  void AssignRail(uint32_t rail, Device* device);

  Result<std::unique_ptr<MemoryRegion>> Register(void* address, size_t bytes, Access access);
  // The server's: memory of a GPU, whole allocations, through the dma-buf that names it. `offset`
  // is where the memory starts in the dma-buf; the descriptor stays the caller's. kUnsupported
  // where a device or kernel cannot.
  Result<std::unique_ptr<MemoryRegion>> RegisterDevice(uint64_t device_address, size_t bytes,
                                                       int dmabuf_fd, uint64_t offset);
  // For our own buffers (packet slots, headers): local access only, on one device. The caller
  // deregisters it.
  Result<ibv_mr*> RegisterLocal(Device& device, void* address, size_t bytes);

  // The region as one of this domain, or nullptr if another one registered it.
  const RdmaRegion* Own(const MemoryRegion& region) const;
  // The local key of a region on a rail's device; 0 and false if it has none there.
  bool LocalKey(const MemoryRegion& region, uint32_t rail, uint32_t* lkey) const;
  // The same on a device, whatever rail it is. Takes the lock.
  bool LocalKeyOn(const MemoryRegion& region, const Device& device, uint32_t* lkey) const;

  uint64_t registered_bytes() const;

 private:
  friend class RdmaRegion;
  Result<ibv_mr*> RegisterOn(const Device& device, const RdmaRegion& region) const;
  Result<std::unique_ptr<MemoryRegion>> Complete(std::unique_ptr<RdmaRegion> region);

  std::shared_ptr<Verbs> verbs_;
  const bool peer_access_;
  mutable std::mutex mutex_;
  std::list<Device> devices_;
  std::array<Device*, kMaxRails> rails_{};
  std::list<RdmaRegion*> regions_;
  uint64_t registered_bytes_ = 0;
};

}  // namespace penstock::transport::rdma
