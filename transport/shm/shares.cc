#include "transport/shm/shares.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstring>

namespace penstock::transport::shm {

namespace {

constexpr int64_t kShareMs = 2'000;  // for the server to take a message

}  // namespace

// Its memory goes with it, here at once and at the server when it hears of it.
class SharedRegion : public MemoryRegion {
 public:
  SharedRegion(std::shared_ptr<ShareMaker> maker, Mapping memory, uint32_t id, uint64_t secret)
      : maker_(std::move(maker)), memory_(std::move(memory)), id_(id) {
    const KeyBlob blob = {kShareKeyKind, id, 0, 0, secret};
    key_.bytes = sizeof blob;
    std::memcpy(key_.blob.data(), &blob, sizeof blob);
  }
  ~SharedRegion() override { maker_->Drop(id_, memory_.bytes()); }
  std::byte* address() const override { return memory_.address(); }
  size_t size() const override { return memory_.bytes(); }
  const MemoryKey& key() const override { return key_; }

 private:
  const std::shared_ptr<ShareMaker> maker_;
  const Mapping memory_;
  const uint32_t id_;
  MemoryKey key_;
};

Result<std::unique_ptr<MemoryRegion>> ShareMaker::Make(size_t bytes, Access access) {
  if (bytes == 0 || bytes > kMostShareBytes) {
    return Fail(Code::kInvalidArgument,
                "Memory to share (" + std::to_string(bytes) + " bytes) has an impossible size.");
  }
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  LinkMessage message;
  message.kind = LinkKind::kShare;
  message.bytes = bytes;
  message.access = static_cast<uint32_t>(access);
  if (getrandom(&message.secret, sizeof message.secret, 0) != sizeof message.secret) {
    return FailErrno("Cannot draw a random key");
  }
  ASSIGN_OR_RETURN(const UniqueFd file, MakeSharedFile("penstock-pinned", bytes));
  ASSIGN_OR_RETURN(Mapping memory, MapShared(file.get(), bytes));
  std::lock_guard lock(mutex_);  // ids go out in order
  SendDropped();
  if (count_ >= kMostShares || bytes > kMostShareBytes - bytes_ || next_id_ == UINT32_MAX) {
    return Fail(Code::kResourceExhausted, "No more memory can be shared with the server.");
  }
  if (link_->closed()) return Fail(Code::kUnavailable, "The connection is closed.");
  message.id = next_id_;
  RETURN_IF_ERROR(link_->Send(message, file.get(), Deadline::After(kShareMs)));
  ++next_id_;
  ++count_;
  bytes_ += bytes;
  return std::make_unique<SharedRegion>(shared_from_this(), std::move(memory),
                                        static_cast<uint32_t>(message.id), message.secret);
}

void ShareMaker::Drop(uint32_t id, size_t bytes) {
  std::lock_guard lock(mutex_);
  dropped_.emplace_back(id, bytes);
  SendDropped();
}

// Freeing memory does not wait for a server that is busy. What it has not been told of still counts
// against the limits, as it does there.
void ShareMaker::SendDropped() {
  while (!dropped_.empty() && !link_->closed()) {
    const auto [id, bytes] = dropped_.back();
    LinkMessage message;
    message.kind = LinkKind::kUnshare;
    message.id = id;
    if (!link_->Send(message, -1, Deadline::After(0))) return;
    --count_;
    bytes_ -= bytes;
    dropped_.pop_back();
  }
}

Status ShareTable::Add(const LinkMessage& message, const UniqueFd& file) {
  const auto bad = [&](const std::string& what) {
    return Fail(Code::kProtocol, "The peer shares memory wrongly: " + what + ".");
  };
  if (!file.valid()) return bad("the message has no memory file");
  std::lock_guard lock(mutex_);
  if (message.id <= newest_ || message.id > UINT32_MAX) {
    return bad("id (" + std::to_string(message.id) + ") is not above the last one");
  }
  if (message.bytes == 0 || message.bytes > kMostShareBytes - bytes_ ||
      shares_.size() >= kMostShares) {
    return bad("another " + std::to_string(message.bytes) +
               " bytes exceed what a session may have");
  }
  if (message.access == 0 || message.access > static_cast<uint32_t>(Access::kPeerReadsAndWrites)) {
    return bad("access (" + std::to_string(message.access) + ") is not known");
  }
  if (auto sound = CheckSharedFile(file.get(), message.bytes); !sound) {
    return bad(sound.error().message);
  }
  ASSIGN_OR_RETURN(Mapping memory, MapShared(file.get(), message.bytes));
  newest_ = message.id;
  bytes_ += message.bytes;
  shares_[message.id] = {std::make_shared<Mapping>(std::move(memory)), message.secret,
                         message.access};
  return {};
}

Status ShareTable::Remove(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto found = shares_.find(id);
  if (found == shares_.end()) {
    return Fail(Code::kProtocol,
                "The peer takes back memory that it never shared (" + std::to_string(id) + ").");
  }
  bytes_ -= found->second.memory->bytes();
  shares_.erase(found);
  return {};
}

std::shared_ptr<Mapping> ShareTable::Find(const KeyBlob& key, uint64_t offset, uint64_t bytes,
                                          Access wanted, bool* known) const {
  std::lock_guard lock(mutex_);
  const auto found = shares_.find(key.slot);
  *known = found != shares_.end();
  if (!*known) return nullptr;
  const Share& share = found->second;
  const size_t size = share.memory->bytes();
  if (share.secret != key.secret || key.generation != 0 || key.reserved != 0 ||
      (share.access & static_cast<uint32_t>(wanted)) == 0 || offset > size ||
      bytes > size - offset) {
    return nullptr;
  }
  return share.memory;
}

void ShareTable::Clear() {
  std::lock_guard lock(mutex_);
  shares_.clear();
  bytes_ = 0;
}

}  // namespace penstock::transport::shm
