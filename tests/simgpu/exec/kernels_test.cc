// The executor run on what nvcc makes of CUDA kernels: each result is compared with the same
// computation on the host.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <thread>

#include "tests/simgpu/exec/kernel_runner.h"

using namespace simgpu;
using namespace simgpu::test;

namespace {

// The same source optimised and as compiled for a debugger.
const std::string kFiles[] = {PENSTOCK_KERNELS "/basic.ptx", PENSTOCK_KERNELS "/basic_debug.ptx",
                              PENSTOCK_KERNELS "/basic_sm120.ptx"};

void RequireNoFault(const LaunchResult& result) {
  INFO(result.message);
  REQUIRE(result.fault == Fault::kNone);
}

struct Loaded : Module {
  explicit Loaded(const std::string& file) : Module(ReadFile(file)) {
    INFO(file << ": " << error.message);
    REQUIRE(program != nullptr);
  }
};

}  // namespace

TEST_CASE("vectors add", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    int n = 1000;
    Buffer<float> a(m.memory, 1024), b(m.memory, 1024), c(m.memory, 1024);
    for (int i = 0; i < n; ++i) a[i] = i * 0.5f, b[i] = 1.0f / (i + 1), c[i] = -1;
    c[1000] = -1;
    RequireNoFault(m.Run("vector_add", Blocks(4, 256), Arguments(a, b, c, n)));
    for (int i = 0; i < n; ++i) REQUIRE(c[i] == a[i] + b[i]);
    REQUIRE(c[1000] == -1);
  }
}

TEST_CASE("tiled matrices multiply", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    int h = 64, wa = 96, wb = 64;
    Buffer<float> a(m.memory, h * wa), b(m.memory, wa * wb), c(m.memory, h * wb);
    for (int i = 0; i < h * wa; ++i) a[i] = (i * 37 % 101) * 0.01f;
    for (int i = 0; i < wa * wb; ++i) b[i] = (i * 53 % 97) * 0.02f;
    for (uint32_t tile : {16u, 32u}) {
      std::fill(c.data(), c.data() + c.size(), 0.0f);
      Shape shape;
      shape.grid[0] = wb / tile, shape.grid[1] = h / tile;
      shape.block[0] = shape.block[1] = tile;
      RequireNoFault(
          m.Run(tile == 16 ? "matmul16" : "matmul32", shape, Arguments(c, a, b, wa, wb)));
      for (int y = 0; y < h; ++y)
        for (int x = 0; x < wb; ++x) {
          // Optimised code fuses multiply and add, debug code does not.
          double sum = 0;
          for (int k = 0; k < wa; ++k) sum += double(a[y * wa + k]) * b[k * wb + x];
          REQUIRE(c[y * wb + x] == Approx(sum).epsilon(1e-5));
        }
    }
  }
}

TEST_CASE("a reduction over shuffles, shared memory and atomics is exact", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    int n = 20000, expected = 0;
    Buffer<int> in(m.memory, n), out(m.memory, 1);
    for (int i = 0; i < n; ++i) in[i] = i * 7919 % 1000 - 500, expected += in[i];
    out[0] = 0;
    RequireNoFault(m.Run("reduce", Blocks(5, 256), Arguments(in, out, n)));
    REQUIRE(out[0] == expected);
  }
}

TEST_CASE("divergent loops end with each lane's own count", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    int n = 500;
    Buffer<int> out(m.memory, n);
    RequireNoFault(m.Run("collatz", Blocks(4, 128), Arguments(out, n)));
    for (int i = 0; i < n; ++i) {
      unsigned long long v = i + 1;
      int count = 0;
      while (v != 1) v = v & 1 ? 3 * v + 1 : v / 2, ++count;
      REQUIRE(out[i] == count);
    }
  }
}

TEST_CASE("dynamic shared memory holds vectors", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    int n = 128;
    Buffer<float> in(m.memory, 4 * n), out(m.memory, 4 * n);
    for (int i = 0; i < 4 * n; ++i) in[i] = static_cast<float>((i * 31) % 17) * 0.25f + 0.1f;
    RequireNoFault(m.Run("nbody", Blocks(2, 64, 64 * 16), Arguments(in, out, n)));
    for (int i = 0; i < n; ++i) {
      double acc[3] = {};
      for (int k = 0; k < n; ++k) {
        double d[3], r2 = 0.01;
        for (int j = 0; j < 3; ++j) d[j] = double(in[4 * k + j]) - in[4 * i + j], r2 += d[j] * d[j];
        double s = in[4 * k + 3] / (r2 * std::sqrt(r2));
        for (int j = 0; j < 3; ++j) acc[j] += d[j] * s;
      }
      for (int j = 0; j < 3; ++j)
        REQUIRE(out[4 * i + j] == Approx(acc[j]).epsilon(1e-3).margin(1e-2));
      REQUIRE(out[4 * i + 3] == in[4 * i + 3]);
    }
  }
}

