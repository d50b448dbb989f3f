// What a program with several GPUs does with them, wherever they are: several_servers MODE. Prints
// the same with local ones.
//
//   count      how many devices there are, and whether their names (PCI address, UUID) differ
//   copies     copies between each two devices, in every way to ask for one
//   ring       a number goes round through kernels, peer copies and events of all devices
//   addresses  10,000 allocations in no order on all devices: no two live ones overlap
//   symbols    one variable and one kernel, on each device its own
//   pinned     one piece of pinned memory, copied to and from each device
//   threads    a thread per device
//   strays     objects of one device where another's are wanted: refused, and nothing is disturbed
//   survive    reads a line from stdin in the middle; then says which devices still work
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define CHECK(call)                                                               \
  do {                                                                            \
    const cudaError_t error = (call);                                             \
    if (error != cudaSuccess) {                                                   \
      printf("line %d: %s gives %s\n", __LINE__, #call, cudaGetErrorName(error)); \
      exit(1);                                                                    \
    }                                                                             \
  } while (0)

constexpr size_t kWords = 3 << 20;  // 12 MiB: more than one piece of a copy between servers

__constant__ uint32_t c_factor;
__device__ uint32_t g_total;

__global__ void Fill(uint32_t* words, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    words[i] = static_cast<uint32_t>(i) * 2654435761u + seed;
  }
}

__global__ void Add(uint32_t* word, uint32_t value) {
  *word = *word * 3 + value;
}

__global__ void Scale(uint32_t value) {
  g_total = g_total + value * c_factor;
}

int Count() {
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  return count;
}

uint64_t Digest(const std::vector<uint32_t>& words) {
  uint64_t digest = 1469598103934665603ull;
  for (const uint32_t word : words) digest = (digest ^ word) * 1099511628211ull;
  return digest;
}

uint64_t DigestOf(const uint32_t* device_words, size_t count) {
  std::vector<uint32_t> words(count);
  CHECK(cudaMemcpy(words.data(), device_words, count * 4, cudaMemcpyDeviceToHost));
  return Digest(words);
}

void CountDevices() {
  std::set<std::string> addresses, uuids;
  for (int i = 0; i < Count(); ++i) {
    char address[32];
    CHECK(cudaDeviceGetPCIBusId(address, sizeof address, i));
    addresses.insert(address);
    int back = -1;
    CHECK(cudaDeviceGetByPCIBusId(&back, address));
    if (back != i) printf("device %d has the address of device %d\n", i, back);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, i));
    uuids.insert(std::string(properties.uuid.bytes, 16));
  }
  printf("%d devices, %zu addresses, %zu uuids\n", Count(), addresses.size(), uuids.size());
}

