// What Penstock costs, as ratios to the raw transport in the same run: the machine and its noise
// are then in both. A plain driver API program does the measuring; scripts/bench starts a private
// daemon and gives it Penstock's libcuda.so.1.
//
//   launch        a posted cuLaunchKernel with room in the ring and in the windows: 1,000 at a time
//                 over four streams, the mean of each thousand, the median of all those
//   launch+sync   the same, waited for each time
//   question      cuMemGetInfo against a blocking ping-pong of messages of the same sizes; on a
//   busy
//                 machine both are a matter of who is scheduled when, so the best tenth is shown
//                 too, and a ping-pong whose ends look at their socket before they sleep
//   copies        256 MiB of random bytes each way against a loop of send and recv, and against
//                 the transport's own bulk moves
//
// Through shared memory (--transport shm) the baselines are a ping-pong in shared memory with the
// same way of waking, and memcpy between buffers of the same size.
//
// Things to compare are measured in turns, so that a busy second hits both. Medians throughout.
#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "tests/perf/random_bytes.h"
#include "tests/perf/raw_peer.h"
#include "tests/perf/shared_peer.h"
#include "tests/perf/transport_peer.h"

namespace penstock::perf {
namespace {

#define CHECK(call)                                                         \
  do {                                                                      \
    const CUresult check_result = (call);                                   \
    if (check_result != CUDA_SUCCESS) {                                     \
      const char* check_name = "an unknown error";                          \
      cuGetErrorName(check_result, &check_name);                            \
      fprintf(stderr, "penstock_bench: %s gives %s.\n", #call, check_name); \
      exit(1);                                                              \
    }                                                                       \
  } while (0)

constexpr char kPtx[] =
    ".version 7.0\n.target sm_75\n.address_size 64\n"
    ".visible .entry nothing(.param .u64 a, .param .u64 b, .param .u32 n)\n{\n ret;\n}\n";

struct Sizes {
  uint64_t copy_bytes = 256ull << 20;
  int copy_turns = 9;
  int batches = 200, batch = 1000;
  int questions = 3000;
  int waits = 500;
  uint32_t request_bytes = 48, reply_bytes = 64;
};

struct Row {
  std::string name, unit;
  double value = 0, raw = 0, ratio = 0;  // raw and ratio: 0 if there is none
  double limit = 0;                      // of the ratio, or of the value where there is no raw
  bool at_least = false;                 // the limit is a lower one
  bool met() const {
    const double measured = raw > 0 ? ratio : value;
    return limit == 0 || (at_least ? measured >= limit : measured <= limit);
  }
};

// The value below which one part in `parts` lies.
double Quantile(std::vector<double> values, size_t parts) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / parts];
}

double Median(const std::vector<double>& values) {
  return Quantile(values, 2);
}

double Seconds(const std::function<void()>& work) {
  const int64_t start = NowNanoseconds();
  work();
  return static_cast<double>(NowNanoseconds() - start) / 1e9;
}

class Bench {
 public:
  Bench(const Sizes& sizes, RawPeer& raw, SharedPeer* shared, TransportPeer& transport)
      : sizes_(sizes), raw_(raw), shared_(shared), transport_(transport) {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuCtxCreate(&context, nullptr, 0, device));
    CHECK(cuModuleLoadData(&module, kPtx));
    CHECK(cuModuleGetFunction(&nothing_, module, "nothing"));
    for (CUstream& stream : streams_) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  }

  std::vector<Row> Run() {
    Launches();
    Questions();
    Copies();
    return rows_;
  }

 private:
  static constexpr int kQuestionBlock = 50;
  static constexpr int kStreams = 4;  // a stream's window holds 512 operations

  void Launch(CUstream stream) {
    CUdeviceptr a = 1, b = 2;
    unsigned n = 3;
    void* parameters[] = {&a, &b, &n};
    CHECK(cuLaunchKernel(nothing_, 64, 1, 1, 256, 1, 1, 0, stream, parameters, nullptr));
  }

  void Launches() {
    std::vector<double> means, singles, waited;
    for (int batch = 0; batch < sizes_.batches; ++batch) {
      const double seconds = Seconds([&] {
        for (int i = 0; i < sizes_.batch; ++i) Launch(streams_[i % kStreams]);
      });
      means.push_back(seconds * 1e9 / sizes_.batch);
      CHECK(cuCtxSynchronize());
    }
    for (int i = 0; i < sizes_.batch; ++i) {
      singles.push_back(1e9 * Seconds([&] { Launch(streams_[i % kStreams]); }));
      if (i % 100 == 99) CHECK(cuCtxSynchronize());
    }
    for (int i = 0; i < sizes_.waits; ++i) {
      waited.push_back(1e6 * Seconds([&] {
                         Launch(streams_[0]);
                         CHECK(cuStreamSynchronize(streams_[0]));
                       }));
    }
    rows_.push_back({"cuLaunchKernel, mean of 1,000", "ns", Median(means), 0, 0, 400});
    rows_.push_back({"cuLaunchKernel, single calls", "ns", Median(singles)});
    rows_.push_back({"launch + cuStreamSynchronize", "us", Median(waited)});
  }

