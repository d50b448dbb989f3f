// Loads and stores. Addresses are made first (a register's cells plus the immediate), the whole
// access is checked at once when its lanes lie in one live range, and the three patterns that
// matter (all lanes one address, consecutive addresses, anything) are told apart. An inactive lane
// never touches memory, and its address is never looked at.
//
// Operands: a is the address; d is the first register of a load or store; of a vector access the
// others are e, g and x.
#include <type_traits>

#include "simgpu/exec/lanes.h"

namespace simgpu::exec::SIMGPU_ISA {
namespace {

template <MemoryType kType>
struct Memory;
template <>
struct Memory<MemoryType::kU8> {
  using Type = uint8_t;
  using C = uint32_t;
};
template <>
struct Memory<MemoryType::kS8> {
  using Type = int8_t;
  using C = uint32_t;
};
template <>
struct Memory<MemoryType::kB16> {
  using Type = uint16_t;
  using C = uint32_t;
};
template <>
struct Memory<MemoryType::kS16> {
  using Type = int16_t;
  using C = uint32_t;
};
template <>
struct Memory<MemoryType::kB32> {
  using Type = uint32_t;
  using C = uint32_t;
};
template <>
struct Memory<MemoryType::kB64> {
  using Type = uint64_t;
  using C = uint64_t;
};

// What the active lanes' addresses have in common.
struct Pattern {
  uint64_t low, high;  // of the first bytes
  uint32_t first;
  bool uniform, consecutive, aligned;
};
inline Pattern Examine(const uint64_t* addresses, uint32_t mask, uint64_t bytes) {
  Pattern p;
  p.first = static_cast<uint32_t>(__builtin_ctz(mask));
  uint64_t base = addresses[p.first];
  alignas(64) uint64_t t[kLanes];
  const uint64_t* use = addresses;
  if (mask != ~0u) {
    // Inactive lanes take the first address, shifted so that they do not break the pattern.
    uint64_t stride = 0;
    uint32_t rest = mask & (mask - 1);
    if (rest) {
      uint32_t second = static_cast<uint32_t>(__builtin_ctz(rest));
      stride = addresses[second] == base ? 0 : bytes;
    }
#pragma GCC ivdep
    for (uint32_t l = 0; l < kLanes; ++l)
      t[l] = (mask & kLaneBit[l]) != 0 ? addresses[l]
                                       : base + stride * (uint64_t{l} - uint64_t{p.first});
    use = t;
  }
  uint64_t origin = use[0];
  uint64_t same = 0, steps = 0;
#pragma GCC ivdep
  for (uint32_t l = 0; l < kLanes; ++l) {
    same |= use[l] ^ origin;
    steps |= use[l] ^ (origin + bytes * l);
  }
  p.uniform = same == 0;
  p.consecutive = steps == 0;
  if (p.uniform) {
    p.low = p.high = base;
    p.aligned = (base & (bytes - 1)) == 0;
  } else if (p.consecutive) {
    uint32_t last = 31u - static_cast<uint32_t>(__builtin_clz(mask));
    p.low = base;
    p.high = origin + bytes * last;
    p.aligned = (base & (bytes - 1)) == 0;
  } else {
    uint64_t low = ~uint64_t{0}, high = 0, any = 0;
    for (uint32_t l = 0; l < kLanes; ++l) {
      if (!(mask >> l & 1)) continue;
      low = addresses[l] < low ? addresses[l] : low;
      high = addresses[l] > high ? addresses[l] : high;
      any |= addresses[l];
    }
    p.low = low;
    p.high = high;
    p.aligned = (any & (bytes - 1)) == 0;
  }
  return p;
}

uint32_t FirstMisaligned(const uint64_t* addresses, uint32_t mask, uint64_t bytes) {
  for (uint32_t l = 0; l < kLanes; ++l)
    if ((mask >> l & 1) && (addresses[l] & (bytes - 1))) return l;
  return 0;
}

template <bool kAddress64>
inline void Addresses(const Context& c, const Inst& i, uint64_t* out) {
  using A = typename std::conditional<kAddress64, uint64_t, uint32_t>::type;
  const A* a = c.At<const A>(i.a);
  uint64_t offset = static_cast<uint64_t>(i.imm);
#pragma GCC ivdep
  for (uint32_t l = 0; l < kLanes; ++l)
    out[l] = kAddress64 ? uint64_t{a[l]} + offset
                        : uint64_t{static_cast<uint32_t>(a[l] + static_cast<uint32_t>(offset))};
}

// Checks the access and turns the addresses into host addresses. False after a fault.
template <MemorySpace kSpace>
inline bool Translate(Context& c, const Inst& i, uint32_t mask, uint64_t* addresses, Pattern& p,
                      uint32_t bytes, bool write) {
  if (__builtin_expect(!p.aligned, 0)) {
    uint32_t lane = FirstMisaligned(addresses, mask, bytes);
    FaultAt(c, i, Fault::kMisalignedAddress, lane, addresses[lane],
            kSpace == MemorySpace::kShared  ? "shared"
            : kSpace == MemorySpace::kLocal ? "local"
                                            : "global",
            bytes, write);
    return false;
  }
  if constexpr (kSpace == MemorySpace::kGlobal) {
    const CachedRange& r = c.ranges[i.hint()];
    if (__builtin_expect(p.low >= r.begin && p.high + bytes <= r.end && p.high < r.end &&
                             !(write && r.read_only),
                         1))
      return true;
    if (CheckGlobal(c, i, p.low, p.high + bytes, write)) return true;
    return CheckLanes(c, i, mask, addresses, bytes, write);
  } else if constexpr (kSpace == MemorySpace::kGeneric) {
    const CachedRange& r = c.ranges[i.hint()];
    if (__builtin_expect(p.low >= r.begin && p.high + bytes <= r.end && p.high < r.end &&
                             !(write && r.read_only),
                         1))
      return true;
    return CheckGeneric(c, i, mask, addresses, bytes, write);
  } else if constexpr (kSpace == MemorySpace::kShared) {
    if (__builtin_expect(p.high >= c.shared_bytes || p.high + bytes > c.shared_bytes, 0)) {
      for (uint32_t l = 0; l < kLanes; ++l)
        if ((mask >> l & 1) &&
            (addresses[l] >= c.shared_bytes || addresses[l] + bytes > c.shared_bytes)) {
          FaultAt(c, i, Fault::kIllegalAddress, l, addresses[l], "shared", bytes, write);
          break;
        }
      return false;
    }
    uint64_t base = reinterpret_cast<uint64_t>(c.shared);
    p.low += base;
    p.high += base;
#pragma GCC ivdep
    for (uint32_t l = 0; l < kLanes; ++l) addresses[l] += base;
    return true;
  } else {
    if (__builtin_expect(p.high >= c.local_stride || p.high + bytes > c.local_stride, 0)) {
      for (uint32_t l = 0; l < kLanes; ++l)
        if ((mask >> l & 1) &&
            (addresses[l] >= c.local_stride || addresses[l] + bytes > c.local_stride)) {
          FaultAt(c, i, Fault::kIllegalAddress, l, addresses[l], "local", bytes, write);
          break;
        }
      return false;
    }
    uint64_t base = reinterpret_cast<uint64_t>(c.local);
#pragma GCC ivdep
    for (uint32_t l = 0; l < kLanes; ++l) addresses[l] += base + c.local_stride * l;
    p.uniform = p.consecutive = false;
    return true;
  }
}

template <typename T, typename C>
inline C Widen(T value) {
  if constexpr (sizeof(T) == 8)
    return value;
  else
    return static_cast<C>(static_cast<int32_t>(value));  // sign or zero extends by T
}

template <int kVector>
inline uint32_t VectorOperand(const Inst& i, int k) {
  return k == 0 ? i.d : k == 1 ? i.e : k == 2 ? i.g : i.x;
}

template <MemorySpace kSpace, bool kAddress64, MemoryType kType, int kVector>
void Load(Context& c, const Inst& i, uint32_t mask) {
  using T = typename Memory<kType>::Type;
  using C = typename Memory<kType>::C;
  constexpr uint32_t kBytes = sizeof(T) * kVector;
  alignas(64) uint64_t addresses[kLanes];
  Addresses<kAddress64>(c, i, addresses);
  Pattern p = Examine(addresses, mask, kBytes);
  if (!Translate<kSpace>(c, i, mask, addresses, p, kBytes, false)) return;
  bool full = mask == c.live && mask == ~0u;
  if (p.consecutive && full) {
    const T* source = reinterpret_cast<const T*>(p.low);
    for (int k = 0; k < kVector; ++k) {
      C* d = c.At<C>(VectorOperand<kVector>(i, k));
      if constexpr (kVector == 1 && sizeof(T) == sizeof(C)) {
        memcpy(d, source, sizeof(T) * kLanes);
      } else {
#pragma GCC ivdep
        for (uint32_t l = 0; l < kLanes; ++l) d[l] = Widen<T, C>(source[l * kVector + k]);
      }
    }
  } else if (p.uniform) {
    const T* source = reinterpret_cast<const T*>(p.low);
    T value[kVector];
    for (int k = 0; k < kVector; ++k) value[k] = source[k];
    for (int k = 0; k < kVector; ++k) {
      C* d = c.At<C>(VectorOperand<kVector>(i, k));
      C cell = Widen<T, C>(value[k]);
      if (mask == c.live) {
#pragma GCC ivdep
        for (uint32_t l = 0; l < kLanes; ++l) d[l] = cell;
      } else {
        for (uint32_t m = mask; m; m &= m - 1) d[__builtin_ctz(m)] = cell;
      }
    }
  } else {
    C* d[kVector];
    for (int k = 0; k < kVector; ++k) d[k] = c.At<C>(VectorOperand<kVector>(i, k));
    if (mask == ~0u) {
      for (uint32_t l = 0; l < kLanes; ++l) {
        const T* source = reinterpret_cast<const T*>(addresses[l]);
        for (int k = 0; k < kVector; ++k) d[k][l] = Widen<T, C>(source[k]);
      }
    } else {
      for (uint32_t m = mask; m; m &= m - 1) {
        uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
        const T* source = reinterpret_cast<const T*>(addresses[l]);
        for (int k = 0; k < kVector; ++k) d[k][l] = Widen<T, C>(source[k]);
      }
    }
  }
}

template <MemorySpace kSpace, bool kAddress64, MemoryType kType, int kVector>
void Store(Context& c, const Inst& i, uint32_t mask) {
  using T = typename Memory<kType>::Type;
  using C = typename Memory<kType>::C;
  constexpr uint32_t kBytes = sizeof(T) * kVector;
  alignas(64) uint64_t addresses[kLanes];
  Addresses<kAddress64>(c, i, addresses);
  Pattern p = Examine(addresses, mask, kBytes);
  if (!Translate<kSpace>(c, i, mask, addresses, p, kBytes, true)) return;
  if (p.consecutive && mask == ~0u) {
    T* target = reinterpret_cast<T*>(p.low);
    for (int k = 0; k < kVector; ++k) {
      const C* d = c.At<const C>(VectorOperand<kVector>(i, k));
      if constexpr (kVector == 1 && sizeof(T) == sizeof(C)) {
        memcpy(target, d, sizeof(T) * kLanes);
      } else {
#pragma GCC ivdep
        for (uint32_t l = 0; l < kLanes; ++l) target[l * kVector + k] = static_cast<T>(d[l]);
      }
    }
    return;
  }
  const C* d[kVector];
  for (int k = 0; k < kVector; ++k) d[k] = c.At<const C>(VectorOperand<kVector>(i, k));
  for (uint32_t m = mask; m; m &= m - 1) {
    uint32_t l = static_cast<uint32_t>(__builtin_ctz(m));
    T* target = reinterpret_cast<T*>(addresses[l]);
    for (int k = 0; k < kVector; ++k) target[k] = static_cast<T>(d[k][l]);
  }
}

// Global and generic addresses are 64 bits wide; shared and local ones come as either.
template <MemorySpace kSpace, bool kAddress64, MemoryType kType>
Handler PickVector(bool store, int vector) {
  switch (vector) {
    case 1:
      return store ? Store<kSpace, kAddress64, kType, 1> : Load<kSpace, kAddress64, kType, 1>;
    case 2:
      return store ? Store<kSpace, kAddress64, kType, 2> : Load<kSpace, kAddress64, kType, 2>;
    case 4:
      return store ? Store<kSpace, kAddress64, kType, 4> : Load<kSpace, kAddress64, kType, 4>;
    default:
      return nullptr;
  }
}
template <MemorySpace kSpace, bool kAddress64>
Handler PickType(bool store, MemoryType type, int vector) {
  switch (type) {
    case MemoryType::kU8:
      return PickVector<kSpace, kAddress64, MemoryType::kU8>(store, vector);
    case MemoryType::kS8:
      return PickVector<kSpace, kAddress64, MemoryType::kS8>(store, vector);
    case MemoryType::kB16:
      return PickVector<kSpace, kAddress64, MemoryType::kB16>(store, vector);
    case MemoryType::kS16:
      return PickVector<kSpace, kAddress64, MemoryType::kS16>(store, vector);
    case MemoryType::kB32:
      return PickVector<kSpace, kAddress64, MemoryType::kB32>(store, vector);
    case MemoryType::kB64:
      return PickVector<kSpace, kAddress64, MemoryType::kB64>(store, vector);
  }
  return nullptr;
}
Handler Pick(bool store, MemorySpace space, bool address64, MemoryType type, int vector) {
  switch (space) {
    case MemorySpace::kGlobal:
      return address64 ? PickType<MemorySpace::kGlobal, true>(store, type, vector) : nullptr;
    case MemorySpace::kGeneric:
      return address64 ? PickType<MemorySpace::kGeneric, true>(store, type, vector) : nullptr;
    case MemorySpace::kShared:
      return address64 ? PickType<MemorySpace::kShared, true>(store, type, vector)
                       : PickType<MemorySpace::kShared, false>(store, type, vector);
    case MemorySpace::kLocal:
      return address64 ? PickType<MemorySpace::kLocal, true>(store, type, vector)
                       : PickType<MemorySpace::kLocal, false>(store, type, vector);
  }
  return nullptr;
}

template <typename C>
void Move(Context& c, const Inst& i, uint32_t mask) {
  C* d = c.At<C>(i.d);
  const C* a = c.At<const C>(i.a);
  if (mask == c.live) {
    if (d != a) memcpy(d, a, sizeof(C) * kLanes);
  } else {
    BlendCells(d, a, mask);
  }
}

}  // namespace

Handler PickLoad(MemorySpace space, bool address64, MemoryType type, int vector) {
  return Pick(false, space, address64, type, vector);
}
Handler PickStore(MemorySpace space, bool address64, MemoryType type, int vector) {
  return Pick(true, space, address64, type, vector);
}
void MovePredicate(Context& c, const Inst& i, uint32_t mask) {
  SetPredicate(c, i.d, mask, *c.At<const uint32_t>(i.a));
}
Handler PickMove(int bytes) {
  return bytes == 8 ? Move<uint64_t> : Move<uint32_t>;
}

}  // namespace simgpu::exec::SIMGPU_ISA
