// What the tcp transport costs beyond the bare sockets, on loopback: round trips against a blocking
// send/recv ping-pong, bulk moves against a plain send and recv loop, and the price of a posted
// frame. Raw and transport runs alternate, and the ratio of medians is printed, so that a machine
// that is busy with other things disturbs both alike.
//
//   penstock_transport_bench [frame bytes] [bulk MiB]
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "transport/tcp/tcp.h"

namespace penstock::transport {
namespace {

struct Sockets {
  UniqueFd near, far;
};

Sockets Connect() {
  auto listener = tcp::Listener::Bind("127.0.0.1", 0);
  auto near = tcp::Dial("127.0.0.1", listener->port(), Deadline::After(2000));
  auto far = listener->Accept(Deadline::After(2000));
  return {std::move(*near), std::move(*far)};
}

struct Pair {
  std::unique_ptr<Connection> near, far;
};

Pair ConnectPair() {
  Sockets control = Connect(), bulk = Connect();
  return {tcp::Adopt(std::move(control.near), std::move(bulk.near), {}),
          tcp::Adopt(std::move(control.far), std::move(bulk.far), {})};
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void Post(Connection& at, uint32_t bytes, uint32_t flags) {
  std::byte* slot;
  while (at.Reserve(bytes, &slot) != Outcome::kOk) sched_yield();
  std::memcpy(slot, &bytes, sizeof bytes);
  at.Commit(bytes, flags);
}

struct Counter : Handler {
  Connection* back = nullptr;  // echo to it, if any
  uint64_t frames = 0, done = 0;
  bool OnFrame(std::span<const std::byte> frame) override {
    ++frames;
    if (back != nullptr) Post(*back, frame.size(), kFlush);
    return true;
  }
  void OnBulkDone(uint64_t, BulkStatus status, uint64_t) override {
    if (status != BulkStatus::kOk) std::abort();
    ++done;
  }
};

constexpr int kRounds = 4000;

double RawPingPong(size_t bytes) {
  Sockets sockets = Connect();
  std::thread echo([&] {
    std::vector<char> buffer(bytes);
    while (recv(sockets.far.get(), buffer.data(), bytes, MSG_WAITALL) > 0) {
      send(sockets.far.get(), buffer.data(), bytes, MSG_NOSIGNAL);
    }
  });
  std::vector<char> buffer(bytes);
  std::vector<double> times;
  for (int i = 0; i < kRounds; ++i) {
    const int64_t start = NowNanoseconds();
    send(sockets.near.get(), buffer.data(), bytes, MSG_NOSIGNAL);
    recv(sockets.near.get(), buffer.data(), bytes, MSG_WAITALL);
    times.push_back(NowNanoseconds() - start);
  }
  shutdown(sockets.near.get(), SHUT_RDWR);
  echo.join();
  return Median(times);
}

double PingPong(uint32_t bytes) {
  Pair pair = ConnectPair();
  std::thread echo([&] {
    Counter handler;
    handler.back = pair.far.get();
    while (pair.far->Wait(16, handler, Deadline::Never()) >= 0) {
    }
  });
  Counter handler;
  std::vector<double> times;
  for (uint64_t i = 0; i < kRounds; ++i) {
    const int64_t start = NowNanoseconds();
    Post(*pair.near, bytes, kFlush);
    while (handler.frames <= i) pair.near->Wait(16, handler, Deadline::Never());
    times.push_back(NowNanoseconds() - start);
  }
  pair.near->Close(0);
  echo.join();
  return Median(times);
}

double RawBulk(std::vector<std::byte>& from, std::vector<std::byte>& to) {
  Sockets sockets = Connect();
  constexpr size_t kStep = 1 << 20;
  const int64_t start = NowNanoseconds();
  std::thread sender([&] {
    for (size_t at = 0; at < from.size();) {
      const ssize_t n = send(sockets.near.get(), from.data() + at,
                             std::min(kStep, from.size() - at), MSG_NOSIGNAL);
      if (n <= 0) std::abort();
      at += n;
    }
  });
  for (size_t at = 0; at < to.size();) {
    const ssize_t n = recv(sockets.far.get(), to.data() + at, std::min(kStep, to.size() - at), 0);
    if (n <= 0) std::abort();
    at += n;
  }
  const int64_t end = NowNanoseconds();
  sender.join();
  return to.size() / double(end - start);
}

double Bulk(std::vector<std::byte>& from, std::vector<std::byte>& to, bool get) {
  Pair pair = ConnectPair();
  auto source = pair.far->Register(from.data(), from.size(), Access::kPeerReads);
  auto target = pair.near->Register(to.data(), to.size(), Access::kPeerWrites);
  Counter handler;
  Connection& active = get ? *pair.near : *pair.far;
  const int64_t start = NowNanoseconds();
  if (get) {
    pair.near->Get(**target, 0, (*source)->key(), 0, to.size(), 1);
  } else {
    pair.far->Put(**source, 0, (*target)->key(), 0, to.size(), 1);
  }
  while (handler.done == 0) active.Wait(1, handler, Deadline::Never());
  const double rate = to.size() / double(NowNanoseconds() - start);
  if (active.counters().bulk_copies != 0 || from != to) std::abort();
  return rate;
}

void PostCost(uint32_t bytes) {
  Pair pair = ConnectPair();
  std::thread reader([&] {
    Counter handler;
    while (pair.far->Wait(64, handler, Deadline::Never()) >= 0) {
    }
  });
  std::vector<double> all, bursts;
  for (int burst = 0; burst < 40; ++burst) {
    const int64_t begin = NowNanoseconds();
    for (int i = 0; i < 1000; ++i) {
      const int64_t start = NowNanoseconds();
      Post(*pair.near, bytes, kNone);
      all.push_back(NowNanoseconds() - start);
    }
    bursts.push_back((NowNanoseconds() - begin) / 1000.0);
    timespec pause = {0, 5'000'000};
    nanosleep(&pause, nullptr);
  }
  std::vector<double> clock;
  for (int i = 0; i < 1000; ++i) {
    const int64_t start = NowNanoseconds();
    clock.push_back(NowNanoseconds() - start);
  }
  pair.near->Close(0);
  reader.join();
  std::printf(
      "post %u bytes: median %.0f ns (of which clock %.0f), mean of a burst of 1000: %.0f ns\n",
      bytes, Median(all), Median(clock), Median(bursts));
}

double SmallBulk(size_t bytes) {
  Pair pair = ConnectPair();
  std::vector<std::byte> from(bytes), to(bytes);
  auto source = pair.far->Register(from.data(), bytes, Access::kPeerReads);
  auto target = pair.near->Register(to.data(), bytes, Access::kPeerWrites);
  Counter handler;
  std::vector<double> times;
  for (uint64_t i = 0; i < 2000; ++i) {
    const int64_t start = NowNanoseconds();
    pair.near->Get(**target, 0, (*source)->key(), 0, bytes, i);
    while (handler.done <= i) pair.near->Wait(1, handler, Deadline::Never());
    times.push_back(NowNanoseconds() - start);
  }
  return Median(times);
}

int Main(int argc, char** argv) {
  const uint32_t frame = argc > 1 ? std::max(8, std::atoi(argv[1])) : 64;
  const size_t bulk = (argc > 2 ? std::max(1, std::atoi(argv[2])) : 256) * (size_t{1} << 20);
  std::vector<double> raw, ours;
  for (int i = 0; i < 5; ++i) {
    raw.push_back(RawPingPong(frame));
    ours.push_back(PingPong(frame));
  }
  std::printf("round trip of %u bytes: raw %.1f us, transport %.1f us, ratio %.2f\n", frame,
              Median(raw) / 1000, Median(ours) / 1000, Median(ours) / Median(raw));
  PostCost(152);
  std::printf("get of 4 KiB: %.1f us\n", SmallBulk(4096) / 1000);
  std::vector<std::byte> from(bulk), to(bulk);
  uint64_t state = 1;
  for (size_t i = 0; i + 8 <= bulk; i += 8) {
    state = state * 6364136223846793005 + 1442695040888963407;
    std::memcpy(from.data() + i, &state, 8);
  }
  std::vector<double> raw_bulk, get, put;
  for (int i = 0; i < 5; ++i) {
    raw_bulk.push_back(RawBulk(from, to));
    get.push_back(Bulk(from, to, true));
    put.push_back(Bulk(from, to, false));
  }
  std::printf("%zu MiB: raw %.2f GB/s, Get %.2f GB/s (ratio %.2f), Put %.2f GB/s (ratio %.2f)\n",
              bulk >> 20, Median(raw_bulk), Median(get), Median(get) / Median(raw_bulk),
              Median(put), Median(put) / Median(raw_bulk));
  return 0;
}

}  // namespace
}  // namespace penstock::transport

int main(int argc, char** argv) {
  return penstock::transport::Main(argc, argv);
}
