// Problems for the kernels of a joint network: all three against double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "lab/emulation/check_emission.h"
#include "xla_kernels/cuda/joint.h"

namespace jax_rnnt::cuda {

struct JointOptions {
  int encoders = 2, copies = 1, frames = 9, columns = 9, units = 20, classes = 128;
  int others = 0, blanks = 1, rows = 32, slab = 3;
  Activation activation = Activation::kTanh;
  bool exact = false, normalize = true, bernoulli = false;
  double bound = kInfinity;
  DType rows_dtype = DType::kF32;
};

inline double ActivationOf(Activation kind, double x, bool derivative) {
  const double inner = 0.7978845608028654 * (x + 0.044715 * x * x * x), y = std::tanh(inner);
  const double normal = 0.5 * std::erfc(-x * 0.7071067811865476), logistic = 1 / (1 + std::exp(-x));
  switch (kind) {
    case Activation::kTanh:
      return derivative ? 1 - std::tanh(x) * std::tanh(x) : std::tanh(x);
    case Activation::kRelu:
      return derivative ? double(x > 0) : std::fmax(x, 0);
    case Activation::kSilu:
      return derivative ? logistic * (1 + x * (1 - logistic)) : x * logistic;
    case Activation::kGelu:
      return derivative ? 0.5 * (1 + y) + 0.5 * x * (1 - y * y) * 0.7978845608028654 * (1 + 0.134145 * x * x)
                        : 0.5 * x * (1 + y);
    default:
      return derivative ? normal + x * 0.3989422804014327 * std::exp(-x * x / 2) : x * normal;
  }
}

template <class T>
class JointProblem {
 public:
  JointProblem(const char* name, const JointOptions& options, uint64_t seed)
      : name_(name),
        o_(options),
        sequences_(o_.encoders * o_.copies),
        padded_((o_.units * int(sizeof(T)) + kJointBytes - 1) / kJointBytes * kJointBytes / int(sizeof(T))),
        start_(o_.others > 0 ? kJointClasses : 0),
        nodes_(int64_t(sequences_) * o_.frames * o_.columns),
        planes_(o_.others + o_.blanks + 3),
        num_frames_(sequences_),
        num_labels_(sequences_),
        label_(int64_t(sequences_) * o_.columns),
        encoder_(int64_t(o_.encoders) * o_.frames * o_.units),
        predictor_(int64_t(sequences_) * o_.columns * o_.units),
        weight_(int64_t(o_.classes) * padded_),
        bias_(o_.classes),
        result_(planes_ * nodes_),
        numbers_(planes_ * nodes_),
        bound_(sequences_),
        random_(seed) {
    for (int b = 0; b < sequences_; ++b) {
      num_frames_[b] = b == 0 ? o_.frames : random_.Below(o_.frames + 1);
      num_labels_[b] = b == 0 ? o_.columns - 1 : random_.Below(o_.columns);
      bound_[b] = float(o_.bound);
      for (int u = 0; u < o_.columns; ++u) {
        const int place = start_ + random_.Below(o_.classes - start_ - 5);
        label_[b * o_.columns + u] = u >= num_labels_[b] || (b + u) % 7 == 6 ? -1 : place;
      }
    }
    for (int b = 0; b < o_.encoders; ++b) {  // frames past those of all its sequences stay NaN
      int last = 0;
      for (int k = 0; k < o_.copies; ++k) last = std::max(last, num_frames_[b * o_.copies + k]);
      Fill(&encoder_, int64_t(b) * o_.frames * o_.units, int64_t(last) * o_.units);
    }
    for (int b = 0; b < sequences_; ++b) {
      Fill(&predictor_, int64_t(b) * o_.columns * o_.units, int64_t(num_labels_[b] + 1) * o_.units);
    }
    for (int k = 0; k < o_.classes; ++k) {
      const bool used = k < start_ ? k < o_.others : k < o_.classes - 5;
      bias_[k] = used ? float(random_.Uniform(-1, 1)) : -float(kInfinity);
      for (int h = 0; h < padded_; ++h) {
        weight_[int64_t(k) * padded_ + h] = used && h < o_.units ? Factor(random_.Uniform(-0.5, 0.5)) : T{};
      }
    }
    MakeList();
  }

  void Check() {
    CheckForward();
    WithRow([&](auto row) { CheckBackward<decltype(row)>(); });
    Count(name_, problem_.text);
  }

