// Problems for the lattice of arcs that skip frames, any table of them.
#pragma once

#include <algorithm>
#include <vector>

#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/emulation/check_common.h"

namespace jax_rnnt::cuda {

struct Table {
  std::vector<int64_t> dt, du, may_end, plane, other;  // other: none where empty
  int64_t Other(size_t k) const { return other.empty() ? -1 : other[k]; }
};

// Padding and the label arcs of the last column hold NaN.
template <class A>
class SkipProblem {
 public:
  SkipProblem(const char* name, const Table& table, int batch, int frames, int labels, double forbidden = 0.1)
      : name_(name), table_(table), B(batch), T(frames), U1(labels + 1), num_frames_(B), num_labels_(B) {
    Random random(B * 1000 + frames);
    for (int b = 0; b < B; ++b) {
      num_frames_[b] = b == 0 ? T : int(random.Uniform(0, T + 1));
      num_labels_[b] = b == 0 ? U1 - 1 : int(random.Uniform(0, U1));
    }
    int64_t planes = 0;
    for (size_t k = 0; k < table.dt.size(); ++k) planes = std::max({planes, table.plane[k] + 1, table.Other(k) + 1});
    for (int64_t p = 0; p < planes; ++p) {
      bool labels_only = true;  // then the last column has none of these arcs
      for (size_t k = 0; k < table.dt.size(); ++k)
        labels_only &= (table.plane[k] != p && table.Other(k) != p) || table.du[k] > 0;
      planes_.emplace_back(B * T * U1);
      for (int b = 0; b < B; ++b) {
        for (int t = 0; t < T; ++t) {
          for (int u = 0; u < U1; ++u) {
            const bool used = t < num_frames_[b] && u + labels_only <= num_labels_[b];
            planes_[p][Row(b, t, u)] = !used                              ? A(kNaN)
                                       : random.Uniform(0, 1) < forbidden ? A(-kInfinity)
                                                                          : A(random.Uniform(-4, 0));
          }
        }
      }
    }
  }

  void Check(bool in_place) {
    std::vector<Buffer<A>> in(planes_), apart(planes_);
    std::vector<const void*> log_plane;
    std::vector<void*> grad_plane;
    for (size_t p = 0; p < in.size(); ++p) {
      log_plane.push_back(in[p].data());
      grad_plane.push_back((in_place ? in : apart)[p].data());
    }
    const std::vector<int64_t> other = table_.other.empty() ? std::vector<int64_t>(table_.dt.size(), -1) : table_.other;
    Buffer<A> loss(B), loss_only(B);
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
    const bool is_double = sizeof(A) == 8;
    const auto run = [&] { return OnDevice([&] { return Lattice(is_double, args, nullptr); }) == cudaSuccess; };
    bool passed = run();
    args.loss = loss.data();
    args.grad_plane = grad_plane.data();
    args.workspace = other_workspace.data();
    passed = passed && run() && loss.SameBits(loss_only);
    for (int b = 0; b < B; ++b) passed = passed && CheckSequence(b, loss[b], in_place ? in : apart);
    Count(name_, passed ? "" : "a wrong value");
  }

 private:
  int64_t Row(int b, int t, int u) const { return (int64_t(b) * T + t) * U1 + u; }

  bool CheckSequence(int b, A loss, const std::vector<Buffer<A>>& grads) const {
    const int frames = num_frames_[b], labels = num_labels_[b];
    const auto node = [&](int t, int u) { return size_t(t) * (labels + 1) + u; };
    std::vector<double> alpha(size_t(frames + 1) * (labels + 1), -kInfinity), beta(alpha);
    const auto to = [&](size_t k, int t, int u, int* to_t, int* to_u) {  // whether the arc ends at a node
      *to_t = t + int(table_.dt[k]), *to_u = u + int(table_.du[k]);
      return *to_u <= labels && (*to_t < frames || (*to_t == frames && *to_u == labels && table_.may_end[k] != 0));
    };
    int v, w;
    alpha[node(0, 0)] = beta[node(frames, labels)] = 0;
    if (frames == 0 && labels > 0) beta[node(0, 0)] = -kInfinity;
    const auto arc = [&](size_t k, int t, int u) {
      const int64_t row = Row(b, t, u), other = table_.Other(k);
      return double(planes_[table_.plane[k]][row]) + (other < 0 ? 0 : double(planes_[other][row]));
    };
    const size_t num_arcs = table_.dt.size();
    for (int t = 0; t < frames; ++t) {
      for (int u = 0; u <= labels; ++u) {
        for (size_t k = 0; k < num_arcs; ++k) {
          if (to(k, t, u, &v, &w)) alpha[node(v, w)] = LogAdd(alpha[node(v, w)], alpha[node(t, u)] + arc(k, t, u));
        }
      }
    }
    for (int t = frames - 1; t >= 0; --t) {
      for (int u = labels; u >= 0; --u) {
        for (size_t k = 0; k < num_arcs; ++k) {
          if (to(k, t, u, &v, &w)) beta[node(t, u)] = LogAdd(beta[node(t, u)], beta[node(v, w)] + arc(k, t, u));
        }
      }
    }
    const double z = beta[node(0, 0)], tolerance = sizeof(A) == 8 ? 1e-12 : 1e-5;
    bool good = -z == double(loss) || std::fabs(-z - double(loss)) <= tolerance * (1 + std::fabs(z));
    for (size_t p = 0; p < grads.size(); ++p) {
      for (int t = 0; t < T; ++t) {
        for (int u = 0; u < U1; ++u) {
          double should = 0;
          for (size_t k = 0; t < frames && u <= labels && z > -kInfinity && k < num_arcs; ++k) {
            const bool has = table_.plane[k] == int64_t(p) || table_.Other(k) == int64_t(p);
            if (has && to(k, t, u, &v, &w)) should -= std::exp(alpha[node(t, u)] + arc(k, t, u) + beta[node(v, w)] - z);
          }
          const double is = double(grads[p][Row(b, t, u)]);
          good = good && (is == should || std::fabs(is - should) <= tolerance);
        }
      }
    }
    return good;
  }

  const char* name_;
  const Table table_;
  const int64_t B, T, U1;
  Buffer<int32_t> num_frames_, num_labels_;
  std::vector<Buffer<A>> planes_;
};

template <class A>
void CheckSkip(const char* name, const Table& table, int batch, int frames, int labels, bool in_place = true) {
  SkipProblem<A>(name, table, batch, frames, labels).Check(in_place);
}

}  // namespace jax_rnnt::cuda
