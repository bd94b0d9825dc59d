// Problems for the lattice alone: any table of arcs, unit steps included, and arcs of extreme size.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "tools/emulation/check_common.h"
#include "xla_kernels/cuda/lattice.h"

namespace jax_rnnt::cuda {

struct Table {
  std::vector<int64_t> dt, du, may_end, plane, other;  // other may be empty: none
  int64_t Other(size_t k) const { return other.empty() ? -1 : other[k]; }
};

// Arcs of extreme size; there are at most two sizes.
struct Masks {
  double size[2] = {0, 0};
  double shift = 0;                                   // of all arcs that are not masked
  std::function<int(int plane, int t, int u)> where;  // 0 or 1: masked by that size; below 0: not masked
};

// A log weight as the counts of the masks and the rest: exact if masks cancel, at any size.
struct Weight {
  int count[2] = {0, 0};
  double rest = -kInfinity;

  bool Possible() const { return rest > -kInfinity; }
  friend Weight operator*(const Weight& a, const Weight& b) {
    return {{a.count[0] + b.count[0], a.count[1] + b.count[1]}, a.rest + b.rest};
  }
};

// Padding and the label arcs of the last column hold NaN.
template <class A>
class SkipProblem {
 public:
  SkipProblem(const char* name, const Table& table, int batch, int frames, int labels, double forbidden,
              const Masks& masks)
      : name_(name), table_(table), masks_(masks), B(batch), T(frames), U1(labels + 1), num_frames_(B), num_labels_(B) {
    Random random(B * 1000 + frames);
    for (int b = 0; b < B; ++b) {
      num_frames_[b] = b == 0 ? T : int(random.Uniform(0, T + 1));
      num_labels_[b] = b == 0 ? U1 - 1 : int(random.Uniform(0, U1));
    }
    int64_t planes = 0;
    for (size_t k = 0; k < table.dt.size(); ++k) planes = std::max({planes, table.plane[k] + 1, table.Other(k) + 1});
    for (int64_t p = 0; p < planes; ++p) {
      bool labels_only = true;  // if so, the last column has none of these arcs
      for (size_t k = 0; k < table.dt.size(); ++k)
        labels_only &= (table.plane[k] != p && table.Other(k) != p) || table.du[k] > 0;
      planes_.emplace_back(B * T * U1);
      for (int b = 0; b < B; ++b) {
        for (int t = 0; t < T; ++t) {
          for (int u = 0; u < U1; ++u) {
            const bool used = t < num_frames_[b] && u + labels_only <= num_labels_[b];
            const int mask = Mask(int(p), t, u);
            planes_[p][Row(b, t, u)] = !used                              ? A(kNaN)
                                       : mask >= 0                        ? A(masks.size[mask])
                                       : random.Uniform(0, 1) < forbidden ? A(-kInfinity)
                                                                          : A(masks.shift + random.Uniform(-4, 0));
          }
        }
      }
    }
  }

  // Sequence b of another problem alone, without padding.
  SkipProblem(const SkipProblem& whole, int b)
      : SkipProblem(whole.name_, whole.table_, 1, whole.num_frames_[b], whole.num_labels_[b], 0, whole.masks_) {
    for (size_t p = 0; p < planes_.size(); ++p) {
      for (int64_t i = 0; i < T * U1; ++i) planes_[p][i] = whole.planes_[p][whole.Row(b, int(i / U1), int(i % U1))];
    }
  }

  void Check(bool in_place) {
    Run(in_place);
    for (int b = 0; b < B; ++b) CheckSequence(b);
    for (int b = 0; B > 1 && b < B && problem_.empty(); ++b) {
      if (num_frames_[b] == 0) continue;
      SkipProblem alone(*this, b);
      alone.Run(!in_place);
      bool same = alone.problem_.empty() && memcmp(&alone.loss_[0], &loss_[b], sizeof(A)) == 0;
      for (size_t p = 0; p < grads_.size(); ++p) {
        for (int64_t i = 0; i < alone.T * alone.U1; ++i) {
          const int64_t here = Row(b, int(i / alone.U1), int(i % alone.U1));
          same = same && memcmp(&alone.grads_[p][i], &grads_[p][here], sizeof(A)) == 0;
        }
      }
      if (!same) Wrong("a sequence alone", alone.loss_[0], loss_[b]);
    }
    Count(name_, problem_);
  }

