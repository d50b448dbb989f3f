// Atomics. Launches run side by side, so all are real host atomics, in shared memory too (a lock
// prefix costs nothing next to the loop around it). Lanes go one after another; their order is
// free.
#include "simgpu/exec/ops_atomic.h"

#include <cstring>
#include <type_traits>

#include "simgpu/exec/context.h"
#include "simgpu/exec/float16.h"

namespace simgpu::exec {
namespace {

template <typename T>
struct BitsOf {
  using Type = T;
};
template <>
struct BitsOf<float> {
  using Type = uint32_t;
};
template <>
struct BitsOf<double> {
  using Type = uint64_t;
};
template <>
struct BitsOf<int32_t> {
  using Type = uint32_t;
};
template <>
struct BitsOf<int64_t> {
  using Type = uint64_t;
};

template <typename T, typename F>
T Update(T* target, F f) {
  using B = typename BitsOf<T>::Type;
  B* bits = reinterpret_cast<B*>(target);
  B before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    T old, fresh;
    memcpy(&old, &before, sizeof(T));
    fresh = f(old);
    B after;
    memcpy(&after, &fresh, sizeof(T));
    if (__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_RELAXED))
      return old;
  }
}

// On the device an f32 addition in global memory flushes subnormals, one in shared memory does not.
float FlushF32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
  memcpy(&x, &bits, 4);
  return x;
}
struct AddF32Flush {
  template <typename T>
  static T Do(T* p, T v, T) {
    return Update(p, [v](T old) {
      T sum = FlushF32(FlushF32(old) + FlushF32(v));
      if (sum != sum) {
        uint32_t nan = 0x7fffffffu;
        memcpy(&sum, &nan, 4);
      }
      return sum;
    });
  }
};
// One or two 16-bit floats.
template <typename F, int kHalves>
struct AddHalves {
  template <typename T>
  static T Do(T* p, T v, T) {
    return Update(p, [v](T old) {
      uint32_t result = 0;
      for (int h = 0; h < kHalves; ++h) {
        double sum = F::Value(static_cast<uint16_t>(uint32_t{old} >> (16 * h))) +
                     F::Value(static_cast<uint16_t>(uint32_t{v} >> (16 * h)));
        result |= uint32_t{F::Round(sum, 0)} << (16 * h);
      }
      return static_cast<T>(result);
    });
  }
};

struct Add {
  template <typename T>
  static T Do(T* p, T v, T) {
    if constexpr (std::is_floating_point_v<T>) {
      return Update(p, [v](T old) {
        T sum = old + v;
        if constexpr (sizeof(T) == 4) {
          if (sum != sum) {
            uint32_t nan = 0x7fffffffu;
            memcpy(&sum, &nan, 4);
          }
        }
        return sum;
      });
    } else {
      return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
    }
  }
};
struct Min {
  template <typename T>
  static T Do(T* p, T v, T) {
    return Update(p, [v](T o) { return v < o ? v : o; });
  }
};
struct Max {
  template <typename T>
  static T Do(T* p, T v, T) {
    return Update(p, [v](T o) { return v > o ? v : o; });
  }
};
struct And {
  template <typename T>
  static T Do(T* p, T v, T) {
    return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);
  }
};
struct Or {
  template <typename T>
  static T Do(T* p, T v, T) {
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
  }
};
struct Xor {
  template <typename T>
  static T Do(T* p, T v, T) {
    return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST);
  }
};
struct Exch {
  template <typename T>
  static T Do(T* p, T v, T) {
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
  }
};
struct Cas {
  template <typename T>
  static T Do(T* p, T compare, T value) {
    __atomic_compare_exchange_n(p, &compare, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return compare;
  }
};
struct Inc {
  template <typename T>
  static T Do(T* p, T v, T) {
    return Update(p, [v](T o) { return o >= v ? T(0) : T(o + 1); });
  }
};
struct Dec {
  template <typename T>
  static T Do(T* p, T v, T) {
    return Update(p, [v](T o) { return o == 0 || o > v ? v : T(o - 1); });
  }
};

template <MemorySpace kSpace, typename Op, typename T>
void Atomic(Context& c, const Inst& i, uint32_t mask) {
  using Cell = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  alignas(64) uint64_t addresses[kLanes];
  const uint64_t* a = c.At<const uint64_t>(i.a);
  for (uint32_t l = 0; l < kLanes; ++l) addresses[l] = a[l] + static_cast<uint64_t>(i.imm);
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
    if (addresses[l] % sizeof(T)) {
      FaultAt(c, i, Fault::kMisalignedAddress, l, addresses[l],
              kSpace == MemorySpace::kShared ? "shared" : "global", sizeof(T), true);
      return;
    }
  }
  if constexpr (kSpace == MemorySpace::kShared) {
    for (uint32_t m = mask; m; m &= m - 1) {
      uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
      uint64_t at = addresses[l];
      if (at >= c.shared_bytes || sizeof(T) > c.shared_bytes - at) {
        FaultAt(c, i, Fault::kIllegalAddress, l, at, "shared", sizeof(T), true);
        return;
      }
      addresses[l] = reinterpret_cast<uint64_t>(c.shared) + at;
    }
  } else if constexpr (kSpace == MemorySpace::kGlobal) {
    const CachedRange& r = c.ranges[i.hint()];
    bool near = !r.read_only;
    for (uint32_t m = mask; m && near; m &= m - 1) {
      uint64_t at = addresses[__builtin_ctz(m)];
      near = at >= r.begin && at < r.end && sizeof(T) <= r.end - at;
    }
    if (!near) {
      uint64_t first = addresses[__builtin_ctz(mask)];
      CheckGlobal(c, i, first, first + sizeof(T), true);  // remembers the range
      if (!CheckLanes(c, i, mask, addresses, sizeof(T), true)) return;
    }
  } else {
    if (!CheckGeneric(c, i, mask, addresses, sizeof(T), true)) return;
  }
  const Cell* value = c.At<const Cell>(i.b);
  const Cell* second = i.c ? c.At<const Cell>(i.c) : value;
  Cell* d = c.At<Cell>(i.d);
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
    T v, w, old;
    memcpy(&v, value + l, sizeof(T));
    memcpy(&w, second + l, sizeof(T));
    old = Op::Do(reinterpret_cast<T*>(addresses[l]), v, w);
    Cell out = 0;
    memcpy(&out, &old, sizeof(T));
    d[l] = out;
  }
}