 private:
  // As the kernels round factors.
  T Factor(double x) const {
    if constexpr (sizeof(T) == 2) {
      return Narrow<T>(float(x));
    } else {
      return o_.exact ? float(x) : AsFloat(int32_t((uint32_t(AsInt(float(x))) + 0x1000u) & ~0x1fffu));
    }
  }
  double Epsilon() const { return sizeof(T) == 2 ? 2 * Traits<T>::kEpsilon : o_.exact ? 0x1p-20 : 0x1p-10; }

  void Fill(Buffer<float>* x, int64_t from, int64_t n) {
    for (int64_t i = from; i < from + n; ++i) {
      const double value = random_.Uniform(-1.5, 1.5);
      (*x)[i] = o_.rows_dtype == DType::kBF16  ? Widen(Narrow<BFloat16>(float(value)))
                : o_.rows_dtype == DType::kF16 ? Widen(Narrow<Half>(float(value)))
                                               : float(value);
    }
  }

  static int BitsOf(int n) {
    int bits = 0;
    while (1 << bits < n) ++bits;
    return bits;
  }

  void MakeList() {
    const int per_block = o_.rows / kJointColumns;
    const int high = (o_.frames + per_block - 1) / per_block, wide = (o_.columns + kJointColumns - 1) / kJointColumns;
    JointShape& s = shape_;
    s = {o_.encoders,  o_.copies,
         o_.frames,    o_.columns,
         o_.units,     o_.classes,
         padded_,      o_.others,
         o_.blanks,    o_.rows,
         BitsOf(high), BitsOf(o_.copies),
         BitsOf(wide), int64_t(sequences_) * high * wide,
         o_.slab,      o_.activation,
         o_.exact,     o_.normalize,
         o_.bernoulli};
    for (int b = 0; b < o_.encoders; ++b) {
      for (int f = 0; f < high; ++f) {
        for (int k = 0; k < o_.copies; ++k) {
          for (int c = 0; c < wide; ++c) {
            const int sequence = b * o_.copies + k;
            if (f * per_block >= num_frames_[sequence] || c * kJointColumns > num_labels_[sequence]) continue;
            if ((b + f + k + c) % 5 == 4) continue;  // no likely path visits it
            blocks_.push_back({sequence, f * per_block, c * kJointColumns});
            codes_.push_back(((b << s.frame_bits | f) << s.copy_bits | k) << s.column_bits | c);
          }
        }
      }
    }
    list_.reset(new Buffer<int32_t>(s.blocks));  // past the end it stays -1
    for (size_t i = 0; i < codes_.size(); ++i) (*list_)[int64_t(i)] = codes_[i];
    count_[0] = int32_t(codes_.size());
  }

  // Rows as the kernels get them.
  template <class Row>
  static void Convert(const Buffer<float>& from, Buffer<Row>* to) {
    for (int64_t i = 0; i < from.size(); ++i) {
      if constexpr (sizeof(Row) == 2) {
        (*to)[i] = Narrow<Row>(from[i]);
      } else {
        (*to)[i] = from[i];
      }
    }
  }
  // f(a row's element)
  template <class F>
  void WithRow(const F& f) {
    if (o_.rows_dtype == DType::kF32) return f(0.f);
    if (o_.rows_dtype == DType::kBF16) return f(BFloat16{});
    f(Half{});
  }
  template <class F>
  void WithInputs(const F& f) {
    WithRow([&](auto row) {
      using Row = decltype(row);
      Buffer<Row> encoder(encoder_.size()), predictor(predictor_.size());
      Convert(encoder_, &encoder);
      Convert(predictor_, &predictor);
      JointInputs inputs = {Traits<T>::kDType,  o_.rows_dtype, list_->data(),  count_.data(),   num_frames_.data(),
                            num_labels_.data(), label_.data(), encoder.data(), predictor.data()};
      f(inputs);
    });
  }

