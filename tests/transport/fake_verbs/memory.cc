// Registrations, and every access to registered memory.
#include <sys/mman.h>
#include <sys/stat.h>
#include <cstddef>

#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

namespace {

bool IsMapped(void* address, size_t bytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(address) & ~uintptr_t{4095};
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
  if (end < start || bytes > (size_t{1} << 46)) return false;
  std::vector<unsigned char> resident(4096);
  for (uintptr_t at = start; at < end; at += resident.size() * 4096) {
    const size_t n = std::min<size_t>(end - at, resident.size() * 4096);
    if (mincore(reinterpret_cast<void*>(at), n, resident.data()) != 0) return false;
  }
  return true;
}

// Calls f(entry, offset in it, bytes) for each part of the list that [offset, offset + n) touches.
template <typename F>
void ForParts(const std::vector<ibv_sge>& sges, uint64_t offset, uint64_t n, F f) {
  for (const ibv_sge& sge : sges) {
    if (n == 0) return;
    if (offset >= sge.length) {
      offset -= sge.length;
      continue;
    }
    const uint64_t part = std::min<uint64_t>(n, sge.length - offset);
    f(sge, offset, part);
    n -= part;
    offset = 0;
  }
}

// A device whose accesses to device memory go wrong.
void TurnBit(std::byte* piece) {
  piece[0] ^= std::byte{0x10};
}

std::byte* Memory(const ibv_sge& sge, uint64_t offset) {
  return reinterpret_cast<std::byte*>(sge.addr + offset);
}

}  // namespace

void State::Enter(FakeMr& mr, ibv_pd& pd) {
  mr.context = pd.context;
  mr.pd = &pd;
  // Two different keys, so that taking the one for the other shows.
  for (uint32_t* key : {&mr.lkey, &mr.rkey}) {
    do {
      *key = static_cast<uint32_t>(random());
    } while (*key == 0 || mrs.count(*key) != 0);
    mrs[*key] = &mr;
  }
  ++mr.fake_pd()->users;
}

ibv_mr* Host::RegMr(ibv_pd* pd, void* address, size_t bytes, int access) {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kRegMr)) != 0) return nullptr;
  const int remote_writes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if (bytes == 0 || ((access & remote_writes) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0)) {
    errno = EINVAL;
    return nullptr;
  }
  if (!IsMapped(address, bytes)) {
    errno = EFAULT;
    return nullptr;
  }
  if (static_cast<FakeContext*>(pd->context)->fake_device->removed) {
    errno = EIO;
    return nullptr;
  }
  auto* mr = new FakeMr{};
  mr->host = this;
  mr->addr = address;
  mr->length = bytes;
  mr->access = access;
  state_->Enter(*mr, *pd);
  return mr;
}

// The file stays mapped as long as the registration lives, whatever becomes of the descriptor and
// of other mappings, as a dma-buf keeps its memory.
ibv_mr* Host::RegDmabufMr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd,
                          int access) {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kRegDmabufMr)) != 0) return nullptr;
  if (state_->options.device_memory == DeviceMemory::kNone) {
    errno = EOPNOTSUPP;  // as soft-RoCE
    return nullptr;
  }
  struct stat file = {};
  if (fstat(fd, &file) != 0) return nullptr;
  const auto size = static_cast<uint64_t>(file.st_size);
  if (bytes == 0 || offset > size || bytes > size - offset || offset % 4096 != iova % 4096) {
    errno = EINVAL;
    return nullptr;
  }
  void* mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* mr = new FakeMr{};
  mr->host = this;
  mr->addr = reinterpret_cast<void*>(iova);
  mr->length = bytes;
  mr->access = access;
  mr->mapping = static_cast<std::byte*>(mapping);
  mr->mapping_bytes = size;
  mr->mapping_offset = offset;
  state_->Enter(*mr, *pd);
  return mr;
}

int Host::DeregMr(ibv_mr* mr) {
  std::lock_guard lock(state_->mutex);
  auto* fake = static_cast<FakeMr*>(mr);
  state_->Invalidate(*fake);
  state_->mrs.erase(fake->lkey);
  state_->mrs.erase(fake->rkey);
  --fake->fake_pd()->users;
  if (fake->mapping != nullptr) {
    fake->Flush();
    munmap(fake->mapping, fake->mapping_bytes);
  }
  delete fake;
  return 0;
}

FakeMr* State::FindMr(uint32_t key, const ibv_pd* pd) const {
  const auto found = mrs.find(key);
  return found != mrs.end() && found->second->pd == pd ? found->second : nullptr;
}

bool State::LocalAccess(const std::vector<ibv_sge>& sges, const ibv_pd* pd, bool write) const {
  for (const ibv_sge& sge : sges) {
    if (sge.length == 0) continue;
    const FakeMr* mr = FindMr(sge.lkey, pd);
    if (mr == nullptr || mr->lkey != sge.lkey || !mr->Covers(sge.addr, sge.length)) return false;
    if (write && (mr->access & IBV_ACCESS_LOCAL_WRITE) == 0) return false;
    if (mr->mapping != nullptr && options.device_memory == DeviceMemory::kFaults) return false;
  }
  return true;
}