void Copies() {
  const int count = Count();
  std::vector<uint32_t*> from(count), to(count);
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    CHECK(cudaMalloc(&from[i], kWords * 4));
    CHECK(cudaMalloc(&to[i], kWords * 4));
    Fill<<<64, 128>>>(from[i], kWords, i + 1);
    CHECK(cudaDeviceSynchronize());
  }
  for (int a = 0; a < count; ++a) {
    for (int b = 0; b < count; ++b) {
      CHECK(cudaSetDevice(a));
      const uint64_t wanted = DigestOf(from[a], kWords);
      const auto clear = [&] {
        CHECK(cudaSetDevice(b));
        CHECK(cudaMemset(to[b], 0, kWords * 4));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaSetDevice(a));
      };
      const auto compare = [&](const char* way) {
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaSetDevice(b));
        if (DigestOf(to[b], kWords) != wanted) printf("%s from %d to %d is wrong\n", way, a, b);
        CHECK(cudaSetDevice(a));
      };
      // This one alone is in order with all that both devices have under way.
      CHECK(cudaSetDevice(b));
      CHECK(cudaMemsetAsync(to[b], 0, kWords * 4, cudaStreamPerThread));
      CHECK(cudaSetDevice(a));
      CHECK(cudaMemcpyPeer(to[b], b, from[a], a, kWords * 4));
      CHECK(cudaSetDevice(b));
      if (DigestOf(to[b], kWords) != wanted)
        printf("cudaMemcpyPeer from %d to %d is wrong\n", a, b);
      CHECK(cudaSetDevice(a));
      clear();
      cudaStream_t stream;
      CHECK(cudaStreamCreate(&stream));
      CHECK(cudaMemcpyPeerAsync(to[b], b, from[a], a, kWords * 4, stream));
      CHECK(cudaStreamSynchronize(stream));
      compare("cudaMemcpyPeerAsync");
      clear();
      CHECK(cudaMemcpy(to[b], from[a], kWords * 4, cudaMemcpyDefault));
      compare("cudaMemcpyDefault");
      clear();
      CHECK(cudaMemcpyAsync(to[b], from[a], kWords * 4, cudaMemcpyDeviceToDevice, stream));
      CHECK(cudaStreamSynchronize(stream));
      compare("cudaMemcpyDeviceToDevice");
      clear();
      // Rows of the whole width but two columns, then those.
      constexpr size_t kWidth = 4096, kRows = kWords * 4 / kWidth;
      CHECK(cudaMemcpy2D(to[b], kWidth, from[a], kWidth, kWidth - 8, kRows, cudaMemcpyDefault));
      CHECK(cudaMemcpy2D(reinterpret_cast<char*>(to[b]) + kWidth - 8, kWidth,
                         reinterpret_cast<char*>(from[a]) + kWidth - 8, kWidth, 8, kRows,
                         cudaMemcpyDefault));
      compare("cudaMemcpy2D");
      clear();
      cudaMemcpy3DPeerParms volume = {};
      volume.srcDevice = a;
      volume.dstDevice = b;
      volume.srcPtr = make_cudaPitchedPtr(from[a], 1024, 1024, 512);
      volume.dstPtr = make_cudaPitchedPtr(to[b], 1024, 1024, 512);
      volume.extent = make_cudaExtent(1024, 512, kWords * 4 / (1024 * 512));
      CHECK(cudaMemcpy3DPeer(&volume));
      compare("cudaMemcpy3DPeer");
      // While another device is current, memory of this one is written and read.
      CHECK(cudaSetDevice((b + 1) % count));
      const uint32_t mark = 0xABCD0000u + a * 16 + b;
      uint32_t got = 0;
      CHECK(cudaMemcpy(to[b] + 5, &mark, 4, cudaMemcpyHostToDevice));
      CHECK(cudaMemcpy(&got, to[b] + 5, 4, cudaMemcpyDeviceToHost));
      if (got != mark) printf("word 5 of device %d is (%x) instead of (%x)\n", b, got, mark);
      cudaPointerAttributes attributes;
      CHECK(cudaPointerGetAttributes(&attributes, to[b] + 5));
      if (attributes.device != b)
        printf("device %d owns what is device %d's\n", attributes.device, b);
      CHECK(cudaStreamDestroy(stream));
    }
  }
  // Freed while any other device is current.
  CHECK(cudaSetDevice(0));
  for (int i = 0; i < count; ++i) {
    CHECK(cudaFree(from[i]));
    CHECK(cudaFree(to[i]));
  }
  printf("copies between %d devices are done\n", count);
}

