// Accesses to memory that C++ does not choose by itself: of 16 bytes, without branches, in the background.
#pragma once

#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

// ---- 16-byte accesses ----

// 16 bytes as one access moves them. They stay 32-bit words until they are used: the compiler takes 16-bit elements
// apart as soon as they are there, and so waits for an access before it issues the next one.
struct alignas(16) [[gnu::may_alias]] Words {
  uint32_t w[4];
};

// One access each. `from` and `to` must be aligned to 16 bytes. Plain loads, not __ldg, since a gradient may overwrite
// the logits.
#if defined(__CUDACC__)
__device__ __forceinline__ Words Load16(const void* from) {
  const uint4 v = *static_cast<const uint4*>(from);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void Store16(void* to, const Words& v) {
  *static_cast<uint4*>(to) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}
#else
inline Words Load16(const void* from) { return *static_cast<const Words*>(from); }
inline void Store16(void* to, const Words& v) { *static_cast<Words*>(to) = v; }
#endif

// 16 bytes that begin at any element, cut out of the aligned words that hold them, in three accesses of 8 bytes: two of
// 16 bytes would need six choices between words more.
template <class T>
struct Window {
  // `from`: the last boundary of 8 bytes.
  __device__ __forceinline__ void Load(const void* from) {
#pragma unroll
    for (unsigned i = 0; i < (sizeof(T) == 8 ? 2 : 3); ++i) {
#if defined(__CUDACC__)
      const uint2 v = static_cast<const uint2*>(from)[i];
      w[2 * i] = v.x, w[2 * i + 1] = v.y;
#else
      memcpy(w + 2 * i, static_cast<const char*>(from) + 8 * i, 8);
#endif
    }
  }
  // `offset`: elements since any boundary of 16 bytes.
  __device__ __forceinline__ Words Get(int offset) {
    const int bytes = offset * int(sizeof(T));
    if (sizeof(T) <= 4) {
#pragma unroll
      for (unsigned i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
    }
    if (sizeof(T) <= 2) {
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) w[i] = uint32_t((uint64_t(w[i + 1]) << 32 | w[i]) >> (bytes & 2) * 8);
    }
    return {{w[0], w[1], w[2], w[3]}};
  }

 private:
  uint32_t w[6];
};

// ---- global memory ----

// p, without its history: the address of p[i] then is one multiply-add, not a sum of all offsets.
template <class T>
__device__ __forceinline__ T* Settled(T* p) {
#if defined(__CUDACC__)
  asm("" : "+l"(p));
#endif
  return p;
}

// The same for a number: it is kept in a register, not computed anew where it is used.
__device__ __forceinline__ int Settled(int x) {
#if defined(__CUDACC__)
  asm("" : "+r"(x));
#endif
  return x;
}
__device__ __forceinline__ unsigned Settled(unsigned x) { return unsigned(Settled(int(x))); }

// Stores x and y side by side, if `condition` is not zero. Unlike an if, never a branch, so the compiler
// schedules across it. Reads of the same kernel do not see it before a barrier.
__device__ __forceinline__ void StoreIf(unsigned condition, float* to, float x, float y) {
#if defined(__CUDACC__)
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3};}" ::"r"(condition), "l"(to),
               "f"(x), "f"(y));
#else
  if (condition != 0) to[0] = x, to[1] = y;
#endif
}
__device__ __forceinline__ void StoreIf(unsigned condition, double* to, double x, double y) {
#if defined(__CUDACC__)
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v2.f64 [%1], {%2, %3};}" ::"r"(condition), "l"(to),
               "d"(x), "d"(y));
#else
  if (condition != 0) to[0] = x, to[1] = y;
#endif
}

// Stores 16 bytes.
template <class V>
__device__ __forceinline__ void StoreIf(unsigned condition, V* to, const V& x) {
  static_assert(sizeof(V) == 16 && alignof(V) == 16, "one access");
#if defined(__CUDACC__)
  const Words w = reinterpret_cast<const Words&>(x);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(condition),
               "l"(to), "r"(w.w[0]), "r"(w.w[1]), "r"(w.w[2]), "r"(w.w[3]));
#else
  if (condition != 0) *to = x;
#endif
}

// ---- barriers ----

// A barrier of the block at which warps may arrive from different places in the code; the lanes of a warp may not.
__device__ __forceinline__ void SyncWarps() {
#if defined(__CUDACC__)
  asm volatile("bar.sync 0;" ::: "memory");
#else
  __syncthreads();
#endif
}

// ---- copies from global to shared memory in the background ----