TEST_CASE("functions call themselves and each other", "[simgpu]") {
  auto fibonacci = [](int n) {
    int a = 0, b = 1;
    for (int i = 0; i < n; ++i) b += a, a = b - a;
    return a;
  };
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> out(m.memory, 64);
    RequireNoFault(m.Run("calls", Blocks(1, 48), Arguments(out)));
    for (int i = 0; i < 48; ++i) REQUIRE(out[i] == fibonacci(i % 12));
    RequireNoFault(m.Run("indirect", Blocks(1, 64), Arguments(out, 1)));
    for (int i = 0; i < 64; ++i) {
      int n = i % 10, which = (i + 1) % 3;
      REQUIRE(out[i] == (which == 0 ? fibonacci(n) : which == 1 ? 2 * n : -n));
    }
  }
}

TEST_CASE("module variables, constants and struct parameters arrive", "[simgpu]") {
  struct Mixed {
    char tag;
    double d;
    short s[3];
    int n;
  };
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> ints(m.memory, 32);
    Buffer<float> floats(m.memory, 32);
    Mixed mixed{'a', 3.0, {-1, 2, -30000}, 100000};
    RequireNoFault(m.Run("tables", Blocks(1, 32), Arguments(ints, floats, mixed)));
    int table[4] = {1, 20, 300, 0};
    for (int i = 0; i < 32; ++i) {
      REQUIRE(ints[i] == table[i % 4] + mixed.s[i % 3] + mixed.n + mixed.tag);
      REQUIRE(floats[i] == (i % 2 ? 2.5f : 1.5f) * 3.0f);
    }
    const Variable* table_variable = m.program->FindVariable("table");
    REQUIRE(table_variable != nullptr);
    REQUIRE(table_variable->bytes == 16);
    reinterpret_cast<int*>(table_variable->address)[3] = 4000;
    RequireNoFault(m.Run("tables", Blocks(1, 32), Arguments(ints, floats, mixed)));
    REQUIRE(ints[3] == 4000 + mixed.s[0] + mixed.n + mixed.tag);
  }
}

TEST_CASE("local arrays are each thread's own", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<int> out(m.memory, 64);
    for (int n : {5, 100}) {
      RequireNoFault(m.Run("local_array", Blocks(1, 64), Arguments(out, n)));
      for (int t = 0; t < 64; ++t) {
        int a[16];
        for (int i = 0; i < 16; ++i) a[i] = i * t;
        for (int i = 0; i < n; ++i)
          a[(i * 7) % 16] = int(unsigned(a[(i * 7) % 16]) + unsigned(a[(i * 3 + t) % 16]));
        REQUIRE(out[t] == a[n % 16]);
      }
    }
  }
}

TEST_CASE("printf formats like C", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    RequireNoFault(m.Run("print", Blocks(1, 32), Arguments(41, 2.5)));
    REQUIRE(m.printed ==
            "even 41|    7|-3  |0002.500|1234567890123|x|ff|%|2.500000e+00\n"
            "odd 42|    7|-3  |0002.500|1234567890123|x|ff|%|2.500000e+00\n");
  }
}

TEST_CASE("a failed assertion faults and says where", "[simgpu]") {
  Loaded m(kFiles[0]);
  RequireNoFault(m.Run("check", Blocks(1, 32), Arguments(32)));
  LaunchResult result = m.Run("check", Blocks(1, 32), Arguments(31));
  REQUIRE(result.fault == Fault::kAssert);
  REQUIRE(m.printed_error.find(
              "block: [0,0,0], thread: [31,0,0] Assertion `n > (int)threadIdx.x` failed.") !=
          std::string::npos);
}

TEST_CASE("threads of a warp may wait for each other", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    for (const char* name : {"warp_lock", "warp_lock_inside"}) {
      Buffer<int> lock(m.memory, 1), count(m.memory, 1);
      lock[0] = count[0] = 0;
      RequireNoFault(m.Run(name, Blocks(3, 64), Arguments(lock, count)));
      REQUIRE(count[0] == 192);
      REQUIRE(lock[0] == 0);
    }
    Buffer<int> flag(m.memory, 1), out(m.memory, 33);
    flag[0] = 0;
    RequireNoFault(m.Run("lanes_wait", Blocks(1, 32), Arguments(flag, out)));
    REQUIRE(out[0] == 42);
    for (int i = 1; i < 33; ++i) REQUIRE(out[i] == 42);
  }
}

