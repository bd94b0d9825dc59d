// Checks the CUDA kernels through their host entry points: small problems of every kind against double precision, stage
// by stage. Needs neither Python nor JAX. A host compiler builds it with the emulation (checks.py), nvcc for the GPU
// (benchmarks/gpu.sh). Prints the failures, "N passed, M failed", and a checksum of all results, which must not depend
// on the order of blocks and threads. --first: stops at the first failure.
//
// Every buffer has an allocation of its own of the exact size, for AddressSanitizer. Results, and inputs that must not
// be read, hold NaN.
#include <cstdio>
#include <cstring>

#include "tools/emulation/check_skip.h"
#include "tools/emulation/check_stages.h"
#include "tools/emulation/check_threads.h"
#include "xla_kernels/cuda/devices.h"

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_LATTICE_WARPS
#define JAX_RNNT_LATTICE_WARPS 16  // as in lattice.cu
#endif
#ifndef JAX_RNNT_LATTICE_NARROW
#define JAX_RNNT_LATTICE_NARROW 4
#endif

void CheckAll() {
  const auto with = [](auto change) {
    Options options;
    change(options);
    return options;
  };
  // What rnnt_loss and the documentation say: tests/test_kernel_choice.py.
  const bool right =
      MaxUnitColumns(64 << 10) == 13280 && MaxUnitColumns() == 22240 && MaxUnitColumns(227 << 10) == 55008;
  Count("most columns by shared memory", right ? "" : "not those of the documentation");
  // clang-format off: a table
  using O = Options&;
  Check<float>("float32", {});
  Check<double>("float64", {});
  Check<Half>("float16", {});
  Check<BFloat16>("bfloat16", {});
  Check<float>("monotonic", with([](O o) { o.monotonic = true; o.labels = 4; }));
  Check<double>("monotonic, float64", with([](O o) { o.monotonic = true; o.batch = 3; }));
  Check<float>("one frame", with([](O o) { o.frames = 1; o.ragged = false; }));
  Check<float>("no label", with([](O o) { o.labels = 0; }));
  Check<float>("one node", with([](O o) { o.labels = 0; o.frames = 1; o.batch = 1; }));
  Check<float>("two classes", with([](O o) { o.classes = 2; }));
  Check<float>("one class", with([](O o) { o.classes = 1; }));
  Check<float>("no frames", with([](O o) { o.num_frames = {0, 0}; o.num_labels = {0, 2}; }));
  Check<float>("an axis of no frames", with([](O o) { o.frames = 0; o.num_frames = {0, 0}; o.num_labels = {0, 2}; }));
  Check<float>("no sequence", with([](O o) { o.batch = 0; }));
  Check<float>("lengths out of range", with([](O o) { o.num_frames = {9, -3}; o.num_labels = {3, 3}; }));
  Check<float>("more labels than frames", with([](O o) { o.frames = 3; o.labels = 12; o.batch = 3; }));
  Check<float>("monotonic without a path", with([](O o) { o.monotonic = true; o.frames = 3; o.labels = 5; o.ragged = false; }));
  Check<float>("-inf logits", with([](O o) { o.fault = Fault::kMinusInfinity; }));
  Check<double>("rows of -inf", with([](O o) { o.fault = Fault::kDeadRow; o.batch = 3; o.frames = 9; }));
  Check<float>("NaN logit", with([](O o) { o.fault = Fault::kNaN; }));
  Check<BFloat16>("+inf logit", with([](O o) { o.fault = Fault::kInfinity; }));
  Check<float>("label out of range", with([](O o) { o.fault = Fault::kBadLabel; }));
  Check<float>("no path", with([](O o) { o.fault = Fault::kNoPath; }));
  Check<float>("+inf log-probability", with([](O o) { o.fault = Fault::kInfinity; o.normalize = false; }));
  Check<float>("+inf log-probability of a duration", with([](O o) { o.fault = Fault::kInfinity; o.normalize = false; o.durations = 3; }));
  Check<float>("log-probabilities", with([](O o) { o.normalize = false; o.classes = 9; }));
  Check<float>("not in place", with([](O o) { o.in_place = false; }));
  Check<double>("not in place, float64", with([](O o) { o.in_place = false; o.monotonic = true; }));
  Check<float>("three blanks", with([](O o) { o.num_blanks = 3; o.classes = 40; }));
  Check<BFloat16>("63 blanks", with([](O o) { o.num_blanks = 63; o.classes = 70; o.in_place = false; }));
  Check<float>("clamp", with([](O o) { o.clamp = 0.01; o.classes = 33; }));
  Check<Half>("clamp, float16", with([](O o) { o.clamp = 0.05; o.label_per_frame = true; }));
  Check<float>("labels per frame", with([](O o) { o.label_per_frame = true; }));
  Check<Half>("misaligned, float16", with([](O o) { o.classes = 41; o.offset = 3; }));
  Check<BFloat16>("misaligned, aligned rows", with([](O o) { o.classes = 48; o.offset = 1; o.in_place = false; }));
  Check<BFloat16>("tiny rows, whole vectors", with([](O o) { o.classes = 32; o.frames = 19; o.labels = 6; o.batch = 3; }));
  Check<float>("tiny rows, whole vectors, float32", with([](O o) { o.classes = 32; o.frames = 11; o.labels = 20; o.in_place = false; o.clamp = 0.1; }));
  Check<float>("tiny rows of three vectors", with([](O o) { o.classes = 12; o.frames = 19; o.labels = 6; }));
  Check<Half>("tiny rows of six vectors", with([](O o) { o.classes = 48; o.frames = 11; o.batch = 3; }));
  Check<double>("tiny rows, float64", with([](O o) { o.classes = 16; o.frames = 19; o.labels = 6; }));
  Check<double>("tiny rows, misaligned, float64", with([](O o) { o.classes = 15; o.frames = 19; o.offset = 1; }));
  Check<BFloat16>("tiny rows, misaligned", with([](O o) { o.classes = 29; o.frames = 19; o.labels = 6; o.offset = 5; }));
  Check<BFloat16>("tiny rows below 16 bytes", with([](O o) { o.classes = 3; o.frames = 33; o.batch = 3; o.in_place = false; }));
  Check<BFloat16>("longest tiny rows", with([](O o) { o.classes = 144; o.frames = 9; o.labels = 6; }));
  Check<BFloat16>("longest tiny rows, misaligned", with([](O o) { o.classes = 143; o.frames = 9; o.labels = 6; o.offset = 1; }));
  Check<BFloat16>("logits and gradient at other places", with([](O o) { o.classes = 29; o.in_place = false; o.gradient_offset = 3; }));
  Check<float>("logits and gradient at other places, float32", with([](O o) { o.classes = 32; o.in_place = false; o.gradient_offset = 1; }));
  Check<float>("misaligned, float32", with([](O o) { o.classes = 131; o.offset = 1; o.frames = 3; }));
  Check<double>("misaligned, float64", with([](O o) { o.classes = 67; o.offset = 1; o.frames = 3; }));
  Check<float>("large logits", with([](O o) { o.spread = 80; o.frames = 30; o.labels = 20; o.batch = 1; }));
  Check<float>("a warp per row", with([](O o) { o.classes = 300; o.frames = 4; }));
  Check<Half>("a warp per row, float16", with([](O o) { o.classes = 777; o.frames = 2; }));
  Check<float>("a block per row", with([](O o) { o.classes = 16421; o.frames = 2; o.labels = 1; }));
  Check<BFloat16>("a block per row, bfloat16", with([](O o) { o.classes = 32803; o.frames = 2; o.labels = 1; o.in_place = false; }));
  Check<float>("tiles", with([](O o) { o.frames = 40; o.labels = 69; o.classes = 3; o.batch = 3; }));
  Check<float>("tiles, flags of others before", with([](O o) { o.labels = 40; o.batch = 3; o.num_frames = {5, 5, 3}; o.num_labels = {40, 2, 31}; o.stale = true; }));
  Check<float>("tiles, many frames", with([](O o) { o.frames = 150; o.labels = 40; o.classes = 3; o.batch = 1; }));
  Check<double>("tiles, float64", with([](O o) { o.frames = 19; o.labels = 95; o.classes = 2; }));
  Check<float>("tiles, monotonic", with([](O o) { o.monotonic = true; o.frames = 90, o.labels = 64, o.classes = 3; }));
  Check<float>("durations", with([](O o) { o.durations = 5; o.batch = 3; }));
  Check<double>("durations, float64, not in place", with([](O o) { o.durations = 1; o.in_place = false; }));
  Check<BFloat16>("durations, a warp per row", with([](O o) { o.durations = 40; o.classes = 400; o.frames = 3; o.clamp = 0.02; }));
  Check<float>("durations, a block per row", with([](O o) { o.durations = 4; o.classes = 16421; o.frames = 2; o.labels = 1; o.offset = 1; }));
  Check<Half>("durations, log-probabilities", with([](O o) { o.durations = 3; o.normalize = false; o.num_blanks = 2; }));
  Check<float>("durations, NaN", with([](O o) { o.durations = 3; o.fault = Fault::kNaN; }));
  Check<float>("durations, -inf", with([](O o) { o.durations = 3; o.fault = Fault::kMinusInfinity; o.frames = 9; }));
  Check<float>("infinite scale", with([](O o) { o.scale = kInfinity; o.fault = Fault::kMinusInfinity; o.durations = 3; }));
  Check<BFloat16>("NaN scale", with([](O o) { o.scale = kNaN; o.fault = Fault::kMinusInfinity; o.clamp = 0.1; }));
  Check<Half>("infinite scale, Bernoulli blank", with([](O o) { o.scale = -kInfinity; o.fault = Fault::kMinusInfinity; o.bernoulli = true; o.classes = 300; }));
  Check<double>("durations, rows of -inf", with([](O o) { o.durations = 2; o.fault = Fault::kDeadRow; o.frames = 9; }));
  Check<float>("Bernoulli blank", with([](O o) { o.bernoulli = true; o.batch = 4; }));
  Check<double>("Bernoulli blank, float64", with([](O o) { o.bernoulli = true; o.classes = 3; o.in_place = false; }));
  Check<BFloat16>("Bernoulli blank, a warp per row", with([](O o) { o.bernoulli = true; o.classes = 300; o.frames = 3; o.clamp = 0.1; }));
  Check<float>("Bernoulli blank, a block per row", with([](O o) { o.bernoulli = true; o.classes = 16421; o.frames = 2; o.labels = 1; }));
  Check<float>("Bernoulli blank, large logits", with([](O o) { o.bernoulli = true; o.spread = 80; o.frames = 12; }));
  Check<float>("Bernoulli blank, -inf", with([](O o) { o.bernoulli = true; o.fault = Fault::kMinusInfinity; o.frames = 12; }));
  Check<Half>("Bernoulli blank, +inf", with([](O o) { o.bernoulli = true; o.fault = Fault::kInfinity; }));
  Check<float>("Bernoulli blank of +inf", with([](O o) { o.bernoulli = true; o.fault = Fault::kInfiniteBlank; }));
  Check<float>("Bernoulli blank alone", with([](O o) { o.bernoulli = true; o.classes = 1; }));
  Check<float>("Bernoulli blank alone, no row after it", with([](O o) { o.bernoulli = true; o.classes = 1; o.batch = 1; o.num_frames = {o.frames}; o.num_labels = {o.labels}; }));
  // Common offsets, improbable anchors.
  Check<float>("offset 1e3", with([](O o) { o.shift = 1e3; }));
  Check<float>("offset -1e4", with([](O o) { o.shift = -1e4; o.in_place = false; o.spread = 30; }));
  Check<float>("offset 1e4, a warp per row", with([](O o) { o.shift = 1e4; o.classes = 300; o.frames = 3; o.num_blanks = 2; }));
  Check<float>("offset 1e4, a block per row", with([](O o) { o.shift = 1e4; o.batch = 1; o.classes = 16424; o.offset = 1; o.frames = 2; o.labels = 1; }));
  Check<double>("offset 1e4, float64", with([](O o) { o.shift = 1e4; }));
  Check<Half>("offset 1e4, float16", with([](O o) { o.shift = 1e4; o.spread = 40; }));
  Check<BFloat16>("offset -1e4, bfloat16", with([](O o) { o.shift = -1e4; o.spread = 300; o.clamp = 0.1; }));
  Check<float>("offset 1e5", with([](O o) { o.shift = 1e5; o.classes = 64; o.spread = 20; }));
  Check<float>("offset 1e6, tiny rows", with([](O o) { o.shift = 1e6; o.classes = 32; o.spread = 20; }));
  Check<float>("offset -1e6", with([](O o) { o.shift = -1e6; o.classes = 129; o.spread = 20; o.frames = 3; }));
  Check<float>("offset 1e6, a warp per row", with([](O o) { o.shift = 1e6; o.classes = 300; o.frames = 3; o.spread = 20; }));
  Check<float>("offset 1e5, a block per row", with([](O o) { o.shift = 1e5; o.batch = 1; o.classes = 16424; o.frames = 2; o.labels = 1; o.spread = 20; }));
  Check<float>("offset 3e38", with([](O o) { o.shift = 3e38; o.durations = 3; }));
  Check<float>("offset -3e38, Bernoulli blank", with([](O o) { o.shift = -3e38; o.bernoulli = true; o.batch = 3; }));
  Check<double>("offset 1e308, float64", with([](O o) { o.shift = 1e308; o.in_place = false; }));
  Check<BFloat16>("offset 3e38, bfloat16", with([](O o) { o.shift = 3e38; }));
  Check<float>("offset 1e4, Bernoulli blank", with([](O o) { o.shift = 1e4; o.bernoulli = true; o.batch = 3; }));
  Check<float>("offset 1e4, durations", with([](O o) { o.shift = 1e4; o.durations = 5; o.in_place = false; }));
  Check<float>("improbable anchors", with([](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.spread = 1; }));
  Check<double>("improbable anchors, float64", with([](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.in_place = false; }));
  Check<Half>("improbable anchors, float16", with([](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.classes = 300; }));
  Check<BFloat16>("improbable anchors, bfloat16", with([](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.durations = 2; }));
  Check<float>("improbable anchors, Bernoulli blank", with([](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.bernoulli = true; }));
  Check<float>("improbable anchors, offset", with([](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.shift = 1e3; }));
  Check<float>("improbable anchors, negative offset", with([](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.shift = -50; o.num_blanks = 2; }));
  // Rows of one lane, a few, a warp: each sum is rescaled in many steps, and by lanes whose largest logits differ.
  for (const double shift : {1e3, -1e4, 1e6}) {
    for (const int classes : {6, 70, 300}) {
      const auto shifted = [&](auto change) {
        return with([&](O o) { o.shift = shift; o.classes = classes; o.frames = 4; o.labels = 2; change(o); });
      };
      Check<float>("offsets", shifted([](O) {}), true);
      Check<float>("offsets, misaligned", shifted([](O o) { o.offset = 1; o.classes += 1; }), true);
      Check<double>("offsets, float64", shifted([](O o) { o.in_place = false; }), true);
      Check<Half>("offsets, float16", shifted([](O o) { o.spread = 9; o.shift = std::min(o.shift, 2e4); }), true);
      Check<BFloat16>("offsets, bfloat16", shifted([](O o) { o.spread = 40; }), true);
      Check<float>("offsets, durations", shifted([](O o) { o.durations = 4; }));
      Check<double>("offsets, Bernoulli blank", shifted([](O o) { o.bernoulli = true; }));
      Check<float>("offsets, Bernoulli blank", shifted([](O o) { o.bernoulli = true; }), true);
      Check<float>("offsets, log-probabilities", shifted([](O o) { o.normalize = false; o.shift = -std::fabs(o.shift); }));
      Check<double>("offsets, log-probabilities, monotonic", shifted([](O o) { o.normalize = false; o.monotonic = true; }));
    }
  }
  // Neither the batch nor padding changes a bit, at any alignment of a row.
  Check<float>("alone", with([](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 37; }), true);
  Check<BFloat16>("alone, a warp per row", with([](O o) { o.labels = 6; o.batch = 4; o.classes = 301; }), true);
  Check<BFloat16>("alone, tiny rows", with([](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 29; }), true);
  Check<Half>("alone, tiny rows of whole vectors", with([](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 32; }), true);
  Check<float>("alone, durations", with([](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 33; o.durations = 4; }), true);
  // A last column that a warp of its own takes, in every part of a batch: U = 128 and 256, or 32 and 64 in small blocks.
  constexpr int kFull = 32 * JAX_RNNT_LATTICE_NARROW;
  Check<float>("last column alone", with([](O o) { o.frames = 40; o.labels = kFull; o.classes = 2; o.batch = 4; o.num_frames = {40, 33, 1, 9}; o.num_labels = {kFull, kFull, kFull, 3}; }));
  Check<float>("last column alone, few frames", with([](O o) { o.frames = 7; o.labels = kFull; o.classes = 2; }), true);
  Check<float>("last column alone, monotonic", with([](O o) { o.monotonic = true; o.frames = kFull + 30; o.labels = kFull; o.classes = 2; o.batch = 1; }));
  Check<float>("last column alone, two columns a lane", with([](O o) { o.frames = 20; o.labels = 2 * kFull; o.classes = 2; o.batch = 2; }), true);
  Check<float>("alone, tiles", with([](O o) { o.frames = 14; o.labels = 130; o.batch = 3; o.classes = 3; }), true);
  // Fewer copying warps than tiles, and more tiles than warps.
  Check<float>("copying warps with several tiles", with([](O o) { o.frames = 40; o.labels = 320; o.batch = 1; o.classes = 2; }));
  Check<double>("copying warps with several tiles, float64", with([](O o) { o.frames = 40; o.labels = 120; o.batch = 1; o.classes = 2; }));
  constexpr int kMany = 32 * JAX_RNNT_LATTICE_WARPS;
  Check<float>("warps with several tiles", with([](O o) { o.frames = 11; o.labels = kMany + 40; o.classes = 2; }));
  Check<double>("warps with several tiles, monotonic", with([](O o) { o.monotonic = true; o.frames = kMany + 60, o.labels = kMany + 33, o.classes = 2, o.batch = 1; }));
  const Table multi_blank = {{1, 0, 2, 4}, {0, 1, 0, 0}, {1, 1, 1, 1}, {0, 1, 2, 3}, {}};
  const Table durations = {{3, 1, 3, 0, 1}, {0, 0, 1, 1, 1}, {1, 1, 0, 0, 0}, {0, 1, 2, 3, 4}, {}};
  // Token and duration: every arc has two planes, and two arcs share a plane.
  const Table products = {{3, 1, 3, 0, 1}, {0, 0, 1, 1, 1}, {1, 1, 0, 0, 0}, {0, 0, 1, 1, 1}, {2, 4, 2, 3, 4}};
  CheckSkip<float>("multi-blank", multi_blank, 4, 9, 5);
  CheckSkip<double>("multi-blank, float64", multi_blank, 3, 7, 0, false);
  CheckSkip<float>("durations", durations, 4, 12, 6);
  CheckSkip<double>("durations, tiles", durations, 2, 40, 37);
  CheckSkip<float>("durations, more columns than threads", durations, 2, 6, 300, false, 0);
  CheckSkip<float>("durations, more columns than threads, one frame", durations, 2, 1, 300, false, 0);
  CheckSkip<float>("durations, every column of a block", durations, 2, 9, 255, false);
  CheckSkip<float>("products", products, 4, 12, 6);
  CheckSkip<double>("products, tiles", products, 2, 37, 40, false);
  CheckSkip<float>("multi-blank, more diagonals than a tile", multi_blank, 2, 75, 3);
  const Table nine = {{1, 2, 3, 4, 0, 1, 2, 3, 4},
                      {0, 0, 0, 0, 1, 1, 1, 1, 1},
                      {1, 1, 1, 1, 0, 1, 1, 1, 1},
                      {0, 0, 0, 0, 1, 1, 1, 1, 1},
                      {3, 4, 5, 6, 2, 3, 4, 5, 6}};
  CheckSkip<float>("nine arcs, two tiles", nine, 2, 11, 34);
  CheckSkip<double>("nine arcs, float64", nine, 2, 11, 4, false);
  const Table twelve = {{1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5},
                        {0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1},
                        {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
                        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
                        {}};
  CheckSkip<float>("twelve arcs", twelve, 2, 9, 3);
  const Table near = {{2, 1, 1, 0}, {0, 0, 0, 1}, {1, 1, 1, 1}, {0, 1, 2, 3}, {}};
  CheckSkip<float>("three arcs to the next diagonal", near, 2, 9, 5);
  // The step itself reads the furthest diagonal, of the next column: it must not lie where this diagonal is written.
  const Table one_duration = {{2, 2}, {0, 1}, {1, 1}, {0, 1}, {}};
  CheckSkip<float>("one duration", one_duration, 2, 12, 5);
  // clang-format on

  // Arcs of any size.
  const Table unit = {{1, 0}, {0, 1}, {1, 1}, {0, 1}, {}}, monotonic = {{1, 1}, {0, 1}, {1, 1}, {0, 1}, {}};
  CheckMasks<float>("unit steps", unit, 2, 6, 3);
  CheckMasks<double>("unit steps, float64", unit, 1, 4, 3);
  CheckMasks<float>("monotonic", monotonic, 1, 6, 3);
  CheckMasks<double>("monotonic, float64", monotonic, 1, 4, 2);
  CheckMasks<float>("multi-blank", multi_blank, 1, 7, 2);
  CheckMasks<float>("durations", durations, 2, 7, 2);
  CheckMasks<double>("durations, float64", durations, 1, 5, 2);
  CheckMasks<float>("products", products, 1, 7, 2);
  const auto masks = [](double first, double second, auto where) {
    Masks masks;
    masks.size[0] = first;
    masks.size[1] = second;
    masks.where = where;
    return masks;
  };
  const Masks few = masks(-1e9, 1e8, [](int p, int t, int u) { return (t + u + p) % 5 == 0 ? 0 : -1; });
  const Masks labels = masks(-1e30, 0, [](int p, int, int) { return p == 1 ? 0 : -1; });
  const Masks both = masks(-1e9, 1e8, [](int p, int t, int u) { return (t + 3 * u + p) % 4 < 2 ? (t + p) % 2 : -1; });
  CheckSkip<float>("many diagonals", unit, 1, 300, 250, true, 0);
  CheckSkip<float>("masks, tiles", unit, 2, 40, 69, true, 0, labels);
  CheckSkip<float>("masks, tiles, two sizes", unit, 2, 70, 35, false, 0.05, both);
  CheckSkip<double>("masks, tiles, monotonic", monotonic, 2, 90, 64, true, 0.05, labels);
  CheckSkip<float>("masks, warps with several tiles", unit, 1, 5, kMany + 40, true, 0, both);
  CheckSkip<float>("masks, warps with several tiles, monotonic", monotonic, 1, kMany + 10, kMany + 3, true, 0, labels);
  CheckSkip<float>("masks, multi-blank, tiles", multi_blank, 2, 40, 37, true, 0, both);
  CheckSkip<float>("masks, products, more columns than threads", products, 1, 5, 300, true, 0.05, few);
  // Arcs far from 0, with and without masks that need wide mode.
  for (const double shift : {-1e3, -1e4, -1e6, 1e3}) {
    Masks far, mixed = few, masked = labels;
    far.shift = mixed.shift = shift;
    masked.shift = std::max(shift, -5e5);  // arcs of two planes stay below 2^20, where wide mode takes them for masks
    for (const Table& table : {unit, monotonic, multi_blank, products}) {
      char text[100];
      snprintf(text, sizeof text, "arcs near %g, %zu arcs a node", shift, table.dt.size());
      CheckSkip<float>(text, table, 2, 12, 5, true, 0.05, far);
      CheckSkip<double>(text, table, 2, 12, 5, false, 0.05, far);
      CheckSkip<float>(text, table, 2, 9, 4, true, 0, mixed);
      CheckSkip<double>(text, table, 2, 9, 4, true, 0, masked);
    }
  }
  // A path through faint arcs dominates, since it also has high arcs, or since the other path is small.
  const Masks high = masks(-2.2e6, 1e5, [](int p, int t, int u) { return u == 0 && t >= 5 ? 1 - p : -1; });
  const Masks small = masks(-2.2e6, -1.9e6, [](int p, int t, int u) {
    return p == 1 || t < 3 || t > 4 ? -1 : u > 2 ? 1 : t == 3 ? 0 : -1;
  });
  const Masks limit = masks(-0x1p21, 0, [](int, int, int) { return 0; });
  const Masks lowest = masks(-3.4028234663852886e38, 0, [](int, int, int) { return 0; });
  // The sequence is so long that these arcs count as extreme: exponents would saturate.
  const Masks long_faint = masks(-2e6, 0, [](int, int, int) { return 0; });
  const Masks long_huge = masks(2e6, 0, [](int, int, int) { return 0; });
  // Mantissas double with every diagonal.
  const Masks equal = masks(-0.69314718, 0, [](int, int, int) { return 0; });
  for (const Table& table : {unit, monotonic, multi_blank}) {
    CheckSkip<float>("equal arcs", table, 1, 360, 40, false, 0, equal);
    CheckSkip<float>("a faint node alone", table, 1, 1, 0, true, 0, lowest);
    CheckSkip<float>("a node at the limit alone", table, 1, 1, 0, true, 0, limit);
    CheckSkip<double>("a node at the limit alone", table, 1, 1, 0, true, 0, limit);
    CheckSkip<float>("high arcs", table, 2, 32, 3, true, 0, high);
    CheckSkip<double>("small likelihood", table, 1, 9, 6, true, 0, small);
    CheckSkip<float>("small likelihood", table, 1, 9, 6, false, 0, small);
    CheckSkip<float>("many faint arcs", table, 1, 260, 1, true, 0, long_faint);
    CheckSkip<float>("many huge arcs", table, 1, 160, 1, true, 0, long_huge);
    const Masks faint = masks(-1e9, 0, [](int p, int t, int u) { return p == 1 && (t + u) % 3 == 0 ? 0 : -1; });
    SkipProblem<float>("faint arcs", table, 1, 30, 4, 0, faint).CheckFaint();
  }
  CheckThreads();
}

}  // namespace
}  // namespace jax_rnnt::cuda

int main(int argc, char** argv) {
  using namespace jax_rnnt::cuda;
  stop_at_first = argc > 1 && strcmp(argv[1], "--first") == 0;
  MakeContext();
  LoadKernels();  // from here on the emulation runs no kernel that this did not find
  CheckAll();
  printf("largest error: %.2f of what is allowed\n", worst);
  printf("%d passed, %d failed, checksum %016llx\n", num_passed, num_failed, static_cast<unsigned long long>(checksum));
  return num_failed != 0;
}