bool State::RemoteAccess(const FakeQp& qp, uint64_t at, uint64_t bytes, uint32_t rkey,
                         int access) const {
  if (bytes == 0) return true;
  const FakeMr* mr = FindMr(rkey, qp.pd);
  return mr != nullptr && mr->rkey == rkey && (mr->access & access) == access &&
         mr->Covers(at, bytes);
}

uint64_t State::Total(const std::vector<ibv_sge>& sges) {
  uint64_t total = 0;
  for (const ibv_sge& sge : sges) total += sge.length;
  return total;
}

FakeMr* State::DeviceMr(const ibv_sge& sge) const {
  const auto found = mrs.find(sge.lkey);
  return found != mrs.end() && found->second->mapping != nullptr ? found->second : nullptr;
}

bool State::UsesDevice(const std::vector<ibv_sge>& sges) const {
  return std::any_of(sges.begin(), sges.end(),
                     [&](const ibv_sge& sge) { return DeviceMr(sge) != nullptr; });
}

void State::GatherInline(const std::vector<ibv_sge>& sges, std::byte* to, uint64_t n) {
  ForParts(sges, 0, n, [&](const ibv_sge& sge, uint64_t at, uint64_t part) {
    std::memcpy(to, Memory(sge, at), part);
    to += part;
  });
}

void State::Gather(const std::vector<ibv_sge>& sges, uint64_t offset, std::byte* to, uint64_t n) {
  ForParts(sges, offset, n, [&](const ibv_sge& sge, uint64_t at, uint64_t part) {
    if (FakeMr* device = DeviceMr(sge)) {
      device->Flush();
      std::memcpy(to, device->Place(sge.addr + at), part);
      if (options.device_memory == DeviceMemory::kWrongReads) TurnBit(to);
      device_read += part;
    } else {
      std::memcpy(to, Memory(sge, at), part);
    }
    to += part;
  });
}

void State::Scatter(const std::vector<ibv_sge>& sges, uint64_t offset, const std::byte* from,
                    uint64_t n) {
  ForParts(sges, offset, n, [&](const ibv_sge& sge, uint64_t at, uint64_t part) {
    if (FakeMr* device = DeviceMr(sge)) {
      std::byte* place = device->Place(sge.addr + at);
      device->late.push_back({static_cast<uint64_t>(place - device->mapping), {from, from + part}});
      if (options.device_memory == DeviceMemory::kWrongWrites) {
        TurnBit(device->late.back().bytes.data());
      }
      if (options.device_memory != DeviceMemory::kLate) device->Flush();
      device_written += part;
    } else {
      std::memcpy(Memory(sge, at), from, part);
    }
    from += part;
  });
}

uint64_t State::Digest(const std::vector<ibv_sge>& sges) const {
  uint64_t digest = 0x9e3779b97f4a7c15;
  ForParts(sges, 0, UINT64_MAX, [&](const ibv_sge& sge, uint64_t offset, uint64_t part) {
    FakeMr* device = DeviceMr(sge);
    std::byte* at = device != nullptr ? device->Place(sge.addr + offset) : Memory(sge, offset);
    for (uint64_t word; part >= sizeof word; at += sizeof word, part -= sizeof word) {
      std::memcpy(&word, at, sizeof word);
      digest = (digest ^ word) * 0xff51afd7ed558ccd;
      digest ^= digest >> 32;
    }
    for (; part > 0; ++at, --part) {
      digest = (digest ^ static_cast<uint64_t>(*at)) * 0xff51afd7ed558ccd;
    }
  });
  return digest;
}

// What has been acknowledged to its sender is in place before the registration ends; what has not
// is refused. Afterwards nobody touches the memory.
void State::Invalidate(FakeMr& mr) {
  auto uses_locally = [&](const std::vector<ibv_sge>& sges) {
    return std::any_of(sges.begin(), sges.end(),
                       [&](const ibv_sge& sge) { return sge.length && sge.lkey == mr.lkey; });
  };
  for (auto& [number, qp] : qps) {
    if (qp->state == IBV_QPS_ERR) continue;
    for (auto* requests : {&qp->queue, &qp->flight}) {
      for (const SendRequest& request : *requests) {
        if (!request.is_inline() && uses_locally(request.sges)) {
          Violate("Memory is deregistered while a posted request uses it.");
        }
      }
    }
    for (const ReceiveRequest& receive : qp->receives) {
      if (uses_locally(receive.sges)) {
        Violate("Memory is deregistered while a posted receive uses it.");
        break;
      }
    }
    for (Inbound& inbound : qp->inbound) {
      if (!inbound.write || inbound.pieces.empty() || inbound.targets[0].lkey != mr.rkey) continue;
      SendRequest* request = FindFlight(*qp, inbound.request);
      if (request == nullptr || request->acknowledged) {
        PlaceAll(*qp, inbound);
      } else {
        inbound.pieces.clear();
        request->status = IBV_WC_REM_ACCESS_ERR;
        FakeQp* sender = FindQp(qp->peer);
        if (sender != nullptr) {
          sender->refused = true;
          Wake(*sender);
        }
      }
    }
    Wake(*qp);
  }
}

}  // namespace penstock::transport::rdma::fake
