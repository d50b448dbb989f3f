// What every sample shares: stop with a message at the first CUDA error, and a small generator of
// repeatable input.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                             \
  do {                                                                          \
    const cudaError_t check_error = (call);                                     \
    if (check_error != cudaSuccess) {                                           \
      fprintf(stderr, "%s:%d: %s fails: %s (%d).\n", __FILE__, __LINE__, #call, \
              cudaGetErrorString(check_error), static_cast<int>(check_error));  \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

// The same numbers on every machine (Numerical Recipes' linear congruential generator).
class Repeatable {
 public:
  explicit Repeatable(uint32_t seed) : state_(seed) {}
  uint32_t Next(uint32_t below) {
    state_ = state_ * 1664525u + 1013904223u;
    return (state_ >> 8) % below;
  }

 private:
  uint32_t state_;
};
