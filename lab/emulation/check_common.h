// Shared by the checks of check.cc: counts, random numbers, buffers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "lab/emulation/check_device.h"

namespace jax_rnnt::cuda {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

inline int num_passed = 0, num_failed = 0;
inline uint64_t checksum = 0;
inline double worst = 0;  // largest error in units of its tolerance, 16-bit results left out
inline int64_t most_numbers = std::numeric_limits<int64_t>::max();  // of a problem; larger ones are left out

// Counts a problem as passed, or as failed if `problem` is not empty.
inline void Count(const char* name, const std::string& problem) {
  ++(problem.empty() ? num_passed : num_failed);
  if (!problem.empty()) fprintf(stderr, "FAILED: %s: %s\n", name, problem.c_str());
}

// The first problem of a check: it says most.
struct Problem {
  bool Empty() const { return text.empty(); }
  void Say(const std::string& what) {
    if (Empty()) text = what;
  }
  void Wrong(const char* what, int64_t where, double is, double should) {
    char line[200];
    snprintf(line, sizeof line, "%s [%lld] is %.9g, should be %.9g", what, static_cast<long long>(where), is, should);
    Say(line);
  }
  void Compare(const char* what, int64_t where, double is, double should, double tolerance, bool counts) {
    if ((is != is && should != should) || is == should) return;
    const double error = std::fabs(is - should);
    if (!(error <= tolerance)) return Wrong(what, where, is, should);  // NaN, infinities of different signs
    if (counts) worst = std::fmax(worst, error / tolerance);
  }
  void Succeeded(cudaError_t error) {
    if (error != cudaSuccess) Say(cudaGetErrorString(error));
  }
  std::string text;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Bits() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int Below(int n) { return int(Bits() % uint64_t(n)); }
  double Uniform(double low, double high) { return low + (high - low) * double(Bits() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// n elements of T, `offset` elements after a 16-byte boundary. Initially all bits are set: NaN. data() is for kernels.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n, int offset = 0) : n_(n), offset_(offset), memory_(size_t(n + offset) * sizeof(T)) {}
  Buffer(const Buffer& other) : Buffer(other.n_, other.offset_) {
    memcpy(static_cast<void*>(host()), other.host(), size_t(n_) * sizeof(T));
  }
  Buffer& operator=(const Buffer&) = delete;
  T* data() { return static_cast<T*>(memory_.device()) + offset_; }
  const T* data() const { return static_cast<const T*>(memory_.device()) + offset_; }
  T* host() { return static_cast<T*>(memory_.host()) + offset_; }
  const T* host() const { return static_cast<const T*>(memory_.host()) + offset_; }
  T& operator[](int64_t i) { return host()[i]; }
  const T& operator[](int64_t i) const { return host()[i]; }
  int64_t size() const { return n_; }
  bool SameBits(const Buffer& other) const {
    return n_ == other.n_ && memcmp(host(), other.host(), size_t(n_) * sizeof(T)) == 0;
  }

 private:
  int64_t n_;
  int offset_;
  Memory memory_;
};

// Adds all bits to the checksum.
template <class T>
void Sum(const Buffer<T>& buffer) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(buffer.host());
  for (size_t i = 0; i < size_t(buffer.size()) * sizeof(T); ++i) checksum = (checksum ^ bytes[i]) * 0x100000001b3;
}

}  // namespace jax_rnnt::cuda