  struct Place {
    int sequence, frame, column;
  };
  bool Inside(const Place& p, int t, int u) const {
    return t < num_frames_[p.sequence] && u <= num_labels_[p.sequence];
  }
  int64_t Node(int sequence, int t, int u) const { return (int64_t(sequence) * o_.frames + t) * o_.columns + u; }
  double Sum(int sequence, int t, int u, int h) const {
    return double(encoder_[(int64_t(sequence / o_.copies) * o_.frames + t) * o_.units + h]) +
           double(predictor_[(int64_t(sequence) * o_.columns + u) * o_.units + h]);
  }
  // Logits of a node, and the sum of the sizes of their terms.
  void Logits(int sequence, int t, int u, std::vector<double>* z, double* size) const {
    std::vector<double> hidden(o_.units);
    for (int h = 0; h < o_.units; ++h) {
      hidden[h] = double(Widen(Factor(ActivationOf(o_.activation, Sum(sequence, t, u, h), false))));
    }
    *size = 1;
    z->assign(o_.classes, -kInfinity);
    for (int k = 0; k < o_.classes; ++k) {
      if (bias_[k] < -1e30f) continue;
      double sum = bias_[k], terms = std::fabs(double(bias_[k]));
      for (int h = 0; h < o_.units; ++h) {
        const double term = hidden[h] * double(Widen(weight_[int64_t(k) * padded_ + h]));
        sum += term, terms += std::fabs(term);
      }
      (*z)[k] = sum;
      *size = std::max(*size, terms);
    }
  }

  void CheckForward() {
    WithInputs([&](const JointInputs& inputs) {
      const JointForwardArgs args = {shape_, inputs, weight_.data(), bias_.data(), result_.data()};
      problem_.Succeeded(OnDevice([&] { return JointForward(args, nullptr); }));
    });
    if (!problem_.Empty()) return;
    std::vector<char> written(size_t(nodes_), 0);
    std::vector<double> z;
    for (const Place& p : blocks_) {
      for (int t = p.frame; t < p.frame + o_.rows / kJointColumns; ++t) {
        for (int u = p.column; u < p.column + kJointColumns; ++u) {
          if (!Inside(p, t, u)) continue;
          const int64_t node = Node(p.sequence, t, u);
          written[size_t(node)] = 1;
          double size, peak = -kInfinity, total = 0;
          Logits(p.sequence, t, u, &z, &size);
          const double tolerance = Epsilon() * size;
          for (int k = start_; k < o_.classes; ++k) peak = std::fmax(peak, z[k]);
          for (int k = start_; k < o_.classes; ++k) total += std::exp(z[k] - peak);
          for (int k = 0; k < o_.others; ++k) Compare("other head", k, node, z[k], tolerance);
          for (int k = 0; k < o_.blanks; ++k) Compare("kept logit", o_.others + k, node, z[start_ + k], tolerance);
          Compare("peak", planes_ - 3, node, peak, tolerance);
          const double lse =
              double(result_[(planes_ - 3) * nodes_ + node]) + std::log(double(result_[(planes_ - 2) * nodes_ + node]));
          problem_.Compare("log of the sum", node, lse, peak + std::log(total), tolerance, sizeof(T) == 4);
          const int label = label_[p.sequence * o_.columns + u];
          if (label >= 0)
            Compare("label", planes_ - 1, node, z[label], tolerance);
          else if (!std::isnan(result_[(planes_ - 1) * nodes_ + node]))
            problem_.Say("a label that is none");
        }
      }
    }
    for (int64_t i = 0; i < planes_ * nodes_; ++i) {
      if (!written[size_t(i % nodes_)] && !std::isnan(result_[i])) problem_.Wrong("other memory", i, result_[i], kNaN);
    }
    cuda::Sum(result_);
  }
  void Compare(const char* what, int plane, int64_t node, double should, double tolerance) {
    problem_.Compare(what, node, result_[plane * nodes_ + node], should, tolerance, sizeof(T) == 4);
  }

  void FillNumbers() {
    const int of_label = o_.others + Added();
    for (int64_t node = 0; node < nodes_; ++node) {
      for (int k = 0; k <= of_label; ++k) numbers_[k * nodes_ + node] = float(random_.Uniform(-1, 1));
      const int kind = random_.Below(4);  // the softmax adds nothing; base is the anchor, or a number
      numbers_[(of_label + 1) * nodes_ + node] =
          kind == 0 ? 0 : float(random_.Uniform(-1, 1) * (kind == 1 ? 0.1 : 0.02));
      numbers_[(of_label + 2) * nodes_ + node] = kind == 0 ? float(kInfinity) : kind == 1 ? -float(kInfinity) : 3;
    }
  }
  int Added() const { return o_.bernoulli ? 0 : o_.blanks; }