  // A faint mask must give the same bits as -inf.
  void CheckFaint() {
    SkipProblem forbidden(*this);
    for (auto& plane : forbidden.planes_) {
      for (int64_t i = 0; i < plane.size(); ++i) plane[i] = plane[i] == A(masks_.size[0]) ? A(-kInfinity) : plane[i];
    }
    Run(true);
    forbidden.Run(true);
    if (!loss_.SameBits(forbidden.loss_)) Wrong("loss with a faint mask", loss_[0], forbidden.loss_[0]);
    for (size_t p = 0; p < grads_.size(); ++p) {
      if (!grads_[p].SameBits(forbidden.grads_[p])) Wrong("gradient with a faint mask", double(p), double(p));
    }
    Count(name_, problem_);
  }

 private:
  int64_t Row(int b, int t, int u) const { return (int64_t(b) * T + t) * U1 + u; }
  int Mask(int p, int t, int u) const { return masks_.where ? masks_.where(p, t, u) : -1; }

  void Wrong(const char* what, double is, double should) {
    if (!problem_.empty()) return;
    char text[200];
    snprintf(text, sizeof text, "%s is %.9g, should be %.9g", what, is, should);
    problem_ = text;
  }

  void Run(bool in_place) {
    std::vector<Buffer<A>> in(planes_), apart(planes_);
    std::vector<const void*> log_plane;
    std::vector<void*> grad_plane;
    for (size_t p = 0; p < in.size(); ++p) {
      log_plane.push_back(in[p].data());
      grad_plane.push_back((in_place ? in : apart)[p].data());
    }
    const std::vector<int64_t> other = table_.other.empty() ? std::vector<int64_t>(table_.dt.size(), -1) : table_.other;
    Buffer<A> loss_only(B);
    LatticeArgs args = {{int(table_.dt.size()), int(in.size()), table_.dt.data(), table_.du.data(),
                         table_.may_end.data(), table_.plane.data(), other.data()},
                        B,
                        T,
                        U1,
                        log_plane.data(),
                        num_frames_.data(),
                        num_labels_.data(),
                        loss_only.data(),
                        nullptr,
                        nullptr};
    Buffer<A> workspace(B * LatticeWorkspace(args, true)), other_workspace(workspace);
    args.workspace = workspace.data();
    const auto run = [&] {
      const cudaError_t error = OnDevice([&] { return Lattice(sizeof(A) == 8, args, nullptr); });
      if (error != cudaSuccess) problem_ = cudaGetErrorString(error);
    };
    run();
    args.loss = loss_.data();
    args.grad_plane = grad_plane.data();
    args.workspace = other_workspace.data();
    run();
    if (!loss_.SameBits(loss_only)) Wrong("loss without gradient", loss_only[0], loss_[0]);
    for (const auto& plane : in_place ? in : apart) grads_.emplace_back(plane);
    Sum(loss_);
    for (const auto& plane : grads_) Sum(plane);
  }

  // log(a / b).
  double Ratio(const Weight& a, const Weight& b) const {
    long double sum = (long double)a.rest - b.rest;
    for (int i = 0; i < 2; ++i) sum += (long double)(a.count[i] - b.count[i]) * A(masks_.size[i]);
    return double(sum);
  }
  void Add(Weight& sum, const Weight& term) const {
    if (!sum.Possible() || !term.Possible()) {
      if (term.Possible()) sum = term;
      return;
    }
    const double ratio = Ratio(term, sum);
    if (ratio > 0) sum = term;
    sum.rest += std::log1p(std::exp(-std::fabs(ratio)));
  }
  // Rounded like the sum of the planes.
  Weight Arc(size_t k, int b, int t, int u) const {
    Weight weight;
    A sum = 0;
    long double masked = 0;
    for (const int64_t p : {table_.plane[k], table_.Other(k)}) {
      if (p < 0) continue;
      const int mask = Mask(int(p), t, u);
      sum += planes_[p][Row(b, t, u)];
      if (mask >= 0) ++weight.count[mask], masked += A(masks_.size[mask]);
    }
    weight.rest = double(sum - masked);
    return weight;
  }