  void Questions() {
    // In blocks, and the first of each do not count: who has just been served may still be looking
    // for more, on a processor that the other one needs.
    std::vector<double> asked, echoed, looked;
    const auto measure = [](std::vector<double>& times, const std::function<void()>& exchange) {
      for (int i = 0; i < kQuestionBlock; ++i) {
        const double seconds = Seconds(exchange);
        if (i >= kQuestionBlock / 5) times.push_back(1e6 * seconds);
      }
    };
    for (int i = 0; i < sizes_.questions; i += kQuestionBlock) {
      size_t free_bytes, total;
      measure(asked, [&] { CHECK(cuMemGetInfo(&free_bytes, &total)); });
      measure(echoed, [&] {
        if (shared_ != nullptr) {
          shared_->PingPong(sizes_.request_bytes, sizes_.reply_bytes);
        } else {
          raw_.PingPong(sizes_.request_bytes, sizes_.reply_bytes, false);
        }
      });
      measure(looked, [&] { raw_.PingPong(sizes_.request_bytes, sizes_.reply_bytes, true); });
    }
    Row best = {"cuMemGetInfo / ping-pong, best tenth", "us", Quantile(asked, 10)};
    best.raw = Quantile(echoed, 10);
    best.ratio = best.value / best.raw;
    rows_.push_back({"tcp ping-pong that looks before it sleeps", "us", Median(looked)});
    rows_.push_back(best);
    Row row = {"cuMemGetInfo / ping-pong", "us", Median(asked), Median(echoed)};
    row.ratio = row.value / row.raw;
    row.limit = 1.3;
    rows_.push_back(row);
  }

  void Copies() {
    const uint64_t bytes = sizes_.copy_bytes;
    CUdeviceptr memory;
    void *pinned_memory, *plain_memory, *other_memory;
    CHECK(cuMemAlloc(&memory, bytes));
    CHECK(cuMemHostAlloc(&pinned_memory, bytes, 0));
    if (posix_memalign(&plain_memory, 4096, bytes) != 0 ||
        posix_memalign(&other_memory, 4096, bytes) != 0) {
      fprintf(stderr, "penstock_bench: There is no memory.\n");
      exit(1);
    }
    std::byte* pinned = static_cast<std::byte*>(pinned_memory);
    std::byte* plain = static_cast<std::byte*>(plain_memory);
    std::byte* other = static_cast<std::byte*>(other_memory);
    for (std::byte* each : {pinned, plain, other}) FillRandom(each, bytes);
    transport_.Connect(other, bytes);

    const CUstream stream = streams_[0];
    const struct {
      const char* name;
      std::function<void()> move;
      int baseline;  // index of the raw row, or -1
    } moves[] = {
        {shared_ != nullptr ? "memcpy from pinned" : "raw send",
         [&] {
           if (shared_ != nullptr) {
             std::memcpy(other, pinned, bytes);
           } else {
             raw_.Send(other, bytes);
           }
         },
         -1},
        {shared_ != nullptr ? "memcpy to pinned" : "raw receive",
         [&] {
           if (shared_ != nullptr) {
             std::memcpy(pinned, other, bytes);
           } else {
             raw_.Receive(other, bytes);
           }
         },
         -1},
        {"transport Get", [&] { transport_.Pull(bytes); }, 0},
        {"transport Put", [&] { transport_.Push(bytes); }, 1},
        {"host to device, pinned",
         [&] {
           CHECK(cuMemcpyHtoDAsync(memory, pinned, bytes, stream));
           CHECK(cuStreamSynchronize(stream));
         },
         0},
        {"host to device, pageable",
         [&] {
           CHECK(cuMemcpyHtoD(memory, plain, bytes));
           CHECK(cuCtxSynchronize());
         },
         0},
        {"device to host, pinned",
         [&] {
           CHECK(cuMemcpyDtoHAsync(pinned, memory, bytes, stream));
           CHECK(cuStreamSynchronize(stream));
         },
         1},
        {"device to host, pageable", [&] { CHECK(cuMemcpyDtoH(plain, memory, bytes)); }, 1},
    };
    std::vector<std::vector<double>> rates(std::size(moves));
    for (int turn = -1; turn < sizes_.copy_turns; ++turn) {  // the first one touches all pages
      for (size_t i = 0; i < std::size(moves); ++i) {
        const double seconds = Seconds(moves[i].move);
        if (turn >= 0) rates[i].push_back(static_cast<double>(bytes) / seconds / 1e9);
      }
    }
    if (std::memcmp(pinned, plain, bytes) != 0) {
      fprintf(stderr, "penstock_bench: The copies give different bytes.\n");
      exit(1);
    }
    for (size_t i = 0; i < std::size(moves); ++i) {
      Row row = {moves[i].name, "GB/s", Median(rates[i])};
      if (moves[i].baseline >= 0) {
        row.raw = Median(rates[moves[i].baseline]);
        row.ratio = row.value / row.raw;
        const bool pageable = std::strstr(moves[i].name, "pageable") != nullptr;
        if (std::strncmp(moves[i].name, "transport", 9) != 0 && !(shared_ && pageable)) {
          row.limit = 0.85;
          row.at_least = true;
        }
      }
      rows_.push_back(row);
    }
    free(plain_memory);
    free(other_memory);
    CHECK(cuMemFreeHost(pinned_memory));
    CHECK(cuMemFree(memory));
  }

