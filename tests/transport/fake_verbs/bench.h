// Two connected bare queue pairs on the fake fabric, with a look at its notes in the end.
#pragma once

#include "tests/transport/fake_verbs/endpoint.h"
#include "tests/transport/fake_verbs/fabric.h"
#include "tests/transport/fake_verbs/host.h"
#include "tests/transport/harness.h"

namespace penstock::transport::rdma::fake {

inline const char* const kNear = "10.99.0.1";
inline const char* const kFar = "10.99.0.2";

struct Bench {
  explicit Bench(FabricOptions options = FabricOptions::Calm(), EndpointOptions near_options = {},
                 EndpointOptions far_options = {})
      : fabric(options),
        a(fabric.AddHost({{"fake0", kNear}})),
        b(fabric.AddHost({{"fake1", kFar}})),
        pair(std::make_unique<EndpointPair>(*a, kNear, *b, kFar, near_options, far_options)),
        near(*pair->near),
        far(*pair->far) {}
  // After everything has been given back properly.
  void End() {
    pair.reset();
    CHECK(fabric.violations().empty());
    CHECK(fabric.objects().empty());
  }
  Fabric fabric;
  std::shared_ptr<Host> a, b;
  std::unique_ptr<EndpointPair> pair;
  Endpoint &near, &far;
};

inline void Fill(Endpoint& end, uint64_t seed) {
  const auto noise = Noise(end.memory.size(), seed);
  std::memcpy(end.memory.data(), noise.data(), noise.size());
}

inline bool SameBytes(Endpoint& a, size_t at, Endpoint& b, size_t from, size_t n) {
  return std::memcmp(&a.at(at), &b.at(from), n) == 0;
}

}  // namespace penstock::transport::rdma::fake
