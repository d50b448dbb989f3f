// Volumes, copies between contexts and batches: every byte where it belongs, none beside it, and
// the same refusals on every route.
#include "tests/e2e/programs/program.h"

namespace {

struct Volume {
  size_t width, height, depth;  // of the copy
  size_t pitch, rows;           // of the memory around it
  size_t x, y, z;
  size_t bytes() const { return pitch * rows * (z + depth); }
  size_t at(size_t column, size_t row, size_t slice) const {
    return ((z + slice) * rows + y + row) * pitch + x + column;
  }
};

CUDA_MEMCPY3D Describe(const Volume& target, const Volume& source) {
  CUDA_MEMCPY3D copy = {};
  copy.dstPitch = target.pitch;
  copy.dstHeight = target.rows;
  copy.dstXInBytes = target.x;
  copy.dstY = target.y;
  copy.dstZ = target.z;
  copy.srcPitch = source.pitch;
  copy.srcHeight = source.rows;
  copy.srcXInBytes = source.x;
  copy.srcY = source.y;
  copy.srcZ = source.z;
  copy.WidthInBytes = source.width;
  copy.Height = source.height;
  copy.Depth = source.depth;
  return copy;
}

void CompareVolume(const unsigned char* got, const Volume& target, const unsigned char* sent,
                   const Volume& source, unsigned char gap, const char* what) {
  std::vector<unsigned char> expected(target.bytes(), gap);
  for (size_t k = 0; k < source.depth; ++k) {
    for (size_t j = 0; j < source.height; ++j) {
      memcpy(&expected[target.at(0, j, k)], &sent[source.at(0, j, k)], source.width);
    }
  }
  EXPECT(memcmp(got, expected.data(), expected.size()) == 0, "%s (%zu x %zu x %zu) is wrong.", what,
         source.width, source.height, source.depth);
}

// Host to device, to another place on the device, and back, each with gaps of its own.
void RoundTrip(const Volume& host, const Volume& middle, const Volume& last, bool pinned,
               CUstream stream) {
  void* pinned_memory = nullptr;
  std::vector<unsigned char> pageable(host.bytes());
  unsigned char* sent = pageable.data();
  if (pinned) {
    CHECK(cuMemHostAlloc(&pinned_memory, host.bytes(), 0));
    sent = static_cast<unsigned char*>(pinned_memory);
  }
  for (size_t i = 0; i < host.bytes(); ++i) sent[i] = static_cast<unsigned char>(i * 7 + i / 251);
  CUdeviceptr one, two;
  CHECK(cuMemAlloc(&one, middle.bytes()));
  CHECK(cuMemAlloc(&two, last.bytes()));
  CHECK(cuMemsetD8(one, 0x11, middle.bytes()));
  CHECK(cuMemsetD8(two, 0x22, last.bytes()));
  CHECK(cuCtxSynchronize());  // the stream may be one that waits for nobody
  CUDA_MEMCPY3D copy = Describe(middle, host);
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = sent;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = one;
  CHECK(stream == nullptr ? cuMemcpy3D(&copy) : cuMemcpy3DAsync(&copy, stream));
  copy = Describe(last, middle);
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = one;
  copy.dstDevice = two;
  CHECK(stream == nullptr ? cuMemcpy3D(&copy) : cuMemcpy3DAsync(&copy, stream));
  std::vector<unsigned char> got(host.bytes(), 0x33), all(last.bytes());
  unsigned char* target = got.data();
  copy = Describe(host, last);
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = two;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = target;
  CHECK(stream == nullptr ? cuMemcpy3D(&copy) : cuMemcpy3DAsync(&copy, stream));
  if (stream != nullptr) CHECK(cuStreamSynchronize(stream));
  CompareVolume(target, host, sent, host, 0x33, "What comes back");
  CHECK(cuMemcpyDtoH(all.data(), two, last.bytes()));
  CompareVolume(all.data(), last, sent, host, 0x22, "What lies on the device");
  CHECK(cuMemFree(one));
  CHECK(cuMemFree(two));
  if (pinned) CHECK(cuMemFreeHost(pinned_memory));
}

void Volumes(CUstream stream) {
  const struct {
    size_t width, height, depth;
  } sizes[] = {{1, 1, 1},      {7, 5, 3},      {64, 16, 16},    {16, 1, 40},    {900, 70, 9},
               {4096, 64, 12}, {1100, 500, 4}, {700'000, 1, 3}, {700'000, 2, 2}};
  for (const auto& s : sizes) {
    const Volume tight{s.width, s.height, s.depth, s.width, s.height, 0, 0, 0};
    const Volume loose{s.width, s.height, s.depth, s.width + 13, s.height + 2, 5, 1, 1};
    const Volume slices{s.width, s.height, s.depth, s.width, s.height + 1, 0, 0, 0};
    for (const bool pinned : {false, true}) {
      RoundTrip(tight, tight, tight, pinned, nullptr);
      RoundTrip(loose, tight, slices, pinned, stream);
      RoundTrip(slices, loose, tight, pinned, nullptr);
      RoundTrip(tight, slices, loose, pinned, stream);
    }
  }
}

void Refusals(CUdeviceptr memory, CUstream stream) {
  std::vector<unsigned char> host(4096);
  CUDA_MEMCPY3D good = {};
  good.srcMemoryType = CU_MEMORYTYPE_HOST;
  good.srcHost = host.data();
  good.srcPitch = good.dstPitch = 16;
  good.srcHeight = good.dstHeight = 4;
  good.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  good.dstDevice = memory;
  good.WidthInBytes = 16;
  good.Height = 4;
  good.Depth = 4;
  CHECK(cuMemcpy3D(&good));
  const auto refused = [&](const char* what, auto change) {
    CUDA_MEMCPY3D bad = good;
    change(bad);
    const CUresult result = cuMemcpy3D(&bad);
    printf("%s: %s\n", what, ErrorName(result));
    EXPECT(cuMemcpy3DAsync(&bad, stream) == result, "The asynchronous one says something else.");
  };
  refused("no width", [](auto& copy) { copy.WidthInBytes = 0; });
  refused("no depth", [](auto& copy) { copy.Depth = 0; });
  refused("a pitch below the width", [](auto& copy) { copy.dstPitch = 15; });
  refused("slices that overlap", [](auto& copy) { copy.srcHeight = 3; });
  refused("a level of detail", [](auto& copy) { copy.srcLOD = 1; });
  refused("more than the allocation", [](auto& copy) { copy.dstZ = 1 << 20; });
  refused("a host side on the device",
          [&](auto& copy) { copy.srcHost = reinterpret_cast<const void*>(memory); });
  refused("a device side in the program",
          [&](auto& copy) { copy.dstDevice = reinterpret_cast<CUdeviceptr>(host.data()); });
  refused("no type", [](auto& copy) { copy.srcMemoryType = static_cast<CUmemorytype>(0); });
  refused("no memory", [](auto& copy) { copy.srcHost = nullptr; });
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuMemcpy3D(nullptr));
}

