#include "transport/shm/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <string>
#include <utility>

namespace penstock::transport::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kHeadBytes = 2 * kPageBytes;

Result<Mapping> MapAt(int fd, size_t offset, size_t bytes) {
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) return FailErrno("Cannot map shared memory");
  // The child of a fork has no business in the rings of its parent.
  (void)madvise(memory, bytes, MADV_DONTFORK);
  return Mapping(static_cast<std::byte*>(memory), bytes);
}

// The same bytes twice in a row: what runs over the end of the first is the start of the second.
Result<Mapping> MapTwice(int fd, size_t offset, size_t bytes) {
  void* const space =
      mmap(nullptr, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return FailErrno("Cannot reserve addresses for shared memory");
  Mapping both(static_cast<std::byte*>(space), 2 * bytes);
  for (const size_t half : {size_t{0}, bytes}) {
    if (mmap(both.address() + half, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
             static_cast<off_t>(offset)) == MAP_FAILED) {
      return FailErrno("Cannot map shared memory");
    }
  }
  (void)madvise(both.address(), both.bytes(), MADV_DONTFORK);
  return both;
}

}  // namespace

Result<UniqueFd> MakeSharedFile(const char* name, size_t bytes) {
  UniqueFd file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) return FailErrno("Cannot make a memory file");
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    return FailErrno("Cannot make a memory file of " + std::to_string(bytes) + " bytes");
  }
  if (fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) return FailErrno("Cannot seal a memory file");
  return file;
}

Status CheckSharedFile(int fd, size_t bytes) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return Fail(Code::kProtocol, "its file is no memory file");
  if ((seals & F_SEAL_SHRINK) == 0) {
    return Fail(Code::kProtocol, "its memory file is not sealed against shrinking");
  }
  struct stat status;
  if (fstat(fd, &status) != 0) return FailErrno("its memory file has no size");
  if (static_cast<uint64_t>(status.st_size) < bytes) {
    return Fail(Code::kProtocol, "its memory file (" + std::to_string(status.st_size) +
                                     " bytes) is smaller than it says (" + std::to_string(bytes) +
                                     ")");
  }
  struct statfs system;
  if (fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC) {
    return Fail(Code::kProtocol, "its memory file is not of ordinary pages");
  }
  return {};
}

Mapping::Mapping(Mapping&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (address_ != nullptr) munmap(address_, bytes_);
}

Result<Mapping> MapShared(int fd, size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return FailErrno("Cannot map shared memory");
  return Mapping(static_cast<std::byte*>(memory), bytes);
}

size_t Segment::FileBytes(size_t ring_bytes, uint32_t slot_bytes) {
  return kHeadBytes + 2 * ring_bytes + size_t{kBulkSlots} * slot_bytes;
}

Result<std::unique_ptr<Segment>> Segment::Map(int fd, size_t ring_bytes, uint32_t slot_bytes) {
  std::unique_ptr<Segment> segment(new Segment);
  segment->ring_bytes_ = ring_bytes;
  segment->slot_bytes_ = slot_bytes;
  ASSIGN_OR_RETURN(segment->head_, MapAt(fd, 0, kHeadBytes));
  size_t offset = kHeadBytes;
  for (Mapping& ring : segment->rings_) {
    ASSIGN_OR_RETURN(ring, MapTwice(fd, offset, ring_bytes));
    offset += ring_bytes;
  }
  ASSIGN_OR_RETURN(segment->slots_, MapAt(fd, offset, size_t{kBulkSlots} * slot_bytes));
  return segment;
}

}  // namespace penstock::transport::shm
