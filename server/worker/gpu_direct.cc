#include "server/worker/gpu_direct.h"

#include <optional>

#include "common/log.h"
#include "server/worker/device_memory.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// Each holds a descriptor, of which a worker may have 4,096.
constexpr size_t kMostMemories = 2048;

std::string Text(CUdevice device) {
  return "Device " + std::to_string(device);
}

}  // namespace

GpuDirect::GpuDirect(Worker& worker) : worker_(worker) {
  if (worker.options().gpu_direct == GpuDirectMode::kOff) return;
  if (!worker.connection().caps().device_memory) return;
  registrar_ = std::make_unique<Executor>([&worker] { worker.connection().Interrupt(); });
}

GpuDirect::~GpuDirect() = default;

Status GpuDirect::CheckDemand() {
  if (worker_.options().gpu_direct != GpuDirectMode::kOn) return {};
  if (registrar_ == nullptr) {
    return Fail(Code::kUnsupported, std::string("GPUDirect is demanded, and the session goes over "
                                                "a transport (") +
                                        worker_.connection().caps().name + ") without it.");
  }
  for (uint32_t i = 0; i < worker_.options().device_count; ++i) {
    const auto ordinal = static_cast<CUdevice>(i);
    if (Status probed = Probe(ordinal, &devices_[ordinal]); !probed) {
      return Fail(Code::kUnsupported, "GPUDirect is demanded. " + probed.error().message);
    }
  }
  return {};
}

// Other devices of the session may read this one's memory.
CUflushGPUDirectRDMAWritesScope GpuDirect::scope() const {
  return worker_.options().device_count > 1 ? CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
                                            : CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
}