void Ring() {
  const int count = Count();
  std::vector<uint32_t*> word(count);
  std::vector<cudaStream_t> stream(count);
  std::vector<cudaEvent_t> arrived(count), done(count);
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    CHECK(cudaMalloc(&word[i], 4));
    CHECK(cudaMemset(word[i], 0, 4));
    CHECK(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&arrived[i], cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming));
  }
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    CHECK(cudaDeviceSynchronize());
  }
  uint32_t expected = 0;
  for (int round = 0; round < 25; ++round) {
    for (int i = 0; i < count; ++i) {
      const int next = (i + 1) % count;
      CHECK(cudaSetDevice(i));
      Add<<<1, 1, 0, stream[i]>>>(word[i], round * 7 + i);
      expected = expected * 3 + round * 7 + i;
      CHECK(cudaEventRecord(done[i], stream[i]));
      // The next one's stream fetches the word when it is there.
      CHECK(cudaSetDevice(next));
      CHECK(cudaStreamWaitEvent(stream[next], done[i], 0));
      CHECK(cudaMemcpyPeerAsync(word[next], next, word[i], i, 4, stream[next]));
    }
  }
  CHECK(cudaSetDevice(0));
  uint32_t got = 0;
  CHECK(cudaStreamSynchronize(stream[0]));
  CHECK(cudaMemcpy(&got, word[0], 4, cudaMemcpyDeviceToHost));
  printf("the word is %u, %s\n", got, got == expected ? "as it should" : "WRONG");
  for (int i = 0; i < count; ++i) {
    CHECK(cudaEventQuery(done[i]));  // with whatever device current
    CHECK(cudaEventDestroy(done[i]));
    CHECK(cudaStreamQuery(stream[i]));
    CHECK(cudaStreamDestroy(stream[i]));
  }
}

void Addresses() {
  const int count = Count();
  std::mt19937 random(7);
  std::map<uint64_t, uint64_t> live;  // first byte -> one past the last
  std::vector<uint64_t> order;
  int overlaps = 0;
  for (int i = 0; i < 10000; ++i) {
    CHECK(cudaSetDevice(random() % count));
    const size_t bytes = random() % 16 == 0 ? 1 + random() % (4 << 20) : 1 + random() % 4096;
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, bytes));
    const uint64_t first = reinterpret_cast<uint64_t>(memory), last = first + bytes;
    const auto after = live.lower_bound(first);
    if (after != live.end() && after->first < last) ++overlaps;
    if (after != live.begin() && std::prev(after)->second > first) ++overlaps;
    live[first] = last;
    order.push_back(first);
    if (order.size() > 200) {
      const size_t place = random() % order.size();
      CHECK(cudaFree(reinterpret_cast<void*>(order[place])));
      live.erase(order[place]);
      order[place] = order.back();
      order.pop_back();
    }
  }
  for (const uint64_t first : order) CHECK(cudaFree(reinterpret_cast<void*>(first)));
  printf("10000 allocations, %d overlaps\n", overlaps);
}

void Symbols() {
  const int count = Count();
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    const uint32_t factor = 10 + i, zero = 0;
    CHECK(cudaMemcpyToSymbol(c_factor, &factor, 4));
    CHECK(cudaMemcpyToSymbol(g_total, &zero, 4));
  }
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < count; ++i) {
      CHECK(cudaSetDevice(i));
      Scale<<<1, 1>>>(round + 1);
      CHECK(cudaGetLastError());
    }
  }
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    uint32_t total = 0;
    CHECK(cudaMemcpyFromSymbol(&total, g_total, 4));
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, Scale));
    printf("device %d: total %u, %d threads at most\n", i, total, attributes.maxThreadsPerBlock);
  }
}

void Pinned() {
  const int count = Count();
  uint32_t* host = nullptr;
  CHECK(cudaSetDevice(0));
  CHECK(cudaHostAlloc(&host, kWords * 4, cudaHostAllocPortable));
  for (size_t i = 0; i < kWords; ++i) host[i] = static_cast<uint32_t>(i * i);
  const uint64_t before = Digest(std::vector<uint32_t>(host, host + kWords));
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    uint32_t* memory = nullptr;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&memory, kWords * 4));
    CHECK(cudaMemcpyAsync(memory, host, kWords * 4, cudaMemcpyHostToDevice, stream));
    CHECK(cudaStreamSynchronize(stream));
    memset(host, 0, kWords * 4);
    CHECK(cudaMemcpyAsync(host, memory, kWords * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    const bool same = Digest(std::vector<uint32_t>(host, host + kWords)) == before;
    printf("device %d: %s\n", i, same ? "the same" : "DIFFERENT");
  }
  CHECK(cudaFreeHost(host));
}

