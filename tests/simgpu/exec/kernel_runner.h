// What a test needs to run PTX without a driver: device memory that is checked, buffers, and a
// launch in one call.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "simgpu/exec/executor.h"
#include "simgpu/exec/heap.h"

namespace simgpu::test {

// Ranges stand apart, so that any access outside one is found.
class TestMemory : public MemoryMap {
 public:
  ~TestMemory() override {
    heap_.Release(*this);
    for (auto& [begin, block] : blocks_) munmap(block.mapping, block.mapped);
  }
  uint64_t Allocate(uint64_t bytes, bool read_only = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    constexpr uint64_t kGap = 64 * 1024;
    Block block;
    block.mapped = ((bytes + 4095) & ~uint64_t{4095}) + 2 * kGap;
    block.mapping = mmap(nullptr, block.mapped, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block.mapping == MAP_FAILED) return 0;
    uint64_t begin = reinterpret_cast<uint64_t>(block.mapping) + kGap;
    block.range = {begin, begin + bytes, read_only};
    blocks_[begin] = block;
    ++generation_;
    return begin;
  }
  void Free(uint64_t address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto at = blocks_.find(address);
    if (at == blocks_.end()) return;
    munmap(at->second.mapping, at->second.mapped);
    blocks_.erase(at);
    ++generation_;
  }
  size_t count() const { return blocks_.size(); }

  bool Find(uint64_t address, Range* range) const override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto at = blocks_.upper_bound(address);
    if (at == blocks_.begin()) return false;
    --at;
    if (address >= at->second.range.end) return false;
    *range = at->second.range;
    return true;
  }
  uint64_t generation() const override { return generation_.load(); }
  uint64_t AllocateVariable(uint64_t bytes, uint64_t, bool read_only) override {
    return Allocate(bytes, read_only);
  }
  void FreeVariable(uint64_t address) override { Free(address); }
  DeviceHeap* heap() override { return &heap_; }

 private:
  struct Block {
    void* mapping = nullptr;
    uint64_t mapped = 0;
    Range range;
  };
  mutable std::mutex mutex_;
  std::map<uint64_t, Block> blocks_;
  std::atomic<uint64_t> generation_{1};
  DeviceHeap heap_;
};

// An array in device memory. Device addresses are host addresses, so it is read and written here.
template <typename T>
class Buffer {
 public:
  Buffer(TestMemory& memory, size_t count) : memory_(memory), count_(count) {
    address_ = memory.Allocate(count * sizeof(T));
  }
  Buffer(TestMemory& memory, const std::vector<T>& values) : Buffer(memory, values.size()) {
    memcpy(data(), values.data(), values.size() * sizeof(T));
  }
  ~Buffer() { memory_.Free(address_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() { return reinterpret_cast<T*>(address_); }
  T& operator[](size_t k) { return data()[k]; }
  size_t size() const { return count_; }
  uint64_t address() const { return address_; }

 private:
  TestMemory& memory_;
  size_t count_;
  uint64_t address_;
};

// Packs kernel arguments with natural alignment.
class Arguments {
 public:
  template <typename... T>
  explicit Arguments(const T&... values) {
    (Add(values), ...);
  }
  template <typename T>
  void Add(const T& value) {
    bytes_.resize((bytes_.size() + alignof(T) - 1) & ~(alignof(T) - 1));
    size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  template <typename T>
  void Add(const Buffer<T>& buffer) {
    Add(buffer.address());
  }
  std::vector<std::byte> bytes_;
};

struct Shape {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {32, 1, 1};
  uint32_t shared = 0;
  bool cooperative = false;
  const std::atomic<bool>* stop = nullptr;
};
inline Shape Blocks(uint32_t grid, uint32_t block, uint32_t shared = 0) {
  Shape shape;
  shape.grid[0] = grid;
  shape.block[0] = block;
  shape.shared = shared;
  return shape;
}

struct Module {
  explicit Module(std::string_view ptx) { program = Program::Load(ptx, memory, &error); }
  LaunchResult Run(std::string_view name, const Shape& shape, const Arguments& arguments) {
    Kernel* kernel = program ? program->FindKernel(name) : nullptr;
    if (!kernel) {
      // The name of a C++ kernel is mangled; a part of it is enough.
      for (size_t k = 0; program && k < program->kernels().size() && !kernel; ++k)
        if (program->kernels()[k]->info().name.find(name) != std::string::npos)
          kernel = program->kernels()[k];
    }
    if (!kernel) return {Fault::kTrap, "There is no kernel (" + std::string(name) + ")."};
    LaunchRequest request;
    std::copy(shape.grid, shape.grid + 3, request.grid);
    std::copy(shape.block, shape.block + 3, request.block);
    request.dynamic_shared_bytes = shape.shared;
    request.cooperative = shape.cooperative;
    request.stop = shape.stop;
    std::vector<std::byte> bytes = arguments.bytes_;
    bytes.resize(std::max<size_t>(bytes.size(), kernel->info().parameter_bytes));
    request.parameters = bytes.data();
    request.print = [](void* user, std::string_view text) {
      static_cast<Module*>(user)->printed.append(text);
    };
    request.print_error = [](void* user, std::string_view text) {
      static_cast<Module*>(user)->printed_error.append(text);
    };
    request.print_user = this;
    return kernel->Launch(request);
  }

  TestMemory memory;
  LoadError error{};
  std::unique_ptr<Program> program;
  std::string printed, printed_error;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace simgpu::test
