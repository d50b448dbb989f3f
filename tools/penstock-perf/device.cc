#include "tools/penstock-perf/device.h"

#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#include <functional>
#include <random>

#include "common/clock.h"

namespace penstock::perf {
namespace {

constexpr char kPtx[] =
    ".version 7.0\n.target sm_75\n.address_size 64\n"
    ".visible .entry nothing(.param .u64 a, .param .u64 b, .param .u32 n)\n{\n ret;\n}\n";
constexpr uint64_t kRatesFrom = 1 << 20;  // smaller copies are shown as times
constexpr int kLaunchesAtOnce = 1000;     // over kStreams: a window of Penstock's holds them
constexpr int kStreams = 4;

// The driver, opened as a program's runtime opens it. Throws CUresult: caught in MeasureDevice.
class Api {
 public:
  static Result<Api> Open() {
    Api api;
    api.library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (api.library_ == nullptr) {
      return Fail(Code::kUnavailable, std::string("There is no driver: ") + dlerror() + ".");
    }
    return api;
  }

  template <typename... Arguments>
  void Call(const char* name, Arguments... arguments) const {
    using Function = CUresult (*)(Arguments...);
    const auto function = reinterpret_cast<Function>(dlsym(library_, name));
    const CUresult result = function ? function(arguments...) : CUDA_ERROR_NOT_FOUND;
    if (result != CUDA_SUCCESS) {
      throw Error{Code::kSystem,
                  std::string(name) + " gives error (" + std::to_string(result) + ")."};
    }
  }
  template <typename Function>
  Function Find(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

 private:
  void* library_ = nullptr;
};

class DeviceBench {
 public:
  DeviceBench(const Api& api, const DeviceOptions& options) : api_(api), options_(options) {}

  std::vector<Row> Run() {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    api_.Call("cuInit", 0u);
    api_.Call("cuDeviceGet", &device, 0);
    api_.Call("cuDevicePrimaryCtxRetain", &context, device);
    api_.Call("cuCtxSetCurrent", context);
    api_.Call("cuModuleLoadData", &module, static_cast<const void*>(kPtx));
    api_.Call("cuModuleGetFunction", &nothing_, module, "nothing");
    for (CUstream& stream : streams_) {
      api_.Call("cuStreamCreate", &stream, static_cast<unsigned>(CU_STREAM_NON_BLOCKING));
    }
    size_t free_bytes, total;
    AddTime("cuMemGetInfo", 0, [&] { api_.Call("cuMemGetInfo_v2", &free_bytes, &total); });
    if (IsWanted("launch, posted", options_.only)) Launches();
    Copies();
    return std::move(rows_);
  }

 private:
  std::vector<double> Repeat(const std::function<void()>& work) const {
    work();  // the first one pays for what is made once
    std::vector<double> nanoseconds;
    const int64_t since = NowNanoseconds();
    while (nanoseconds.size() < 3 ||
           static_cast<double>(NowNanoseconds() - since) < options_.seconds * 1e9) {
      const int64_t start = NowNanoseconds();
      work();
      nanoseconds.push_back(static_cast<double>(NowNanoseconds() - start));
    }
    return nanoseconds;
  }

  void AddTime(const std::string& name, uint64_t bytes, const std::function<void()>& work) {
    if (!IsWanted(name, options_.only)) return;
    rows_.push_back({name, bytes, Median(Repeat(work)) / 1e3, "us", 0, ""});
  }

  void Launches() {
    using Launch = CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                unsigned, unsigned, CUstream, void**, void**);
    const auto launch = api_.Find<Launch>("cuLaunchKernel");
    CUdeviceptr a = 1, b = 2;
    unsigned n = 3;
    void* parameters[] = {&a, &b, &n};
    std::vector<double> means;
    for (int batch = 0; batch < 50; ++batch) {
      const int64_t start = NowNanoseconds();
      for (int i = 0; i < kLaunchesAtOnce; ++i) {
        launch(nothing_, 1, 1, 1, 32, 1, 1, 0, streams_[i % kStreams], parameters, nullptr);
      }
      means.push_back(static_cast<double>(NowNanoseconds() - start) / kLaunchesAtOnce);
      api_.Call("cuCtxSynchronize");
    }
    rows_.push_back({"launch, posted", 0, Median(means), "ns", 0, ""});
    AddTime("launch + synchronize", 0, [&] {
      launch(nothing_, 1, 1, 1, 32, 1, 1, 0, streams_[0], parameters, nullptr);
      api_.Call("cuStreamSynchronize", streams_[0]);
    });
  }

