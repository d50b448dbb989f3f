// Memory that the client has made for copies and the server has mapped.
//
// The client makes a sealed memory file, sends it over the link and gives out a key with the id
// under which it did; a frame with that key comes later than the message, so a server that does not
// know an id looks at the link once more before it refuses. An id is never used again.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/region_table.h"
#include "transport/shm/link.h"
#include "transport/shm/shared_memory.h"
#include "transport/transport.h"

namespace penstock::transport::shm {

constexpr uint32_t kShareKeyKind = 0x32534d50;  // "PMS2"; the slot is the id

// The client's half. Its regions may outlive the connection.
class ShareMaker : public std::enable_shared_from_this<ShareMaker> {
 public:
  explicit ShareMaker(std::shared_ptr<Link> link) : link_(std::move(link)) {}
  // kResourceExhausted: the limits are reached.
  Result<std::unique_ptr<MemoryRegion>> Make(size_t bytes, Access access);

 private:
  friend class SharedRegion;
  void Drop(uint32_t id, size_t bytes);
  void SendDropped();  // with the mutex
  const std::shared_ptr<Link> link_;
  std::mutex mutex_;
  uint32_t next_id_ = 1;  // under mutex_
  size_t count_ = 0;      // under mutex_
  uint64_t bytes_ = 0;    // under mutex_
  // Gone here, and the server does not know yet: its socket was full. They go with the next
  // message.
  std::vector<std::pair<uint32_t, size_t>> dropped_;  // under mutex_
};

// The server's half.
class ShareTable {
 public:
  // An error tells what no honest client does.
  Status Add(const LinkMessage& message, const UniqueFd& file);
  Status Remove(uint64_t id);
  // Null for an unknown id.
  std::shared_ptr<Mapping> Find(const KeyBlob& key, uint64_t offset, uint64_t bytes, Access wanted,
                                bool* known) const;
  void Clear();

 private:
  struct Share {
    std::shared_ptr<Mapping> memory;
    uint64_t secret;
    uint32_t access;
  };
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Share> shares_;  // under mutex_
  uint64_t bytes_ = 0;                          // under mutex_
  uint64_t newest_ = 0;                         // under mutex_
};

}  // namespace penstock::transport::shm
