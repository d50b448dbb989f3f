// Registrations, and every access to registered memory.
#include <sys/mman.h>

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

// Calls f(pointer, bytes) for each part of the list that [offset, offset + n) touches.
template <typename F>
void ForParts(const std::vector<ibv_sge>& sges, uint64_t offset, uint64_t n, F f) {
  for (const ibv_sge& sge : sges) {
    if (n == 0) return;
    if (offset >= sge.length) {
      offset -= sge.length;
      continue;
    }
    const uint64_t part = std::min<uint64_t>(n, sge.length - offset);
    f(reinterpret_cast<std::byte*>(sge.addr + offset), part);
    n -= part;
    offset = 0;
  }
}

}  // namespace

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
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = address;
  mr->length = bytes;
  mr->access = access;
  // Two different keys, so that taking the one for the other shows.
  for (uint32_t* key : {&mr->lkey, &mr->rkey}) {
    do {
      *key = static_cast<uint32_t>(state_->random());
    } while (*key == 0 || state_->mrs.count(*key) != 0);
    state_->mrs[*key] = mr;
  }
  ++mr->fake_pd()->users;
  return mr;
}

ibv_mr* Host::RegDmabufMr(ibv_pd*, uint64_t, size_t, uint64_t, int, int) {
  errno = EOPNOTSUPP;  // as soft-RoCE
  return nullptr;
}

int Host::DeregMr(ibv_mr* mr) {
  std::lock_guard lock(state_->mutex);
  auto* fake = static_cast<FakeMr*>(mr);
  state_->Invalidate(*fake);
  state_->mrs.erase(fake->lkey);
  state_->mrs.erase(fake->rkey);
  --fake->fake_pd()->users;
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

void State::Gather(const std::vector<ibv_sge>& sges, uint64_t offset, std::byte* to, uint64_t n) {
  ForParts(sges, offset, n, [&](std::byte* at, uint64_t part) {
    std::memcpy(to, at, part);
    to += part;
  });
}

void State::Scatter(const std::vector<ibv_sge>& sges, uint64_t offset, const std::byte* from,
                    uint64_t n) {
  ForParts(sges, offset, n, [&](std::byte* at, uint64_t part) {
    std::memcpy(at, from, part);
    from += part;
  });
}

uint64_t State::Digest(const std::vector<ibv_sge>& sges) {
  uint64_t digest = 0x9e3779b97f4a7c15;
  ForParts(sges, 0, UINT64_MAX, [&](std::byte* at, uint64_t part) {
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