Status GpuDirect::Probe(CUdevice ordinal, Device* device) {
  const Driver& driver = worker_.driver();
  const auto ask = [&](CUdevice_attribute attribute) {
    int value = 0;
    return driver.cuDeviceGetAttribute(&value, attribute, ordinal) == CUDA_SUCCESS ? value : 0;
  };
  if (ask(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) == 0 ||
      ask(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 0) {
    return Fail(Code::kUnsupported, Text(ordinal) + " or its driver cannot export memory to NICs.");
  }
  device->flushes = ask(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) < scope();
  if (device->flushes && (ask(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) &
                          CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST) == 0) {
    return Fail(Code::kUnsupported,
                Text(ordinal) + " neither orders what NICs write nor lets the host flush it.");
  }
  return {};
}

GpuDirect::Device& GpuDirect::DeviceOf(CUdevice ordinal) {
  Device& device = devices_[ordinal];
  if (device.state != Device::State::kUnknown) return device;
  if (Status probed = Probe(ordinal, &device); !probed) Demote(ordinal, probed.error());
  return device;
}

std::shared_ptr<DirectMemory> GpuDirect::Find(const std::shared_ptr<ContextState>& context,
                                              uint64_t address, uint64_t bytes) {
  if (registrar_ == nullptr || bytes < kLeastDirectBytes) return nullptr;
  const Allocation* allocation = worker_.allocations().Find(address, bytes);
  if (allocation == nullptr || allocation->kind != AllocationKind::kLinear ||
      allocation->context != context->handle) {
    return nullptr;
  }
  if (const auto found = memories_.find(allocation->begin); found != memories_.end()) {
    return found->second->state == DirectMemory::State::kStaged ? nullptr : found->second;
  }
  if (memories_.size() >= kMostMemories) return nullptr;
  Device& device = DeviceOf(context->device);
  if (device.state == Device::State::kStaged) return nullptr;
  auto memory = std::make_shared<DirectMemory>();
  memory->begin = allocation->begin;
  memory->bytes = allocation->end - allocation->begin;
  memory->context = context;
  memories_[memory->begin] = memory;
  if (device.state == Device::State::kUnknown) StartTest(context, device);
  StartRegistration(memory, device);
  return memory;
}

void GpuDirect::RunTest(const ContextState& context, bool flushes, TestResult* result) const {
  const Driver& driver = worker_.driver();
  CUdeviceptr scratch = 0;
  if (driver.cuCtxSetCurrent(context.context) != CUDA_SUCCESS) return;
  if (driver.cuMemAlloc_v2(&scratch, kScratchBytes) == CUDA_SUCCESS) {
    const auto flush = flushes ? std::optional(scope()) : std::nullopt;
    const Status tested = TestDevice(driver, worker_.connection(), scratch, flush);
    const CUresult health = driver.cuStreamQuery(CU_STREAM_LEGACY);
    if (tested) {
      result->verdict = Verdict::kPassed;
    } else if (health == CUDA_SUCCESS || health == CUDA_ERROR_NOT_READY) {
      result->verdict = Verdict::kFailed;
      result->reason = tested.error();
    }
  }
  driver.cuCtxSetCurrent(nullptr);
}

void GpuDirect::StartTest(const std::shared_ptr<ContextState>& context, Device& device) {
  device.state = Device::State::kTesting;
  device.test = std::make_shared<TestResult>();
  device.tested_in = context;
  registrar_->Run(
      [this, context, flushes = device.flushes, result = device.test] {
        RunTest(*context, flushes, result.get());
      },
      [this, ordinal = context->device, result = device.test] {
        Device& tested = devices_[ordinal];
        tested.test.reset();
        tested.tested_in.reset();
        if (result->verdict == Verdict::kFailed) return Demote(ordinal, result->reason);
        if (tested.state != Device::State::kTesting) return;
        if (result->verdict == Verdict::kLater) {
          tested.state = Device::State::kUnknown;
          return;
        }
        tested.state = Device::State::kUsed;
        LOG_INFO(
            "gpudirect",
            "%s exchanges bulk data with the NICs directly (GPUDirect); what they write is %s.",
            Text(ordinal).c_str(), tested.flushes ? "flushed" : "ordered by the device");
      });
}

// The jobs run in order, so a test that was started before has ended.
void GpuDirect::StartRegistration(const std::shared_ptr<DirectMemory>& memory, Device& device) {
  auto registered = std::make_shared<Status>();
  registrar_->Run(
      [this, memory, registered, test = device.test] {
        if (test != nullptr && test->verdict != Verdict::kPassed) return;
        const Driver& driver = worker_.driver();
        driver.cuCtxSetCurrent(memory->context->context);
        auto region =
            RegisterAllocation(driver, worker_.connection(), memory->begin, memory->bytes);
        driver.cuCtxSetCurrent(nullptr);
        if (region) {
          memory->region = std::move(*region);
        } else {
          *registered = tl::unexpected<Error>(std::move(region).error());
        }
      },
      [this, memory, registered] { OnRegistered(memory, *registered); });
}

void GpuDirect::OnRegistered(const std::shared_ptr<DirectMemory>& memory,
                             const Status& registered) {
  const CUdevice ordinal = memory->context->device;
  Device& device = devices_[ordinal];
  const bool used = device.state == Device::State::kUsed;
  memory->state = used && registered ? DirectMemory::State::kReady : DirectMemory::State::kStaged;
  if (!used || registered) return;
  // Locked memory or the window onto the device (BAR1) may be used up; smaller allocations may do.
  if (registered.error().code == Code::kInvalidArgument || device.failure_told) {
    LOG_DEBUG("gpudirect", "An allocation (%lu bytes) goes through host memory: %s", memory->bytes,
              registered.error().message.c_str());
    return;
  }
  device.failure_told = true;
  LOG_WARNING("gpudirect",
              "An allocation (%lu bytes) on device %d cannot be registered, so its bulk data goes "
              "through host memory, as that of others may: %s",
              memory->bytes, ordinal, registered.error().message.c_str());
}

bool GpuDirect::Flush(const ContextState& context) {
  if (!devices_[context.device].flushes) return true;
  const Driver& driver = worker_.driver();
  const CUresult result = driver.cuFlushGPUDirectRDMAWrites(
      CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, scope());
  if (result == CUDA_SUCCESS) return true;
  Demote(context.device, {Code::kSystem, std::string("cuFlushGPUDirectRDMAWrites fails with ") +
                                             ErrorName(driver, result) + "."});
  return false;
}

void GpuDirect::Demote(CUdevice ordinal, const Error& reason) {
  Device& device = devices_[ordinal];
  if (device.state == Device::State::kStaged) return;
  device.state = Device::State::kStaged;
  for (const auto& [begin, memory] : memories_) {
    if (memory->context->device == ordinal) memory->state = DirectMemory::State::kStaged;
  }
  if (worker_.options().gpu_direct == GpuDirectMode::kOn) {
    return worker_.End("GPUDirect is demanded and does not work on device " +
                           std::to_string(ordinal) + ". " + reason.message,
                       false);
  }
  // What was never there is not missed.
  PENSTOCK_LOG_AT(reason.code == Code::kUnsupported ? LogLevel::kInfo : LogLevel::kWarning,
                  "gpudirect",
                  "%s does without GPUDirect, and bulk data goes through host memory: %s",
                  Text(ordinal).c_str(), reason.message.c_str());
}

std::shared_ptr<DirectMemory> GpuDirect::Forget(uint64_t begin) {
  const auto found = memories_.find(begin);
  if (found == memories_.end()) return nullptr;
  auto memory = std::move(found->second);
  memories_.erase(found);
  return memory;
}

void GpuDirect::DropContext(const std::shared_ptr<ContextState>& context) {
  auto job = std::make_shared<ReapJob>();
  job->context = context;
  job->what = "End of registrations";
  job->free = [](const Driver&) { return CUDA_SUCCESS; };
  for (auto next = memories_.begin(); next != memories_.end();) {
    if (next->second->context == context) {
      job->holds.push_back(std::move(next->second));
      next = memories_.erase(next);
    } else {
      ++next;
    }
  }
  for (const auto& [ordinal, device] : devices_) {
    if (device.tested_in == context) job->holds.push_back(device.test);
  }
  if (!job->holds.empty()) worker_.reaper().Submit(std::move(job));
}

}  // namespace penstock::server
