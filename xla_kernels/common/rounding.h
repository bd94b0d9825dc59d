// Products that must be rounded as they are written.
//
// C++ lets a compiler compute x * y + z with one rounding (-ffp-contract=fast, the default of GCC and nvcc; clang's
// within an expression). Nearly everywhere that is welcome. It is wrong where the rounding itself is used: a - a of
// equal products is then the error of the product and not 0, and bits depend on which of two products is fused. Such
// places use RoundedProduct, and a multiply-add by name where one rounding is meant (Fma, MultiplyAdd). Each says why.
//
// Sums need no such function: no compiler reorders them, but for flags that no build may have.
#pragma once

// nvcc --use_fast_math has no macro: see RefuseFastMath in cuda/runtime.cuh.
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ != 0)
#error "jax_rnnt needs IEEE arithmetic: build it without -ffast-math, -Ofast, -fassociative-math, -ffinite-math-only"
#endif

#if defined(__CUDACC__)
#define JAX_RNNT_ROUNDED __host__ __device__ __forceinline__
#else
#define JAX_RNNT_ROUNDED inline
#endif

namespace jax_rnnt {

// x * y, rounded, whatever is added to it. On a CPU, an empty statement hides from the compiler that it is a product.
template <class A>
JAX_RNNT_ROUNDED A RoundedProduct(A x, A y) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(A) == 4) {
    return __fmul_rn(x, y);
  } else {
    return __dmul_rn(x, y);
  }
#else
  A product = x * y;
#if defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
#endif
}

}  // namespace jax_rnnt