  template <class Row>
  void CheckBackward() {
    if (!problem_.Empty()) return;
    FillNumbers();
    const int64_t rows = int64_t(o_.slab) * o_.rows;
    Buffer<T> hidden(rows * padded_), gradient(rows * o_.classes);
    Buffer<float> of_bias(int64_t(o_.slab) * 2 * o_.classes);
    Buffer<float> bias_sum(o_.classes), predictor_sum(predictor_.size());
    Buffer<float> carry(2 * (o_.rows / kJointColumns) * o_.units);
    Buffer<Row> of_encoder(encoder_.size());
    std::vector<double> true_bias(size_t(o_.classes)), true_encoder(size_t(encoder_.size()), kNaN);
    std::vector<double> true_predictor(size_t(predictor_.size()));
    for (const Place& p : blocks_) {  // rows of no block keep their poison
      const int64_t from = (int64_t(p.sequence / o_.copies) * o_.frames + p.frame) * o_.units;
      const int frames = std::min(o_.rows / kJointColumns, o_.frames - p.frame);
      std::fill_n(true_encoder.begin() + from, int64_t(frames) * o_.units, 0.0);
    }
    const auto start = [&](Buffer<float>* x, std::vector<double>* truth) {
      for (int64_t i = 0; i < x->size(); ++i) (*truth)[size_t(i)] = (*x)[i] = float(random_.Uniform(-1, 1));
    };
    start(&bias_sum, &true_bias), start(&predictor_sum, &true_predictor);
    const int slabs = (int(blocks_.size()) + o_.slab - 1) / o_.slab;
    for (int slab = 0; slab < slabs && problem_.Empty(); ++slab) {
      Buffer<int32_t> number(1), here(1), next(1);
      Buffer<bool> more(1);
      Buffer<T> of_hidden(rows * padded_);
      number[0] = slab;
      WithInputs([&](const JointInputs& inputs) {
        const JointGradientArgs args = {shape_,          inputs,          weight_.data(), bias_.data(),
                                        numbers_.data(), bound_.data(),   number.data(),  Added(),
                                        hidden.data(),   gradient.data(), of_bias.data(), here.data()};
        problem_.Succeeded(OnDevice([&] { return JointGradient(args, nullptr); }));
      });
      if (here[0] != slab) problem_.Say("the number of the slab");
      for (int64_t row = 0; row < rows && problem_.Empty(); ++row) {
        CheckRow(size_t(slab) * o_.slab + size_t(row / o_.rows), int(row % o_.rows), row, hidden, gradient, &true_bias,
                 &true_encoder, &true_predictor, &of_hidden);
      }
      cuda::Sum(hidden), cuda::Sum(gradient);
      WithInputs([&](const JointInputs& inputs) {
        const JointSumsArgs args = {shape_,
                                    inputs,
                                    here.data(),
                                    of_hidden.data(),
                                    of_bias.data(),
                                    of_encoder.data(),
                                    predictor_sum.data(),
                                    bias_sum.data(),
                                    carry.data(),
                                    next.data(),
                                    more.data()};
        problem_.Succeeded(OnDevice([&] { return JointSums(args, nullptr); }));
      });
      if (next[0] != slab + 1 || more[0] != (slab + 1 < slabs)) problem_.Say("the next slab");
    }
    const auto compare = [&](const char* what, const auto& x, const std::vector<double>& truth, double e) {
      for (int64_t i = 0; i < x.size(); ++i) {
        problem_.Compare(what, i, double(Widen(x[i])), truth[size_t(i)], e, sizeof(T) == 4);
      }
      cuda::Sum(x);
    };
    compare("gradient of the bias", bias_sum, true_bias, 30 * Epsilon());
    compare("gradient of the encoder", of_encoder, true_encoder,
            2e-5 + (sizeof(Row) == 2 ? 4 * Traits<Row>::kEpsilon : 0));
    compare("gradient of the predictor", predictor_sum, true_predictor, 2e-5);
  }