  void AddCopy(const std::string& name, uint64_t bytes, const std::function<void()>& copy) {
    if (bytes < kRatesFrom) return AddTime(name, bytes, copy);
    if (!IsWanted(name, options_.only)) return;
    const double rate = static_cast<double>(bytes) / Median(Repeat(copy));
    rows_.push_back({name, bytes, rate, "GB/s", 0, ""});
  }

  void Copies() {
    const uint64_t most = options_.most_bytes;
    std::vector<uint64_t> sizes;
    for (const uint64_t bytes : {4ull, 4096ull, 65536ull, 1ull << 20, 16ull << 20, 256ull << 20}) {
      if (bytes >= options_.least_bytes && bytes < most) sizes.push_back(bytes);
    }
    sizes.push_back(most);
    const auto wanted = [this](const char* part) { return IsWanted(part, options_.only); };
    if (!wanted("host to device, pinned") && !wanted("host to device, pageable") &&
        !wanted("device to host, pinned") && !wanted("device to host, pageable")) {
      return;
    }
    CUdeviceptr device;
    void* pinned;
    std::vector<std::byte> source(most), target(most);
    std::mt19937_64 random(1);
    for (size_t i = 0; i + 8 <= most; i += 8) {
      const uint64_t value = random();
      memcpy(source.data() + i, &value, sizeof value);
    }
    api_.Call("cuMemAlloc_v2", &device, static_cast<size_t>(most));
    api_.Call("cuMemHostAlloc", &pinned, static_cast<size_t>(most), 0u);
    memcpy(pinned, source.data(), most);
    const void* const pinned_source = pinned;
    const void* const plain_source = source.data();
    void* const plain_target = target.data();
    const CUstream stream = streams_[0];
    if (!wanted("host to device, pinned") && !wanted("host to device, pageable")) {
      api_.Call("cuMemcpyHtoD_v2", device, plain_source, static_cast<size_t>(most));
    }
    for (const uint64_t bytes : sizes) {
      const size_t size = bytes;
      AddCopy("host to device, pinned", bytes, [&] {
        api_.Call("cuMemcpyHtoDAsync_v2", device, pinned_source, size, stream);
        api_.Call("cuStreamSynchronize", stream);
      });
      AddCopy("host to device, pageable", bytes, [&] {
        api_.Call("cuMemcpyHtoD_v2", device, plain_source, size);
        api_.Call("cuCtxSynchronize");
      });
      AddCopy("device to host, pinned", bytes, [&] {
        api_.Call("cuMemcpyDtoHAsync_v2", pinned, device, size, stream);
        api_.Call("cuStreamSynchronize", stream);
      });
      AddCopy("device to host, pageable", bytes,
              [&] { api_.Call("cuMemcpyDtoH_v2", plain_target, device, size); });
      if (memcmp(pinned, plain_source, bytes) != 0 ||
          (wanted("device to host, pageable") && memcmp(plain_target, plain_source, bytes) != 0)) {
        throw Error{Code::kInternal, "Copies of (" + BytesAsText(bytes) + ") give other bytes."};
      }
    }
    api_.Call("cuMemFreeHost", pinned);
    api_.Call("cuMemFree_v2", device);
  }

  const Api& api_;
  const DeviceOptions options_;
  CUfunction nothing_ = nullptr;
  CUstream streams_[kStreams] = {};
  std::vector<Row> rows_;
};

}  // namespace

Result<std::vector<Row>> MeasureDevice(const DeviceOptions& options) {
  ASSIGN_OR_RETURN(const Api api, Api::Open());
  try {
    return DeviceBench(api, options).Run();
  } catch (const Error& error) {
    return tl::unexpected<Error>(error);
  }
}

}  // namespace penstock::perf
