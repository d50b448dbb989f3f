// Devices, contexts, protection domains and their asynchronous events.
#include "tests/transport/fake_verbs/host.h"

#include <arpa/inet.h>

#include "tests/transport/fake_verbs/state.h"

namespace penstock::transport::rdma::fake {

Host::Host(std::shared_ptr<State> state, const std::vector<DeviceSpec>& devices)
    : state_(std::move(state)), number_([this] {
        std::lock_guard lock(state_->mutex);
        state_->hosts.push_back(this);
        return state_->next_host++;
      }()) {
  std::lock_guard lock(state_->mutex);
  for (const DeviceSpec& spec : devices) {
    auto device = std::make_unique<FakeDevice>();
    device->host = this;
    device->device_name = spec.name;
    device->address_text = spec.address;
    device->most_reads = spec.most_reads;
    device->mtu = spec.mtu;
    device->node_type = IBV_NODE_CA;
    device->transport_type = IBV_TRANSPORT_IB;
    spec.name.copy(device->name, sizeof device->name - 1);
    auto* v4 = reinterpret_cast<sockaddr_in*>(&device->address);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&device->address);
    if (inet_pton(AF_INET, spec.address.c_str(), &v4->sin_addr) == 1) {
      v4->sin_family = AF_INET;
    } else if (inet_pton(AF_INET6, spec.address.c_str(), &v6->sin6_addr) == 1) {
      v6->sin6_family = AF_INET6;
    }
    devices_.push_back(std::move(device));
    OpenDevice(devices_.back().get());
  }
  calls_.clear();
}

Host::~Host() {
  std::lock_guard lock(state_->mutex);
  std::erase(state_->hosts, this);
  // Whatever was leaked must not be moved or answered any more.
  for (auto& [number, qp] : state_->qps) {
    if (qp->host == this) state_->RemoveQp(*qp);
  }
  const size_t queue_pairs =
      std::erase_if(state_->qps, [this](auto& entry) { return entry.second->host == this; });
  const size_t ids = std::erase_if(state_->ids, [this](auto& entry) {
    return entry.second->host == this && !entry.second->zombie;
  });
  if (queue_pairs + ids != 0) {
    state_->Violate("A process ends with live queue pairs (" + std::to_string(queue_pairs) +
                    ") and ids (" + std::to_string(ids) + ").");
  }
}

int Host::Enter(Call call, std::optional<ibv_wr_opcode> opcode) {
  calls_.push_back(call);
  int error = 0;
  for (CallFault& fault : faults_) {
    if (fault.opcode && fault.opcode != opcode) continue;
    if ((fault.any || fault.call == call) && fault.left > 0 && --fault.left == 0) {
      error = fault.error;
    }
  }
  return error;
}

ibv_device** Host::GetDeviceList(int* count) {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kGetDeviceList)) != 0) return nullptr;
  auto** list = new ibv_device*[devices_.size() + 1];
  int n = 0;
  for (auto& device : devices_) {
    if (!device->removed) list[n++] = device.get();
  }
  list[n] = nullptr;
  if (count != nullptr) *count = n;
  return list;
}

void Host::FreeDeviceList(ibv_device** list) {
  delete[] list;
}

const char* Host::GetDeviceName(ibv_device* device) {
  return device->name;
}

ibv_context* Host::OpenDevice(ibv_device* device) {
  std::unique_lock<std::mutex> lock;
  auto& fake = *static_cast<FakeDevice*>(device);
  if (!fake.contexts.empty()) {  // the first one is made by the constructor, which has the lock
    lock = std::unique_lock(state_->mutex);
    if ((errno = Enter(Call::kOpenDevice)) != 0) return nullptr;
    if (fake.removed) {
      errno = ENODEV;
      return nullptr;
    }
  }
  auto context = std::make_unique<FakeContext>();
  context->device = device;
  context->fake_device = &fake;
  context->async_fd = context->async.fd();
  context->cmd_fd = -1;
  context->num_comp_vectors = 1;
  fake.contexts.push_back(std::move(context));
  return fake.contexts.back().get();
}

