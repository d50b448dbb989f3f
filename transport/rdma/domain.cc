#include "transport/rdma/domain.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "common/log.h"
#include "transport/rdma/memlock.h"
#include "transport/rdma/region.h"

namespace penstock::transport::rdma {
namespace {

// What went wrong with a registration, and what a person can do about it.
tl::unexpected<Error> FailRegistration(int error, size_t bytes, const std::string& device) {
  std::string text = "Device (" + device + ") does not register memory (" + std::to_string(bytes) +
                     " bytes): " + strerror(error) + ".";
  switch (error) {
    case ENOMEM:
    case EAGAIN:
    case EPERM:
      text += MemlockAdvice(error);
      return Fail(Code::kResourceExhausted, std::move(text));
    case EFAULT:
      text += " Part of the range is not mapped, or is read-only and was to be written.";
      return Fail(Code::kInvalidArgument, std::move(text));
    case EOPNOTSUPP:
    case EPROTONOSUPPORT:
      return Fail(Code::kUnsupported, std::move(text));
    default:
      return Fail(Code::kSystem, std::move(text));
  }
}

}  // namespace

RdmaRegion::RdmaRegion(std::shared_ptr<Domain> domain, uint64_t address, size_t bytes,
                       Access access)
    : domain_(std::move(domain)), address_(address), bytes_(bytes), access_(access) {
  key_.store(&keys_.emplace_back(), std::memory_order_relaxed);
}

RdmaRegion::~RdmaRegion() {
  {
    std::lock_guard lock(domain_->mutex_);
    if (domain_->regions_.remove(this) > 0) domain_->registered_bytes_ -= bytes_;
  }
  // Returns when the device no longer reads or writes the memory.
  for (const auto& [device, registration] : registrations_) {
    const int error = domain_->verbs_->DeregMr(registration);
    if (error != 0) {
      LOG_WARNING("transport", "Device (%s) does not deregister memory (%zu bytes): %s.",
                  device->name.c_str(), bytes_, strerror(error));
    }
  }
}

ibv_mr* RdmaRegion::On(const Domain::Device* device) const {
  for (const auto& [candidate, registration] : registrations_) {
    if (candidate == device) return registration;
  }
  return nullptr;
}

void RdmaRegion::RenewKeys() {
  RdmaKeyBlob blob;
  blob.access = static_cast<uint8_t>(access_);
  blob.address = address_;
  blob.bytes = bytes_;
  for (uint32_t rail = 0; rail < kMaxRails; ++rail) {
    const Domain::Device* device = domain_->rails_[rail];
    const ibv_mr* registration = device == nullptr ? nullptr : On(device);
    local_keys_[rail].store(registration == nullptr ? 0 : kValid | registration->lkey,
                            std::memory_order_release);
    if (registration == nullptr || !domain_->peer_access_) continue;
    blob.rails = static_cast<uint8_t>(blob.rails | 1u << rail);
    blob.rkey[rail] = registration->rkey;
  }
  MemoryKey key;
  key.bytes = sizeof blob;
  std::memcpy(key.blob.data(), &blob, sizeof blob);
  key_.store(&keys_.emplace_back(key), std::memory_order_release);
}

Domain::Domain(std::shared_ptr<Verbs> verbs, bool peer_access)
    : verbs_(std::move(verbs)), peer_access_(peer_access) {}

Domain::~Domain() {
  for (const Device& device : devices_) {
    const int error = verbs_->DeallocPd(device.pd);
    if (error != 0) {
      LOG_WARNING("transport", "Device (%s) does not free its protection domain: %s.",
                  device.name.c_str(), strerror(error));
    }
  }
}

Result<Domain::Device*> Domain::Use(ibv_context* context) {
  std::lock_guard lock(mutex_);
  for (Device& device : devices_) {
    if (device.context == context) return &device;
  }
  Device device;
  device.context = context;
  const char* name = verbs_->GetDeviceName(context->device);
  device.name = name == nullptr ? "?" : name;
  device.pd = verbs_->AllocPd(context);
  if (device.pd == nullptr) {
    return FailErrno("Device (" + device.name + ") has no protection domain for a session");
  }
  Device* added = &devices_.emplace_back(std::move(device));
  for (RdmaRegion* region : regions_) {
    auto registration = RegisterOn(*added, *region);
    if (registration) {
      region->registrations_.emplace_back(added, *registration);
    } else {
      LOG_WARNING("transport", "%s It stays out of this device's reach.",
                  registration.error().message.c_str());
    }
  }
  return added;
}

void Domain::AssignRail(uint32_t rail, Device* device) {
  if (rail >= kMaxRails) return;
  std::lock_guard lock(mutex_);
  if (rails_[rail] == device) return;
  rails_[rail] = device;
  for (RdmaRegion* region : regions_) region->RenewKeys();
}

Result<ibv_mr*> Domain::RegisterOn(const Device& device, const RdmaRegion& region) const {
  // The optional flag is ignored by devices that do not know it. Nothing here depends on the order
  // in which bytes of bulk memory arrive.
  int access = IBV_ACCESS_RELAXED_ORDERING;
  const auto wanted = static_cast<uint8_t>(region.access_);
  if (!peer_access_) {
    access |= IBV_ACCESS_LOCAL_WRITE;
  } else {
    if ((wanted & static_cast<uint8_t>(Access::kPeerReads)) != 0) access |= IBV_ACCESS_REMOTE_READ;
    if ((wanted & static_cast<uint8_t>(Access::kPeerWrites)) != 0) {
      access |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE;
    }
  }
  const auto& memory = region.device_memory_;
  errno = 0;
  ibv_mr* registration = memory.dmabuf.valid()
                             ? verbs_->RegDmabufMr(device.pd, memory.offset, region.bytes_,
                                                   region.address_, memory.dmabuf.get(), access)
                             : verbs_->RegMr(device.pd, region.address(), region.bytes_, access);
  if (registration == nullptr) return FailRegistration(errno, region.bytes_, device.name);
  return registration;
}

Result<std::unique_ptr<MemoryRegion>> Domain::Register(void* address, size_t bytes, Access access) {
  if (address == nullptr || bytes == 0) {
    return Fail(Code::kInvalidArgument, "A memory registration is empty.");
  }
  if (reinterpret_cast<uintptr_t>(address) + bytes < bytes) {
    return Fail(Code::kInvalidArgument, "A memory registration wraps around the address space.");
  }
  const auto wanted = static_cast<uint8_t>(access);
  if (wanted == 0 || wanted > static_cast<uint8_t>(Access::kPeerReadsAndWrites)) {
    return Fail(Code::kInvalidArgument,
                "A memory registration asks for unknown access (" + std::to_string(wanted) + ").");
  }
  std::unique_ptr<RdmaRegion> region(
      new RdmaRegion(shared_from_this(), reinterpret_cast<uintptr_t>(address), bytes, access));
  return Complete(std::move(region));
}

Result<std::unique_ptr<MemoryRegion>> Domain::RegisterDevice(uint64_t device_address, size_t bytes,
                                                             int dmabuf_fd, uint64_t offset) {
  if (peer_access_) {
    return Fail(Code::kUnsupported, "Only the server registers memory of its own devices.");
  }
  if (bytes == 0 || device_address + bytes < bytes || offset + bytes < bytes) {
    return Fail(Code::kInvalidArgument, "A registration of device memory is empty or wraps.");
  }
  std::unique_ptr<RdmaRegion> region(
      new RdmaRegion(shared_from_this(), device_address, bytes, Access::kPeerReadsAndWrites));
  // Kept for devices that come later.
  region->device_memory_.dmabuf = UniqueFd(fcntl(dmabuf_fd, F_DUPFD_CLOEXEC, 0));
  region->device_memory_.offset = offset;
  if (!region->device_memory_.dmabuf.valid()) {
    return FailErrno("A dma-buf (descriptor " + std::to_string(dmabuf_fd) + ") cannot be kept");
  }
  return Complete(std::move(region));
}

// Registering takes milliseconds for large memory, so it is done without the mutex; a device that
// came meanwhile is caught up with before the region enters the list.
Result<std::unique_ptr<MemoryRegion>> Domain::Complete(std::unique_ptr<RdmaRegion> region) {
  for (;;) {
    std::vector<const Device*> missing;
    {
      std::lock_guard lock(mutex_);
      for (const Device& device : devices_) {
        if (region->On(&device) == nullptr) missing.push_back(&device);
      }
      if (missing.empty()) {
        region->RenewKeys();
        regions_.push_back(region.get());
        registered_bytes_ += region->bytes_;
        return region;
      }
    }
    for (const Device* device : missing) {
      ASSIGN_OR_RETURN(ibv_mr * registration, RegisterOn(*device, *region));
      region->registrations_.emplace_back(device, registration);
    }
  }
}

Result<ibv_mr*> Domain::RegisterLocal(Device& device, void* address, size_t bytes) {
  errno = 0;
  ibv_mr* registration = verbs_->RegMr(device.pd, address, bytes, IBV_ACCESS_LOCAL_WRITE);
  if (registration == nullptr) return FailRegistration(errno, bytes, device.name);
  return registration;
}

const RdmaRegion* Domain::Own(const MemoryRegion& region) const {
  const auto* ours = dynamic_cast<const RdmaRegion*>(&region);
  return ours != nullptr && ours->domain() == this ? ours : nullptr;
}

bool Domain::LocalKeyOn(const MemoryRegion& region, const Device& device, uint32_t* lkey) const {
  const RdmaRegion* ours = Own(region);
  if (ours == nullptr) return false;
  std::lock_guard lock(mutex_);
  const ibv_mr* registration = ours->On(&device);
  if (registration != nullptr) *lkey = registration->lkey;
  return registration != nullptr;
}

uint64_t Domain::registered_bytes() const {
  std::lock_guard lock(mutex_);
  return registered_bytes_;
}

}  // namespace penstock::transport::rdma