template <MemorySpace kSpace>
Handler Pick(std::string_view op, std::string_view type) {
  bool u32 = type == "u32", s32 = type == "s32", u64 = type == "u64", s64 = type == "s64";
  bool b32 = type == "b32", b64 = type == "b64";
  if (op == "add") {
    if (u32 || s32) return Atomic<kSpace, Add, uint32_t>;
    if (u64 || s64) return Atomic<kSpace, Add, uint64_t>;
    if (type == "f32") {
      if constexpr (kSpace == MemorySpace::kShared)
        return Atomic<kSpace, Add, float>;
      else
        return Atomic<kSpace, AddF32Flush, float>;
    }
    if (type == "f16") return Atomic<kSpace, AddHalves<F16, 1>, uint16_t>;
    if (type == "f16x2") return Atomic<kSpace, AddHalves<F16, 2>, uint32_t>;
    if (type == "bf16") return Atomic<kSpace, AddHalves<Bf16, 1>, uint16_t>;
    if (type == "bf16x2") return Atomic<kSpace, AddHalves<Bf16, 2>, uint32_t>;
    if (type == "f64") return Atomic<kSpace, Add, double>;
  } else if (op == "min" || op == "max") {
    bool min = op == "min";
    if (u32) return min ? Atomic<kSpace, Min, uint32_t> : Atomic<kSpace, Max, uint32_t>;
    if (s32) return min ? Atomic<kSpace, Min, int32_t> : Atomic<kSpace, Max, int32_t>;
    if (u64) return min ? Atomic<kSpace, Min, uint64_t> : Atomic<kSpace, Max, uint64_t>;
    if (s64) return min ? Atomic<kSpace, Min, int64_t> : Atomic<kSpace, Max, int64_t>;
  } else if (op == "and" || op == "or" || op == "xor") {
    if (b32)
      return op == "and"  ? Atomic<kSpace, And, uint32_t>
             : op == "or" ? Atomic<kSpace, Or, uint32_t>
                          : Atomic<kSpace, Xor, uint32_t>;
    if (b64)
      return op == "and"  ? Atomic<kSpace, And, uint64_t>
             : op == "or" ? Atomic<kSpace, Or, uint64_t>
                          : Atomic<kSpace, Xor, uint64_t>;
  } else if (op == "exch") {
    if (b32) return Atomic<kSpace, Exch, uint32_t>;
    if (b64) return Atomic<kSpace, Exch, uint64_t>;
  } else if (op == "cas") {
    if (type == "b16") return Atomic<kSpace, Cas, uint16_t>;
    if (b32) return Atomic<kSpace, Cas, uint32_t>;
    if (b64) return Atomic<kSpace, Cas, uint64_t>;
  } else if (op == "inc" && u32) {
    return Atomic<kSpace, Inc, uint32_t>;
  } else if (op == "dec" && u32) {
    return Atomic<kSpace, Dec, uint32_t>;
  }
  return nullptr;
}

}  // namespace

Handler AtomicHandler(const AtomicRequest& request) {
  switch (request.space) {
    case MemorySpace::kGlobal:
      return Pick<MemorySpace::kGlobal>(request.operation, request.type);
    case MemorySpace::kShared:
      return Pick<MemorySpace::kShared>(request.operation, request.type);
    case MemorySpace::kGeneric:
      return Pick<MemorySpace::kGeneric>(request.operation, request.type);
    default:
      return nullptr;
  }
}

}  // namespace simgpu::exec
