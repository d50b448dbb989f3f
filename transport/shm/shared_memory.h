// Memory files that two processes map, and the mappings.
//
// A file from a peer is only mapped when it is sealed against shrinking (else the peer could cut it
// and turn our next access into a SIGBUS), is as large as the peer says, and is ordinary memory: a
// file of huge pages can lack a page when it is touched, which is a SIGBUS as well.
#pragma once

#include <cstddef>
#include <memory>

#include "common/result.h"
#include "common/unique_fd.h"
#include "transport/shm/layout.h"

namespace penstock::transport::shm {

// Zeroes, sealed: neither its size nor its seals can change.
Result<UniqueFd> MakeSharedFile(const char* name, size_t bytes);
// An error's message names what is wrong with the peer's file.
Status CheckSharedFile(int fd, size_t bytes);

class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* address, size_t bytes) : address_(address), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* address_ = nullptr;
  size_t bytes_ = 0;
};

Result<Mapping> MapShared(int fd, size_t bytes);

// The mapped memory of one connection, see layout.h. The sizes are checked by whoever makes one.
class Segment {
 public:
  static size_t FileBytes(size_t ring_bytes, uint32_t slot_bytes);
  static Result<std::unique_ptr<Segment>> Map(int fd, size_t ring_bytes, uint32_t slot_bytes);

  Words& words() const { return *reinterpret_cast<Words*>(head_.address()); }
  BulkDescriptor& descriptor(uint32_t slot) const {
    return reinterpret_cast<BulkDescriptor*>(head_.address() + kPageBytes)[slot];
  }
  std::byte* ring(End to) const { return rings_[to].address(); }
  size_t ring_bytes() const { return ring_bytes_; }
  std::byte* slot(uint32_t index) const { return slots_.address() + size_t{index} * slot_bytes_; }
  uint32_t slot_bytes() const { return slot_bytes_; }

 private:
  Segment() = default;
  size_t ring_bytes_ = 0;
  uint32_t slot_bytes_ = 0;
  Mapping head_, rings_[2], slots_;
};

}  // namespace penstock::transport::shm
