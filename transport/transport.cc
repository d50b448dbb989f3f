#include "transport/transport.h"

#include <sys/mman.h>
#include <unistd.h>

namespace penstock::transport {
namespace {

// Anonymous memory with an ordinary registration.
class OwnedRegion : public MemoryRegion {
 public:
  OwnedRegion(std::unique_ptr<MemoryRegion> registered) : registered_(std::move(registered)) {}
  ~OwnedRegion() override {
    std::byte* const memory = address();
    const size_t bytes = size();
    registered_.reset();
    munmap(memory, bytes);
  }
  std::byte* address() const override { return registered_->address(); }
  size_t size() const override { return registered_->size(); }
  const MemoryKey& key() const override { return registered_->key(); }

 private:
  std::unique_ptr<MemoryRegion> registered_;
};

}  // namespace

Result<std::unique_ptr<MemoryRegion>> Connection::Allocate(size_t bytes, Access access) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > SIZE_MAX - page) {
    return Fail(Code::kInvalidArgument,
                "Memory for copies (" + std::to_string(bytes) + " bytes) has an impossible size.");
  }
  bytes = (bytes + page - 1) / page * page;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return FailErrno("Cannot map memory for copies (" + std::to_string(bytes) + " bytes)");
  }
  auto registered = Register(memory, bytes, access);
  if (!registered) {
    munmap(memory, bytes);
    return registered;
  }
  return std::make_unique<OwnedRegion>(std::move(*registered));
}

Result<std::unique_ptr<MemoryRegion>> Connection::RegisterDevice(uint64_t, size_t, int, uint64_t) {
  return Fail(Code::kUnsupported, "This transport does not reach the memory of a GPU.");
}

Result<std::vector<std::unique_ptr<Loopback>>> Connection::OpenLoopbacks(Deadline) {
  return Fail(Code::kUnsupported, "This transport has no way through a NIC and back.");
}

}  // namespace penstock::transport