// Where copies go: an address in shared memory of 32 bits, which the compiler does not derive anew for each copy.
template <class T>
class SharedAddress {
 public:
#if defined(__CUDACC__)
  __device__ __forceinline__ explicit SharedAddress(T* to) : to_(unsigned(__cvta_generic_to_shared(to))) {
    asm("" : "+r"(to_));
  }
  // The same place, seen as another type.
  template <class Other>
  __device__ __forceinline__ explicit SharedAddress(SharedAddress<Other> to) : to_(to.Get()) {}
  __device__ __forceinline__ SharedAddress operator+(int i) const {
    return SharedAddress(to_ + unsigned(i) * sizeof(T));
  }
  __device__ __forceinline__ unsigned Get() const { return to_; }

 private:
  __device__ __forceinline__ explicit SharedAddress(unsigned to) : to_(to) {}
  unsigned to_;
#else
  explicit SharedAddress(T* to) : to_(to) {}
  template <class Other>
  explicit SharedAddress(SharedAddress<Other> to) : to_(reinterpret_cast<T*>(to.Get())) {}
  SharedAddress operator+(int i) const { return SharedAddress(to_ + i); }
  T* Get() const { return to_; }

 private:
  T* to_;
#endif
};

// Stores 16 bytes in shared memory, if `condition` is not zero. As StoreIf above; reads of this thread do not see it
// before a barrier either, so they may move across.
template <class V>
__device__ __forceinline__ void StoreIf(unsigned condition, SharedAddress<V> to, const V& x) {
  static_assert(sizeof(V) == 16 && alignof(V) == 16, "one access");
#if defined(__CUDACC__)
  const Words w = reinterpret_cast<const Words&>(x);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(condition),
               "r"(to.Get()), "r"(w.w[0]), "r"(w.w[1]), "r"(w.w[2]), "r"(w.w[3]));
#else
  if (condition != 0) *to.Get() = x;
#endif
}

// 8 or 16 bytes of shared memory, in one access.
template <class V>
__device__ __forceinline__ V Load(SharedAddress<V> from) {
  static_assert(sizeof(V) == 8 || sizeof(V) == 16, "one access");
#if defined(__CUDACC__)
  Words w;
  if constexpr (sizeof(V) == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w.w[0]), "=r"(w.w[1]) : "r"(from.Get()));
    return reinterpret_cast<const V&>(w);
  }
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.w[0]), "=r"(w.w[1]), "=r"(w.w[2]), "=r"(w.w[3])
               : "r"(from.Get()));
  return reinterpret_cast<const V&>(w);
#else
  return *from.Get();
#endif
}

template <class V>
__device__ __forceinline__ void Store(SharedAddress<V> to, const V& x) {
  static_assert(sizeof(V) == 8 || sizeof(V) == 16, "one access");
#if defined(__CUDACC__)
  const uint32_t* const w = reinterpret_cast<const uint32_t*>(&x);
  if constexpr (sizeof(V) == 8) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to.Get()), "r"(w[0]), "r"(w[1]));
  } else {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to.Get()), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                 "r"(w[3]));
  }
#else
  *to.Get() = x;
#endif
}

// Starts a copy of *from. Neither place may be used before WaitForCopies. The size of T is 4, 8 or 16 bytes. No memory
// clobber: loads and stores may move across the start of a copy, not across the wait.
template <class T>
__device__ __forceinline__ void CopyAsync(SharedAddress<T> to, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "copies have 4, 8 or 16 bytes");
#if !defined(__CUDACC__)
  emulation::CopyAsync(to.Get(), from, sizeof(T));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to.Get()), "l"(from), "n"(sizeof(T)));
#else
  *static_cast<T*>(__cvta_shared_to_generic(to.Get())) = *from;
#endif
}

// The same if `condition` is not zero; never a branch.
template <class T>
__device__ __forceinline__ void CopyAsyncIf(unsigned condition, SharedAddress<T> to, const T* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p cp.async.ca.shared.global [%1], [%2], %3;}" ::"r"(condition),
               "r"(to.Get()), "l"(from), "n"(sizeof(T)));
#else
  if (condition != 0) CopyAsync(to, from);
#endif
}

// The same for n places, `to_step` and `from_step` apart, if condition(i). Where a copy is a load and a store, all
// loads come first.
template <int n, class T, class Condition>
__device__ __forceinline__ void CopyAsyncIf(const Condition& condition, SharedAddress<T> to, int to_step, const T* from,
                                            int from_step) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  T x[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (condition(i)) x[i] = from[i * from_step];
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (condition(i)) Store(to + i * to_step, x[i]);
  }
#else
#pragma unroll
  for (int i = 0; i < n; ++i) CopyAsyncIf(condition(i), to + i * to_step, from + i * from_step);
#endif
}

// Makes a group of the copies that this thread started since the last group.
__device__ __forceinline__ void CommitCopies() {
#if !defined(__CUDACC__)
  emulation::CommitCopies();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

// Waits for the groups of this thread except the last kGroups. Other threads see them after a barrier.
template <int kGroups>
__device__ __forceinline__ void WaitForCopies() {
#if !defined(__CUDACC__)
  emulation::WaitForCopies(kGroups);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace jax_rnnt::cuda
