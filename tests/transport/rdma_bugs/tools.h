// What several of these tests need: registered memory at both ends, a log that can be read, a
// fabric without chance.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "common/log.h"
#include "common/unique_fd.h"
#include "tests/transport/rdma_bugs/tap.h"
#include "tests/transport/rdma_pair.h"
#include "transport/rdma/wire.h"

namespace penstock::transport {

// Nothing by chance, and nothing by time: what is released is there at once. The connection's own
// timers are out of the way, so that only what the test does can wake anybody.
inline RdmaPairOptions Quiet(uint32_t rails = 1) {
  RdmaPairOptions options;
  options.rails = rails;
  options.fabric = rdma::fake::FabricOptions::Calm();
  options.fabric.delay_us = 0;
  options.rdma.keepalive_ms = 60'000;
  return options;
}

inline bool Readable(int descriptor, int timeout_ms) {
  pollfd entry = {descriptor, POLLIN, 0};
  return poll(&entry, 1, timeout_ms) == 1;
}

// Receives until `count` frames are there, with nothing but the promise of Arm: if it says yes,
// whatever comes makes the descriptor readable. A frame that nobody would ever be told of fails.
inline void ReceiveByEvents(Connection& at, Collector& collector, size_t count) {
  while (collector.frames.size() < count) {
    if (at.Arm()) REQUIRE(Readable(at.event_fd(), 5000));
    REQUIRE(at.Poll(64, collector) >= 0);
  }
}

// Registered memory at both ends of a pair, of the same size.
struct Area {
  Area(Connection& near, Connection& far, size_t bytes)
      : here(Noise(bytes, 1)), there(Noise(bytes, 2)) {
    auto ours = near.Register(here.data(), bytes, Access::kPeerReadsAndWrites);
    auto theirs = far.Register(there.data(), bytes, Access::kPeerReadsAndWrites);
    REQUIRE(ours);
    REQUIRE(theirs);
    local = std::move(*ours);
    remote = std::move(*theirs);
  }
  bool Same(size_t here_at, size_t there_at, size_t bytes) const {
    return std::memcmp(&here[here_at], &there[there_at], bytes) == 0;
  }
  std::vector<std::byte> here, there;
  std::unique_ptr<MemoryRegion> local, remote;
};

// The same key with one rail alone; nothing if it has none there.
inline std::optional<MemoryKey> OnlyRail(const MemoryKey& key, uint32_t rail) {
  rdma::RdmaKeyBlob blob;
  std::memcpy(&blob, key.blob.data(), sizeof blob);
  if ((blob.rails & 1u << rail) == 0) return std::nullopt;
  blob.rails = static_cast<uint8_t>(1u << rail);
  MemoryKey only = key;
  std::memcpy(only.blob.data(), &blob, sizeof blob);
  return only;
}

// Moves eight bytes by each rail and exchanges frames: afterwards all rails are up at both ends,
// what there was to say about them has been said, and nothing is under way.
inline void AwaitRails(RdmaPair& pair) {
  Area area(*pair.near, *pair.far, 64);
  Collector near;
  uint64_t moves = 0;
  for (uint32_t rail = 0; rail < rdma::kMaxRails; ++rail) {
    const auto key = OnlyRail(area.remote->key(), rail);
    if (!key) continue;
    REQUIRE(pair.near->Put(*area.local, 0, *key, 0, 8, ++moves) == Outcome::kOk);
  }
  ReceiveUntil(*pair.near, near, [&] { return near.done.size() == moves; });
  Settle(*pair.near, *pair.far);
  Settle(*pair.far, *pair.near);
  REQUIRE(pair.fabric->AwaitQuiet());
}

// While it lives, warnings and errors go here. Only while no connection lives.
class LogCapture {
 public:
  LogCapture() : file_(memfd_create("log", MFD_CLOEXEC)) {
    SetLogSpec("warning");
    SetLogDescriptor(file_.get());
  }
  ~LogCapture() {
    SetLogDescriptor(STDERR_FILENO);
    SetLogSpec(getenv("PENSTOCK_LOG"));
  }
  std::string text() const {
    std::string text(static_cast<size_t>(lseek(file_.get(), 0, SEEK_END)), '\0');
    const ssize_t got = pread(file_.get(), text.data(), text.size(), 0);
    text.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return text;
  }

 private:
  UniqueFd file_;
};

inline int64_t MillisecondsSince(int64_t start_ns) {
  return (NowNanoseconds() - start_ns) / 1'000'000;
}

}  // namespace penstock::transport