void Threads() {
  const int count = Count();
  std::vector<uint64_t> digests(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      CHECK(cudaSetDevice(i));
      uint32_t* memory = nullptr;
      CHECK(cudaMalloc(&memory, 1 << 20));
      for (int round = 0; round < 20; ++round) {
        Fill<<<8, 128, 0, cudaStreamPerThread>>>(memory, 1 << 18, round + i * 100);
        CHECK(cudaStreamSynchronize(cudaStreamPerThread));
      }
      digests[i] = DigestOf(memory, 1 << 18);
      CHECK(cudaFree(memory));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < count; ++i) {
    printf("device %d: %llx\n", i, static_cast<unsigned long long>(digests[i]));
  }
}

void Strays() {
  const int count = Count();
  std::vector<cudaStream_t> streams(count);
  std::vector<cudaEvent_t> events(count);
  std::vector<uint32_t*> words(count);
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    CHECK(cudaStreamCreate(&streams[i]));
    CHECK(cudaEventCreate(&events[i]));
    CHECK(cudaMalloc(&words[i], 4));
    CHECK(cudaMemset(words[i], 0, 4));
    CHECK(cudaDeviceSynchronize());
  }
  for (int a = 0; a < count; ++a) {
    for (int b = 0; b < count; ++b) {
      if (a == b) continue;
      CHECK(cudaSetDevice(a));
      printf("%d in %d: event %s", b, a, cudaGetErrorName(cudaEventRecord(events[b], streams[a])));
      Add<<<1, 1, 0, streams[b]>>>(words[a], 5);
      printf(", launch %s\n", cudaGetErrorName(cudaGetLastError()));
    }
  }
  // Gone, they are nobody's.
  CHECK(cudaSetDevice(0));
  CHECK(cudaStreamDestroy(streams[count - 1]));
  CHECK(cudaEventDestroy(events[count - 1]));
  printf("a destroyed event: %s\n", cudaGetErrorName(cudaEventQuery(events[count - 1])));
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    Add<<<1, 1>>>(words[i], i + 1);
    uint32_t got = 0;
    CHECK(cudaMemcpy(&got, words[i], 4, cudaMemcpyDeviceToHost));
    printf("device %d still counts to %u\n", i, got);
  }
}

void Survive() {
  const int count = Count();
  std::vector<uint32_t*> word(count);
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    CHECK(cudaMalloc(&word[i], 4));
    CHECK(cudaMemset(word[i], 0, 4));
    CHECK(cudaDeviceSynchronize());
  }
  printf("ready\n");
  fflush(stdout);
  char line[16];
  if (fgets(line, sizeof line, stdin) == nullptr) return;
  for (int i = 0; i < count; ++i) {
    CHECK(cudaSetDevice(i));
    Add<<<1, 1>>>(word[i], i + 1);
    uint32_t got = 0;
    const cudaError_t error = cudaMemcpy(&got, word[i], 4, cudaMemcpyDeviceToHost);
    printf("device %d: %s %u\n", i, cudaGetErrorName(error), got);
  }
}

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> modes = {
      {"count", CountDevices},  {"copies", Copies},   {"ring", Ring},
      {"addresses", Addresses}, {"symbols", Symbols}, {"pinned", Pinned},
      {"strays", Strays},       {"threads", Threads}, {"survive", Survive}};
  const auto mode = modes.find(argc > 1 ? argv[1] : "");
  if (mode == modes.end()) {
    fprintf(stderr, "There is no such mode.\n");
    return 1;
  }
  mode->second();
  return 0;
}