  void CheckSequence(int b) {
    const int frames = num_frames_[b], labels = num_labels_[b];
    const auto node = [&](int t, int u) { return size_t(t) * (labels + 1) + u; };
    std::vector<Weight> alpha(size_t(frames + 1) * (labels + 1)), beta(alpha);
    const auto to = [&](size_t k, int t, int u, int* to_t, int* to_u) {  // whether the arc ends at a node
      *to_t = t + int(table_.dt[k]), *to_u = u + int(table_.du[k]);
      return *to_u <= labels && (*to_t < frames || (*to_t == frames && *to_u == labels && table_.may_end[k] != 0));
    };
    int v, w;
    alpha[node(0, 0)].rest = beta[node(frames, labels)].rest = 0;
    if (frames == 0 && labels > 0) beta[node(0, 0)].rest = -kInfinity;
    const size_t num_arcs = table_.dt.size();
    for (int t = 0; t < frames; ++t) {
      for (int u = 0; u <= labels; ++u) {
        for (size_t k = 0; k < num_arcs; ++k) {
          if (to(k, t, u, &v, &w)) Add(alpha[node(v, w)], alpha[node(t, u)] * Arc(k, b, t, u));
        }
      }
    }
    for (int t = frames - 1; t >= 0; --t) {
      for (int u = labels; u >= 0; --u) {
        for (size_t k = 0; k < num_arcs; ++k) {
          if (to(k, t, u, &v, &w)) Add(beta[node(t, u)], beta[node(v, w)] * Arc(k, b, t, u));
        }
      }
    }
    const Weight z = beta[node(0, 0)];
    Weight one;
    one.rest = 0;
    double should = z.Possible() ? Ratio(one, z) : kInfinity;
    if (should > double(std::numeric_limits<A>::max())) should = kInfinity;
    // Wide mode and the sums here round logarithms of paths.
    const double rounding = 0x1p-51 * std::fabs(masks_.shift) * (frames + labels);
    const double tolerance = (sizeof(A) == 8 ? 1e-12 : 1e-5) + rounding, is = double(loss_[b]);
    if (is != should && !(std::fabs(is - should) <= tolerance * (1 + std::fabs(should)))) Wrong("loss", is, should);
    for (size_t p = 0; p < grads_.size(); ++p) {
      for (int t = 0; t < T; ++t) {
        for (int u = 0; u < U1; ++u) {
          double posterior = 0;
          for (size_t k = 0; t < frames && u <= labels && should < kInfinity && k < num_arcs; ++k) {
            if ((table_.plane[k] != int64_t(p) && table_.Other(k) != int64_t(p)) || !to(k, t, u, &v, &w)) continue;
            const Weight through = alpha[node(t, u)] * Arc(k, b, t, u) * beta[node(v, w)];
            if (through.Possible()) posterior += std::exp(Ratio(through, z));
          }
          const double is = double(grads_[p][Row(b, t, u)]);
          if (is != -posterior && !(std::fabs(is + posterior) <= tolerance)) Wrong("gradient", is, -posterior);
        }
      }
    }
  }

  const char* name_;
  const Table table_;
  const Masks masks_;
  const int64_t B, T, U1;
  Buffer<int32_t> num_frames_, num_labels_;
  std::vector<Buffer<A>> planes_, grads_;
  Buffer<A> loss_{B};
  std::string problem_;
};

template <class A>
void CheckSkip(const char* name, const Table& table, int batch, int frames, int labels, bool in_place = true,
               double forbidden = 0.1, const Masks& masks = {}) {
  SkipProblem<A>(name, table, batch, frames, labels, forbidden, masks).Check(in_place);
}

// Masks of every size on arcs of every kind, with and without another path.
template <class A>
void CheckMasks(const char* name, const Table& table, int batch, int frames, int labels) {
  const double largest = double(std::numeric_limits<A>::max());
  const auto is_label = [&table](int plane) {
    for (size_t k = 0; k < table.dt.size(); ++k) {
      if ((table.plane[k] == plane || table.Other(k) == plane) && table.du[k] > 0) return true;
    }
    return false;
  };
  const struct {
    const char* name;
    std::function<bool(int plane, int t, int u)> where;
  } patterns[] = {
      {"one arc", [=](int p, int t, int u) { return p == 1 && t == frames / 2 && u == labels / 2; }},
      {"labels of a frame", [=](int p, int t, int) { return is_label(p) && t == frames / 2; }},
      {"blanks of a frame", [=](int p, int t, int) { return !is_label(p) && t == frames / 2; }},
      {"many frames", [=](int, int t, int) { return t > frames / 4 && t < frames * 3 / 4; }},
      {"labels of a column", [=](int p, int, int u) { return is_label(p) && u == labels / 2; }},
      {"blanks of a column", [=](int p, int, int u) { return !is_label(p) && u == labels / 2; }},
      {"all labels", [=](int p, int, int) { return is_label(p); }},
      {"all arcs", [=](int, int, int) { return true; }},
  };
  for (const double size : {-1e5, -1e9, -1e15, -1e30, -largest, 1e7, 1e30}) {
    for (const auto& pattern : patterns) {
      Masks masks;
      masks.size[0] = size;
      masks.where = [&](int p, int t, int u) { return pattern.where(p, t, u) ? 0 : -1; };
      char text[100];
      snprintf(text, sizeof text, "%s, %g on %s", name, size, pattern.name);
      CheckSkip<A>(text, table, batch, frames, labels, size < 0, 0, masks);
    }
  }
}

}  // namespace jax_rnnt::cuda