  const Sizes sizes_;
  RawPeer& raw_;
  SharedPeer* const shared_;  // null over tcp
  TransportPeer& transport_;
  CUfunction nothing_;
  CUstream streams_[kStreams];
  std::vector<Row> rows_;
};

void PrintTable(const std::vector<Row>& rows) {
  printf("%-38s %10s %-5s %10s %7s  %s\n", "", "measured", "", "raw", "ratio", "target");
  for (const Row& row : rows) {
    char raw[32] = "", ratio[32] = "", target[64] = "";
    if (row.raw > 0) {
      snprintf(raw, sizeof raw, "%.2f", row.raw);
      snprintf(ratio, sizeof ratio, "%.2f", row.ratio);
    }
    if (row.limit > 0) {
      snprintf(target, sizeof target, "%s %g%s", row.at_least ? ">=" : "<=", row.limit,
               row.met() ? "" : "  (missed)");
    }
    printf("%-38s %10.2f %-5s %10s %7s  %s\n", row.name.c_str(), row.value, row.unit.c_str(), raw,
           ratio, target);
  }
}

void PrintJson(const std::vector<Row>& rows) {
  printf("[\n");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    printf(
        "  {\"name\": \"%s\", \"unit\": \"%s\", \"value\": %g, \"raw\": %g, \"ratio\": %g, "
        "\"target\": %g, \"met\": %s}%s\n",
        row.name.c_str(), row.unit.c_str(), row.value, row.raw, row.ratio, row.limit,
        row.met() ? "true" : "false", i + 1 < rows.size() ? "," : "");
  }
  printf("]\n");
}

[[noreturn]] void Usage() {
  fprintf(stderr,
          "Usage: penstock_bench [--json] [--smoke] [--transport shm] [--request-bytes N] "
          "[--reply-bytes N]\n"
          "  --json    a list of rows instead of the table\n"
          "  --smoke   tiny sizes: shows that it works, the numbers mean nothing\n"
          "  --request-bytes, --reply-bytes   of cuMemGetInfo on the wire, for the ping-pong\n");
  exit(2);
}

int Main(int argc, char** argv) {
  Sizes sizes;
  bool json = false, through_memory = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--json") {
      json = true;
    } else if (argument == "--smoke") {
      sizes.copy_bytes = 4 << 20;
      sizes.copy_turns = 1;
      sizes.batches = 3;
      sizes.batch = 100;
      sizes.questions = sizes.waits = 20;
    } else if (argument == "--transport" && i + 1 < argc) {
      through_memory = std::string(argv[++i]) == "shm";
    } else if (argument == "--request-bytes" && i + 1 < argc) {
      sizes.request_bytes = std::clamp(atoi(argv[++i]), 16, 4096);
    } else if (argument == "--reply-bytes" && i + 1 < argc) {
      sizes.reply_bytes = std::clamp(atoi(argv[++i]), 1, 4096);
    } else {
      Usage();
    }
  }
  RawPeer raw;  // all fork, so they come before everything that makes threads
  std::unique_ptr<SharedPeer> shared;
  if (through_memory) shared = std::make_unique<SharedPeer>();
  TransportPeer transport(sizes.copy_bytes, through_memory);
  const std::vector<Row> rows = Bench(sizes, raw, shared.get(), transport).Run();
  if (json) {
    PrintJson(rows);
  } else {
    PrintTable(rows);
  }
  return 0;
}

}  // namespace
}  // namespace penstock::perf

int main(int argc, char** argv) {
  return penstock::perf::Main(argc, argv);
}