TEST_CASE("a block may wait for one that has not started", "[simgpu]") {
  Loaded m(kFiles[0]);
  int n = 20;
  Buffer<int> flags(m.memory, n), out(m.memory, n);
  RequireNoFault(m.Run("blocks_wait", Blocks(n, 32), Arguments(flags, out)));
  for (int i = 0; i < n; ++i) REQUIRE(out[i] == n - i);
}

TEST_CASE("the stop flag ends a kernel that never would", "[simgpu]") {
  Loaded m(kFiles[0]);
  Buffer<int> flag(m.memory, 1);
  flag[0] = 0;
  std::atomic<bool> stop{false};
  Shape shape = Blocks(1, 32);
  shape.stop = &stop;
  LaunchResult result;
  std::thread runner([&] { result = m.Run("spin", shape, Arguments(flag)); });
  stop = true;
  runner.join();
  REQUIRE(result.fault == Fault::kStopped);
}

TEST_CASE("barriers hold in loops and reduce", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    for (uint32_t threads : {256u, 100u}) {
      Buffer<int> out(m.memory, 256);
      int n = 9;
      RequireNoFault(m.Run("barrier_loop", Blocks(1, threads), Arguments(out, n)));
      int thirds = (static_cast<int>(threads) + 2) / 3;
      for (int t = 0; t < static_cast<int>(threads); ++t)
        REQUIRE(out[t] == (t + n) % static_cast<int>(threads) + n + 3000000 + 10000 * thirds);
    }
  }
}

TEST_CASE("an access outside every allocation faults with its thread", "[simgpu]") {
  Loaded m(kFiles[0]);
  Buffer<int> p(m.memory, 40);
  RequireNoFault(m.Run("out_of_bounds", Blocks(1, 32), Arguments(p, 8)));
  for (int i = 8; i < 40; ++i) REQUIRE(p[i] == 1);
  LaunchResult result = m.Run("out_of_bounds", Blocks(1, 32), Arguments(p, 9));
  REQUIRE(result.fault == Fault::kIllegalAddress);
  INFO(result.message);
  REQUIRE(result.message.find("thread (31, 0, 0)") != std::string::npos);
  REQUIRE(result.message.find("out_of_bounds") != std::string::npos);
  REQUIRE(m.Run("out_of_bounds", Blocks(1, 32), Arguments(uint64_t{0}, 0)).fault ==
          Fault::kIllegalAddress);
  REQUIRE(m.Run("out_of_bounds", Blocks(1, 32), Arguments(p.address() + 2, 0)).fault ==
          Fault::kMisalignedAddress);
}

TEST_CASE("atomics of every kind agree with one after another", "[simgpu]") {
  for (const std::string& file : kFiles) {
    Loaded m(file);
    Buffer<unsigned> u(m.memory, 16);
    Buffer<int> s(m.memory, 2);
    Buffer<float> f(m.memory, 1);
    Buffer<double> d(m.memory, 1);
    Buffer<unsigned long long> l(m.memory, 1);
    for (int i = 0; i < 16; ++i) u[i] = 0;
    u[5] = ~0u;
    RequireNoFault(m.Run("atomics", Blocks(1, 64), Arguments(u, s, f, d, l)));
    unsigned inc = 0, dec = 0, x = 0, most = 0;
    for (unsigned t = 0; t < 64; ++t) {
      inc = inc >= 9 ? 0 : inc + 1;
      dec = dec == 0 || dec > 4 ? 4 : dec - 1;
      x ^= t;
      most = std::max(most, t * 7 % 64);
    }
    REQUIRE(u[0] == 63 * 32);
    REQUIRE(u[1] == most);
    REQUIRE(u[2] == inc);
    REQUIRE(u[3] == dec);
    REQUIRE(u[4] == ~0u);
    REQUIRE(u[5] == 0);
    REQUIRE(u[6] == x);
    REQUIRE(s[0] == 10 - 63);
    REQUIRE(s[1] == 23);
    REQUIRE(f[0] == 32.0f);
    REQUIRE(d[0] == 16.0);
    REQUIRE(l[0] == 64ull << 32);
    for (int k = 0; k < 4; ++k) {
      unsigned sum = 0;
      for (int t = k; t < 64; t += 4) sum += static_cast<unsigned>(t);
      REQUIRE(u[8 + k] == sum);
    }
  }
}