void Peers(const Gpu& gpu) {
  CUcontext other;
  CUdeviceptr here, there;
  std::vector<unsigned> words(30'000), got(30'000);
  FillHost(words.data(), words.size(), 9);
  const size_t bytes = words.size() * sizeof(unsigned);
  CHECK(cuCtxCreate(&other, nullptr, 0, gpu.device));
  CHECK(cuMemAlloc(&there, bytes));
  CHECK(cuMemsetD8(there, 0, bytes));
  CHECK(cuCtxSynchronize());
  gpu.MakeCurrent();
  CUstream stream;
  CHECK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  CHECK(cuMemAlloc(&here, bytes));
  CHECK(cuMemcpyHtoD(here, words.data(), bytes));
  CHECK(cuMemcpyPeer(there, other, here, gpu.context, bytes / 2));
  CHECK(cuMemcpyPeerAsync(there + bytes / 2, other, here + bytes / 2, gpu.context, bytes / 2,
                          stream));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemsetD8(here, 0, bytes));
  CUDA_MEMCPY3D_PEER back = {};
  back.srcMemoryType = back.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  back.srcContext = other;
  back.dstContext = gpu.context;
  back.srcDevice = there;
  back.dstDevice = here;
  back.srcPitch = back.dstPitch = 1000;
  back.srcHeight = back.dstHeight = 10;
  back.WidthInBytes = 1000;
  back.Height = 10;
  back.Depth = 6;
  CHECK(cuMemcpy3DPeer(&back));
  back.srcZ = back.dstZ = 6;
  CHECK(cuMemcpy3DPeerAsync(&back, stream));
  CHECK(cuStreamSynchronize(stream));
  CHECK(cuMemcpyDtoH(got.data(), here, bytes));
  EXPECT(CountWrongOnHost(got.data(), got.size(), 9) == 0, "A copy between contexts is wrong.");
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE, cuMemcpyPeer(there, other, here, gpu.context, bytes + 1));
  CHECK(cuMemFree(here));
  CHECK(cuStreamDestroy(stream));
  CHECK(cuCtxDestroy(other));
  gpu.MakeCurrent();
}

void Batches(CUdeviceptr memory, CUstream stream) {
  std::vector<unsigned> sent(2000), got(2000);
  FillHost(sent.data(), sent.size(), 4);
  CHECK(cuMemsetD8(memory, 0, 16'000));
  CHECK(cuCtxSynchronize());
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0;
  CUdeviceptr to[] = {memory, memory + 4000}, from[2];
  size_t sizes[] = {4000, 4000};
  from[0] = reinterpret_cast<CUdeviceptr>(sent.data());
  from[1] = reinterpret_cast<CUdeviceptr>(sent.data() + 1000);
  CHECK(cuMemcpyBatchAsync(to, from, sizes, 2, &attributes, &first, 1, stream));
  CUdeviceptr onward[] = {memory + 8000};
  CUdeviceptr start[] = {memory};
  size_t all[] = {8000};
  CHECK(cuMemcpyBatchAsync(onward, start, all, 1, &attributes, &first, 1, stream));
  CUdeviceptr home[] = {reinterpret_cast<CUdeviceptr>(got.data())};
  CHECK(cuMemcpyBatchAsync(home, onward, all, 1, &attributes, &first, 1, stream));
  CHECK(cuStreamSynchronize(stream));
  EXPECT(CountWrongOnHost(got.data(), got.size(), 4) == 0, "A batch brings other bytes.");
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE,
              cuMemcpyBatchAsync(to, from, sizes, 0, &attributes, &first, 1, stream));
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE,
              cuMemcpyBatchAsync(to, from, sizes, 2, &attributes, &first, 1, nullptr));
  EXPECT_CODE(CUDA_ERROR_INVALID_VALUE,
              cuMemcpyBatchAsync(to, nullptr, sizes, 2, &attributes, &first, 1, stream));
}

}  // namespace

int main() {
  StartWatchdog();
  Gpu gpu;
  CUstream stream;
  CUdeviceptr memory;
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&memory, 16'000));
  Volumes(stream);
  Refusals(memory, stream);
  Peers(gpu);
  Batches(memory, stream);
  printf("volumes: ok\n");
}