  // A row of a slab; adds to the true sums, and fills the gradient of its hidden units.
  void CheckRow(size_t block, int row, int64_t place, const Buffer<T>& hidden, const Buffer<T>& gradient,
                std::vector<double>* true_bias, std::vector<double>* true_encoder, std::vector<double>* true_predictor,
                Buffer<T>* of_hidden) {
    const T* const is = gradient.host() + place * o_.classes;
    const auto is_hidden = [&](int h) { return double(Widen(hidden[place * padded_ + h])); };
    const Place p = block < blocks_.size() ? blocks_[block] : Place{};
    const int t = p.frame + row / kJointColumns, u = p.column + row % kJointColumns;
    if (block >= blocks_.size() || !Inside(p, t, u)) {
      for (int k = 0; k < o_.classes; ++k) {
        if (double(Widen(is[k])) != 0) problem_.Wrong("gradient outside", k, double(Widen(is[k])), 0);
      }
      for (int h = 0; h < padded_; ++h) {
        if (!std::isfinite(is_hidden(h))) problem_.Wrong("hidden unit outside", h, is_hidden(h), 0);
        (*of_hidden)[place * padded_ + h] = T{};
      }
      return;
    }
    const int64_t node = Node(p.sequence, t, u);
    const auto number = [&](int k) { return double(numbers_[k * nodes_ + node]); };
    const int of_label = o_.others + Added(), label = label_[p.sequence * o_.columns + u];
    std::vector<double> z, g(size_t(o_.classes), 0.0);
    double size;
    Logits(p.sequence, t, u, &z, &size);
    double peak = -kInfinity, total = 0, of_others = 0;
    for (int k = 0; k < o_.others; ++k) peak = std::fmax(peak, z[k]), of_others += number(k);
    for (int k = 0; k < o_.others; ++k) total += std::exp(z[k] - peak);
    const double base = number(of_label + 2) == -kInfinity ? z[start_] : number(of_label + 2);
    for (int k = 0; k < o_.classes; ++k) {
      double& x = g[size_t(k)];
      if (k < o_.others && o_.bernoulli) {
        x = number(0) / (1 + std::exp(z[0])) - number(of_label) / (1 + std::exp(-z[0]));
      } else if (k < o_.others) {
        x = number(k) - (o_.normalize ? std::exp(z[k] - peak) / total * of_others : 0);
      } else if (k >= start_) {
        x = std::exp(z[k] - base) * number(of_label + 1);
        if (k < start_ + Added()) x += number(o_.others + k - start_);
        if (k == label) x += number(of_label);
      }
      const double error = (Epsilon() * size + 2 * Traits<T>::kEpsilon) * (1 + std::fabs(x));
      x = std::fmin(std::fmax(x, -o_.bound), o_.bound);
      problem_.Compare("gradient", place * o_.classes + k, double(Widen(is[k])), x, error, sizeof(T) == 4);
      (*true_bias)[size_t(k)] += x;
    }
    for (int h = 0; h < padded_; ++h) {
      const double x = h < o_.units ? Sum(p.sequence, t, u, h) : 0;
      const double value = ActivationOf(o_.activation, x, false);
      problem_.Compare("hidden unit", place * padded_ + h, is_hidden(h), value,
                       (Epsilon() + 1e-6) * (1 + std::fabs(value)), sizeof(T) == 4);
      T& into = (*of_hidden)[place * padded_ + h];
      into = Narrow<T>(float(random_.Uniform(-1, 1)));
      if (h >= o_.units) continue;
      const double dx = double(Widen(into)) * ActivationOf(o_.activation, x, true);
      (*true_encoder)[size_t((int64_t(p.sequence / o_.copies) * o_.frames + t) * o_.units + h)] += dx;
      (*true_predictor)[size_t((int64_t(p.sequence) * o_.columns + u) * o_.units + h)] += dx;
    }
  }

  const char* name_;
  JointOptions o_;
  int sequences_, padded_, start_;
  int64_t nodes_;
  int planes_;
  Buffer<int32_t> num_frames_, num_labels_, label_;
  Buffer<float> encoder_, predictor_;
  Buffer<T> weight_;
  Buffer<float> bias_, result_, numbers_, bound_;
  Random random_;
  JointShape shape_;
  std::vector<Place> blocks_;
  std::vector<int32_t> codes_;
  std::unique_ptr<Buffer<int32_t>> list_;
  Buffer<int32_t> count_{1};
  Problem problem_;
};

template <class T, class Change>
void CheckJoint(const char* name, const Change& change) {
  JointOptions options;
  change(options);
  if (int64_t(options.encoders) * options.copies * options.frames * options.columns * options.classes > most_numbers)
    return;
  static uint64_t seed = 0;
  JointProblem<T>(name, options, ++seed).Check();
}

}  // namespace jax_rnnt::cuda