int Host::CloseDevice(ibv_context* context) {
  std::lock_guard lock(state_->mutex);
  auto& fake = *static_cast<FakeContext*>(context);
  if (fake.fake_device->contexts.front().get() == context) {
    state_->Violate("A context of rdma_cm is closed by its user.");
    return EBUSY;
  }
  fake.fake_device->contexts.remove_if([&](auto& entry) { return entry.get() == context; });
  return 0;
}

int Host::QueryDevice(ibv_context* context, ibv_device_attr* attributes) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kQueryDevice)) return error;
  if (static_cast<FakeContext*>(context)->fake_device->removed) return EIO;
  *attributes = {};
  std::strcpy(attributes->fw_ver, "fake");
  attributes->max_mr_size = UINT64_MAX;
  attributes->page_size_cap = 4096;
  attributes->max_qp = 1024;
  attributes->max_qp_wr = 16384;
  attributes->max_sge = 16;
  attributes->max_cq = 1024;
  attributes->max_cqe = 65535;
  attributes->max_mr = 65535;
  attributes->max_pd = 1024;
  const FakeDevice& device = *static_cast<FakeContext*>(context)->fake_device;
  attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom =
      static_cast<int>(device.most_reads != 0 ? device.most_reads : state_->options.most_reads);
  attributes->phys_port_cnt = 1;
  return 0;
}

int Host::QueryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) {
  std::lock_guard lock(state_->mutex);
  if (const int error = Enter(Call::kQueryPort)) return error;
  const FakeDevice& device = *static_cast<FakeContext*>(context)->fake_device;
  if (device.removed) return EIO;
  if (port != 1) return EINVAL;
  *attributes = {};
  attributes->state = device.port_up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  attributes->max_mtu = attributes->active_mtu = IBV_MTU_4096;
  attributes->gid_tbl_len = 1;
  attributes->max_msg_sz = 1u << 30;
  attributes->active_width = 2;   // 4x
  attributes->active_speed = 64;  // HDR
  attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int Host::QueryGid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kQueryGid)) != 0) return -1;
  const FakeDevice& device = *static_cast<FakeContext*>(context)->fake_device;
  if (device.removed || port != 1 || index != 0) {
    errno = EINVAL;
    return -1;
  }
  *gid = {};
  if (device.address.ss_family == AF_INET) {  // ::ffff:a.b.c.d, as RoCE v2
    gid->raw[10] = gid->raw[11] = 0xff;
    std::memcpy(gid->raw + 12, &reinterpret_cast<const sockaddr_in&>(device.address).sin_addr, 4);
  } else {
    std::memcpy(gid->raw, &reinterpret_cast<const sockaddr_in6&>(device.address).sin6_addr, 16);
  }
  return 0;
}

ibv_pd* Host::AllocPd(ibv_context* context) {
  std::lock_guard lock(state_->mutex);
  if ((errno = Enter(Call::kAllocPd)) != 0) return nullptr;
  if (static_cast<FakeContext*>(context)->fake_device->removed) {
    errno = EIO;
    return nullptr;
  }
  auto* pd = new FakePd{};
  pd->context = context;
  pd->host = this;
  state_->pds.insert(pd);
  return pd;
}

int Host::DeallocPd(ibv_pd* pd) {
  std::lock_guard lock(state_->mutex);
  auto* fake = static_cast<FakePd*>(pd);
  if (fake->users != 0) {
    state_->Violate("A protection domain is freed while it has users (" +
                    std::to_string(fake->users) + ").");
    return EBUSY;
  }
  state_->pds.erase(fake);
  delete fake;
  return 0;
}

int Host::GetAsyncEvent(ibv_context* context, ibv_async_event* event) {
  auto& fake = *static_cast<FakeContext*>(context);
  for (;;) {
    {
      std::lock_guard lock(state_->mutex);
      if (!fake.async.empty()) {
        *event = fake.async.Pop();
        ++async_unacknowledged_;
        return 0;
      }
    }
    if (!AwaitReadable(context->async_fd)) return -1;
  }
}

void Host::AckAsyncEvent(ibv_async_event*) {
  std::lock_guard lock(state_->mutex);
  if (--async_unacknowledged_ < 0) state_->Violate("An asynchronous event is acknowledged twice.");
}

}  // namespace penstock::transport::rdma::fake
