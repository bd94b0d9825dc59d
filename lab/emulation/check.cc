// Checks the CUDA kernels through their host entry points: small problems of every kind against double precision, stage
// by stage. Needs neither Python nor JAX. A host compiler builds it with the emulation (checks.py), nvcc for the GPU
// (lab/benchmarks/gpu.sh). Prints the failures, "N passed, M failed", and a checksum of all results, which must not
// depend on the order of blocks and threads.
//
// Every buffer has an allocation of its own of the exact size, for AddressSanitizer. Results, and inputs that must not
// be read, hold NaN.
#include <cstdio>

#include "lab/emulation/check_emission.h"
#include "lab/emulation/check_joint.h"
#include "lab/emulation/check_lattice.h"
#include "xla_kernels/cuda/devices.h"

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_LATTICE_WARPS
#define JAX_RNNT_LATTICE_WARPS 16  // as in lattice_stages.cuh
#endif
#ifndef JAX_RNNT_LATTICE_NARROW
#define JAX_RNNT_LATTICE_NARROW 4
#endif

// clang-format off: tables
void CheckEmissions() {
  using O = Options&;
  Check<float>("float32", [](O) {});
  Check<double>("float64", [](O) {});
  Check<Half>("float16", [](O) {});
  Check<BFloat16>("bfloat16", [](O) {});
  Check<float>("two classes", [](O o) { o.classes = 2; });
  Check<float>("one class, rows of -inf", [](O o) { o.classes = 1; o.fault = Fault::kDeadRow; o.frames = 9; });
  Check<float>("one node", [](O o) { o.labels = 0; o.frames = 1; o.batch = 1; });
  Check<float>("an axis of no frames", [](O o) { o.frames = 0; });
  Check<float>("no sequence", [](O o) { o.batch = 0; });
  Check<float>("-inf logits", [](O o) { o.fault = Fault::kMinusInfinity; });
  Check<double>("rows of -inf", [](O o) { o.fault = Fault::kDeadRow; o.batch = 3; o.frames = 9; });
  Check<float>("NaN logit", [](O o) { o.fault = Fault::kNaN; });
  Check<BFloat16>("+inf logit", [](O o) { o.fault = Fault::kInfinity; });
  Check<float>("label out of range", [](O o) { o.fault = Fault::kBadLabel; });
  Check<float>("+inf log-probability", [](O o) { o.fault = Fault::kInfinity; o.normalize = false; });
  Check<float>("+inf log-probability of a duration", [](O o) { o.fault = Fault::kInfinity; o.normalize = false; o.durations = 3; });
  Check<float>("log-probabilities", [](O o) { o.normalize = false; o.classes = 9; });
  Check<float>("not in place", [](O o) { o.in_place = false; });
  Check<float>("three blanks", [](O o) { o.num_blanks = 3; o.classes = 40; });
  Check<BFloat16>("63 blanks", [](O o) { o.num_blanks = 63; o.classes = 70; o.in_place = false; });
  Check<float>("clamp", [](O o) { o.clamp = 0.01; o.classes = 33; });
  Check<Half>("clamp, float16", [](O o) { o.clamp = 0.05; o.label_per_frame = true; });
  Check<float>("labels per frame", [](O o) { o.label_per_frame = true; });
  Check<Half>("misaligned, float16", [](O o) { o.classes = 41; o.offset = 3; });
  Check<BFloat16>("misaligned, aligned rows", [](O o) { o.classes = 48; o.offset = 1; o.in_place = false; });
  Check<BFloat16>("tiny rows, whole vectors", [](O o) { o.classes = 32; o.frames = 19; o.labels = 6; o.batch = 3; });
  Check<float>("tiny rows, whole vectors, float32", [](O o) { o.classes = 32; o.frames = 11; o.labels = 20; o.in_place = false; o.clamp = 0.1; });
  Check<float>("tiny rows of three vectors", [](O o) { o.classes = 12; o.frames = 19; o.labels = 6; });
  Check<Half>("tiny rows of six vectors", [](O o) { o.classes = 48; o.frames = 11; o.batch = 3; });
  Check<double>("tiny rows, float64", [](O o) { o.classes = 16; o.frames = 19; o.labels = 6; });
  Check<double>("tiny rows, misaligned, float64", [](O o) { o.classes = 15; o.frames = 19; o.offset = 1; });
  Check<BFloat16>("tiny rows, misaligned", [](O o) { o.classes = 29; o.frames = 19; o.labels = 6; o.offset = 5; });
  Check<BFloat16>("tiny rows below 16 bytes", [](O o) { o.classes = 3; o.frames = 33; o.batch = 3; o.in_place = false; });
  Check<BFloat16>("longest tiny rows", [](O o) { o.classes = 144; o.frames = 9; o.labels = 6; });
  Check<BFloat16>("longest tiny rows, misaligned", [](O o) { o.classes = 143; o.frames = 9; o.labels = 6; o.offset = 1; });
  Check<BFloat16>("logits and gradient at other places", [](O o) { o.classes = 29; o.in_place = false; o.gradient_offset = 3; });
  Check<float>("logits and gradient at other places, float32", [](O o) { o.classes = 32; o.in_place = false; o.gradient_offset = 1; });
  Check<float>("misaligned, float32", [](O o) { o.classes = 131; o.offset = 1; o.frames = 3; });
  Check<double>("misaligned, float64", [](O o) { o.classes = 67; o.offset = 1; o.frames = 3; });
  Check<float>("large logits", [](O o) { o.spread = 80; o.frames = 30; o.labels = 20; o.batch = 1; });
  Check<float>("a warp per row", [](O o) { o.classes = 300; o.frames = 4; });
  Check<Half>("a warp per row, float16", [](O o) { o.classes = 777; o.frames = 2; });
  Check<float>("a block per row", [](O o) { o.classes = 16421; o.frames = 2; o.labels = 1; });
  Check<BFloat16>("a block per row, bfloat16", [](O o) { o.classes = 32803; o.frames = 2; o.labels = 1; o.in_place = false; });
  Check<float>("durations", [](O o) { o.durations = 5; o.batch = 3; });
  Check<double>("durations, float64, not in place", [](O o) { o.durations = 1; o.in_place = false; });
  Check<BFloat16>("durations, a warp per row", [](O o) { o.durations = 40; o.classes = 400; o.frames = 3; o.clamp = 0.02; });
  Check<float>("durations, a block per row", [](O o) { o.durations = 4; o.classes = 16421; o.frames = 2; o.labels = 1; o.offset = 1; });
  Check<Half>("durations, log-probabilities", [](O o) { o.durations = 3; o.normalize = false; o.num_blanks = 2; });
  Check<float>("durations, NaN", [](O o) { o.durations = 3; o.fault = Fault::kNaN; });
  Check<float>("durations, -inf", [](O o) { o.durations = 3; o.fault = Fault::kMinusInfinity; o.frames = 9; });
  Check<float>("total", [](O o) { o.total = true; });
  Check<double>("total, float64, rows of -inf, misaligned", [](O o) { o.total = true; o.fault = Fault::kDeadRow; o.frames = 9; o.offset = 1; });
  Check<BFloat16>("total, durations, a warp per row", [](O o) { o.total = true; o.durations = 3; o.num_blanks = 2; o.classes = 400; o.frames = 3; o.clamp = 0.02; });
  Check<Half>("total, durations, log-probabilities", [](O o) { o.total = true; o.durations = 3; o.normalize = false; });
  Check<float>("total, improbable anchors", [](O o) { o.total = true; o.fault = Fault::kFarAnchor; o.frames = 12; o.durations = 2; });
  Check<float>("infinite scale", [](O o) { o.scale = kInfinity; o.fault = Fault::kMinusInfinity; o.durations = 3; });
  Check<BFloat16>("NaN scale", [](O o) { o.scale = kNaN; o.fault = Fault::kMinusInfinity; o.clamp = 0.1; });
  Check<Half>("infinite scale, Bernoulli blank", [](O o) { o.scale = -kInfinity; o.fault = Fault::kMinusInfinity; o.bernoulli = true; o.classes = 300; });
  Check<double>("durations, rows of -inf", [](O o) { o.durations = 1; o.fault = Fault::kDeadRow; o.frames = 9; });
  Check<float>("Bernoulli blank", [](O o) { o.bernoulli = true; o.batch = 4; });
  Check<double>("Bernoulli blank, float64", [](O o) { o.bernoulli = true; o.classes = 3; o.in_place = false; });
  Check<BFloat16>("Bernoulli blank, a warp per row", [](O o) { o.bernoulli = true; o.classes = 300; o.frames = 3; o.clamp = 0.1; });
  Check<float>("Bernoulli blank, a block per row", [](O o) { o.bernoulli = true; o.classes = 16421; o.frames = 2; o.labels = 1; });
  Check<float>("Bernoulli blank, large logits", [](O o) { o.bernoulli = true; o.spread = 80; o.frames = 12; });
  Check<float>("Bernoulli blank, -inf", [](O o) { o.bernoulli = true; o.fault = Fault::kMinusInfinity; o.frames = 12; });
  Check<Half>("Bernoulli blank, +inf", [](O o) { o.bernoulli = true; o.fault = Fault::kInfinity; });
  Check<float>("Bernoulli blank of +inf", [](O o) { o.bernoulli = true; o.fault = Fault::kInfiniteBlank; });
  Check<float>("Bernoulli blank alone, rows of -inf", [](O o) { o.bernoulli = true; o.classes = 1; o.fault = Fault::kDeadRow; o.frames = 9; });
  Check<float>("Bernoulli blank alone, no row after it", [](O o) { o.bernoulli = true; o.classes = 1; o.batch = 1; });
  // Common offsets, improbable anchors.
  Check<float>("offset 1e4, a block per row", [](O o) { o.shift = 1e4; o.batch = 1; o.classes = 16424; o.offset = 1; o.frames = 2; o.labels = 1; });
  Check<BFloat16>("offset -1e4, bfloat16", [](O o) { o.shift = -1e4; o.spread = 300; o.clamp = 0.1; });
  Check<float>("offset 1e6, tiny rows", [](O o) { o.shift = 1e6; o.classes = 32; o.spread = 20; });
  Check<float>("offset 3e38", [](O o) { o.shift = 3e38; o.durations = 3; });
  Check<float>("offset -3e38, Bernoulli blank", [](O o) { o.shift = -3e38; o.bernoulli = true; o.batch = 3; });
  Check<double>("offset 1e308, float64", [](O o) { o.shift = 1e308; o.in_place = false; });
  Check<BFloat16>("offset 3e38, bfloat16", [](O o) { o.shift = 3e38; });
  Check<float>("improbable anchors", [](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.spread = 1; });
  Check<double>("improbable anchors, float64", [](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.in_place = false; });
  Check<Half>("improbable anchors, float16", [](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.classes = 300; });
  Check<BFloat16>("improbable anchors, bfloat16", [](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.durations = 2; });
  Check<float>("improbable anchors, Bernoulli blank", [](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.bernoulli = true; });
  Check<float>("improbable anchors, offset", [](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.shift = 1e3; });
  Check<float>("improbable anchors, negative offset", [](O o) { o.fault = Fault::kFarAnchor; o.frames = 12; o.shift = -50; o.num_blanks = 2; });
  // Rows of one lane, a few, a warp: each sum is rescaled in many steps, and by lanes whose largest logits differ.
  for (const double shift : {1e3, -1e4, 1e6}) {
    for (const int classes : {6, 70, 300}) {
      const auto shifted = [&](auto change) {
        return [=](O o) { o.shift = shift; o.classes = classes; o.frames = 4; o.labels = 2; change(o); };
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
    }
  }
  // Neither the batch nor padding changes a bit, at any alignment of a row.
  Check<float>("alone", [](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 37; }, true);
  Check<BFloat16>("alone, a warp per row", [](O o) { o.labels = 6; o.batch = 4; o.classes = 301; }, true);
  Check<BFloat16>("alone, tiny rows", [](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 29; }, true);
  Check<Half>("alone, tiny rows of whole vectors", [](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 32; }, true);
  Check<float>("alone, durations", [](O o) { o.frames = 9; o.labels = 6; o.batch = 4; o.classes = 33; o.durations = 4; }, true);
}

const Table kUnit = {{1, 0, 1, 0}, {0, 1, 1, 1}}, kMonotonic = {{1, 0, 1, 0}, {1, 1, 1, 1}};
const Table kMultiBlank = {{1, 0, 1, 0}, {0, 1, 1, 1}, {2, 0, 1, 2}, {4, 0, 1, 3}};
const Table kDurations = {{3, 0, 1, 0}, {1, 0, 1, 1}, {3, 1, 0, 2}, {0, 1, 0, 3}, {1, 1, 0, 4}};
// Token and duration: every arc has two planes, and two arcs share a plane.
const Table kProducts = {{3, 0, 1, 0, 2}, {1, 0, 1, 0, 4}, {3, 1, 0, 1, 2}, {0, 1, 0, 1, 3}, {1, 1, 0, 1, 4}};

constexpr int kFull = 32 * JAX_RNNT_LATTICE_NARROW, kMany = 32 * JAX_RNNT_LATTICE_WARPS;

// Batch, frames, labels, in place, share of arcs of -inf, masks, lengths.
void CheckUnitSteps() {
  // What rnnt_loss and the documentation say: tests/kernels/test_kernel_choice.py.
  const bool right = MaxUnitColumns(64 << 10) == 13280 && MaxUnitColumns() == 22240 && MaxUnitColumns(227 << 10) == 55008;
  Count("most columns by shared memory", right ? "" : "not those of the documentation");
  for (const Table& table : {kUnit, kMonotonic}) {
    CheckLattice<float>("unit steps", table, {2, 5, 3});
    CheckLattice<double>("unit steps, float64", table, {3, 9, 4, false});
    CheckLattice<float>("no label", table, {2, 5, 0, true, 0});
    CheckLattice<float>("one node", table, {1, 1, 0, true, 0});
    CheckLattice<float>("one frame", table, {2, 1, 3, true, 0});
    CheckLattice<float>("no frames", table, {2, 5, 3, true, 0, {}, {0, 0}, {0, 2}});
    CheckLattice<float>("an axis of no frames", table, {2, 0, 3, true, 0, {}, {0, 0}, {0, 2}});
    CheckLattice<float>("no sequence", table, {0, 5, 3});
    CheckLattice<float>("lengths out of range", table, {2, 5, 3, true, 0, {}, {9, -3}, {5, 3}});
    CheckLattice<float>("more labels than frames", table, {3, 3, 12, true, 0});
    CheckLattice<float>("no path", table, {2, 5, 3, true, 1});
    CheckLattice<float>("+inf arc", table, {2, 5, 3, true, 0, {}, {}, {}, kInfinity});
    CheckLattice<double>("NaN arc", table, {2, 5, 3, false, 0, {}, {}, {}, kNaN});
    CheckLattice<float>("tiles", table, {3, 90, 69, true, 0.05});
    CheckLattice<double>("tiles, float64", table, {2, 119, 95, true, 0});
    // A last column that a warp of its own takes, in every part of a batch: U = 128 and 256, or 32 and 64 in small blocks.
    CheckLattice<float>("last column alone", table, {4, kFull + 30, kFull, true, 0, {}, {kFull + 30, kFull + 1, 1, 9}, {kFull, kFull, kFull, 3}});
    CheckLattice<float>("last column alone, few frames", table, {2, 7, kFull, false, 0});
    CheckLattice<float>("last column alone, two columns a lane", table, {2, 20, 2 * kFull, true, 0});
  }
  CheckLattice<float>("flags of others before", kUnit, {3, 5, 40, true, 0, {}, {5, 5, 3}, {40, 2, 31}, 0, true});
  CheckLattice<float>("tiles, many frames", kUnit, {1, 150, 40, true, 0});
  CheckLattice<float>("many diagonals", kUnit, {1, 300, 250, true, 0});
  // Fewer copying warps than tiles, and more tiles than warps.
  CheckLattice<float>("copying warps with several tiles", kUnit, {1, 40, 320, true, 0});
  CheckLattice<double>("copying warps with several tiles, float64", kUnit, {1, 40, 120, true, 0});
  CheckLattice<float>("warps with several tiles", kUnit, {2, 11, kMany + 40, true, 0});
  CheckLattice<double>("warps with several tiles, monotonic", kMonotonic, {1, kMany + 60, kMany + 33, true, 0});
}

void CheckSkips() {
  CheckLattice<float>("multi-blank", kMultiBlank, {4, 9, 5});
  CheckLattice<double>("multi-blank, float64", kMultiBlank, {3, 7, 0, false});
  CheckLattice<float>("multi-blank, more diagonals than a tile", kMultiBlank, {2, 75, 3});
  CheckLattice<float>("durations", kDurations, {4, 12, 6});
  CheckLattice<double>("durations, tiles", kDurations, {2, 40, 37});
  CheckLattice<float>("durations, more columns than threads", kDurations, {2, 6, 300, false, 0});
  CheckLattice<float>("durations, more columns than threads, one frame", kDurations, {2, 1, 300, false, 0});
  CheckLattice<float>("durations, every column of a block", kDurations, {2, 9, 255, false});
  CheckLattice<float>("durations, NaN arc", kDurations, {2, 9, 5, true, 0, {}, {}, {}, kNaN});
  CheckLattice<float>("products", kProducts, {4, 12, 6});
  CheckLattice<double>("products, tiles", kProducts, {2, 37, 40, false});
  const Table nine = {{1, 0, 1, 0, 3}, {2, 0, 1, 0, 4}, {3, 0, 1, 0, 5}, {4, 0, 1, 0, 6}, {0, 1, 0, 1, 2},
                      {1, 1, 1, 1, 3}, {2, 1, 1, 1, 4}, {3, 1, 1, 1, 5}, {4, 1, 1, 1, 6}};
  CheckLattice<float>("nine arcs, two tiles", nine, {2, 11, 34});
  CheckLattice<double>("nine arcs, float64", nine, {2, 11, 4, false});
  const Table twelve = {{1, 0, 1, 0}, {2, 0, 1, 1}, {3, 0, 1, 2}, {4, 0, 1, 3}, {5, 0, 1, 4}, {6, 0, 1, 5},
                        {0, 1, 1, 6}, {1, 1, 1, 7}, {2, 1, 1, 8}, {3, 1, 1, 9}, {4, 1, 1, 10}, {5, 1, 1, 11}};
  CheckLattice<float>("twelve arcs", twelve, {2, 9, 3});
  CheckLattice<float>("three arcs to the next diagonal", {{2, 0, 1, 0}, {1, 0, 1, 1}, {1, 0, 1, 2}, {0, 1, 1, 3}}, {2, 9, 5});
  // The step itself reads the furthest diagonal, of the next column: it must not lie where this diagonal is written.
  CheckLattice<float>("one duration", {{2, 0, 1, 0}, {2, 1, 1, 1}}, {2, 12, 5});
}

// Blocks of 4 by 8 nodes, or more frames; units below and above a stage of 128 bytes; slabs that end before the list.
void CheckJoints() {
  using O = JointOptions&;
  CheckJoint<BFloat16>("joint", [](O) {});
  CheckJoint<Half>("joint, float16", [](O o) { o.units = 65; o.rows_dtype = DType::kF16; o.activation = Activation::kRelu; });
  CheckJoint<float>("joint, TF32", [](O o) { o.rows_dtype = DType::kBF16; o.activation = Activation::kSilu; });
  CheckJoint<float>("joint, float32", [](O o) { o.exact = true; o.units = 70; o.copies = 2; o.bound = 0.05; });
  CheckJoint<float>("joint, chunks", [](O o) { o.exact = true; o.classes = 384; o.blanks = 3; o.activation = Activation::kGelu; });
  CheckJoint<float>("joint, durations", [](O o) { o.exact = true; o.classes = 256; o.others = 5; o.activation = Activation::kExactGelu; });
  CheckJoint<float>("joint, durations of log-probabilities", [](O o) { o.classes = 256; o.others = 3; o.normalize = false; o.blanks = 2; });
  CheckJoint<BFloat16>("joint, Bernoulli blank", [](O o) { o.classes = 384; o.others = 1; o.bernoulli = true; o.slab = 50; });
  CheckJoint<float>("joint, 64 rows", [](O o) { o.rows = 64; o.exact = true; o.frames = 19; o.columns = 17; o.copies = 2; o.slab = 1; });
  CheckJoint<BFloat16>("joint, 128 rows", [](O o) { o.rows = 128; o.frames = 37; o.columns = 12; o.units = 130; o.slab = 2; });
  CheckJoint<float>("joint, one node", [](O o) { o.frames = o.columns = o.units = o.encoders = 1; o.exact = true; });
}
// clang-format on

Masks MasksOf(double first, double second, std::function<int(int, int, int)> where) {
  Masks masks;
  masks.size[0] = first;
  masks.size[1] = second;
  masks.where = std::move(where);
  return masks;
}
Masks Everywhere(double size) {
  return MasksOf(size, 0, [](int, int, int) { return 0; });
}

// Arcs of any size.
void CheckSizes() {
  CheckMasks<float>("unit steps", kUnit, 2, 6, 3);
  CheckMasks<double>("unit steps, float64", kUnit, 1, 4, 3);
  CheckMasks<float>("monotonic", kMonotonic, 1, 6, 3);
  CheckMasks<float>("multi-blank", kMultiBlank, 1, 7, 2);
  CheckMasks<float>("durations", kDurations, 2, 7, 2);
  CheckMasks<double>("durations, float64", kDurations, 1, 5, 2);
  CheckMasks<float>("products", kProducts, 1, 7, 2);
  const Masks few = MasksOf(-1e9, 1e8, [](int p, int t, int u) { return (t + u + p) % 5 == 0 ? 0 : -1; });
  const Masks labels = MasksOf(-1e30, 0, [](int p, int, int) { return p == 1 ? 0 : -1; });
  const Masks both = MasksOf(-1e9, 1e8, [](int p, int t, int u) { return (t + 3 * u + p) % 4 < 2 ? (t + p) % 2 : -1; });
  CheckLattice<float>("masks, tiles", kUnit, {2, 40, 69, true, 0, labels});
  CheckLattice<float>("masks, tiles, two sizes", kUnit, {2, 70, 35, false, 0.05, both});
  CheckLattice<double>("masks, tiles, monotonic", kMonotonic, {2, 90, 64, true, 0.05, labels});
  CheckLattice<float>("masks, warps with several tiles", kUnit, {1, 5, kMany + 40, true, 0, both});
  CheckLattice<float>("masks, warps with several tiles", kMonotonic, {1, kMany + 10, kMany + 3, true, 0, labels});
  CheckLattice<float>("masks, multi-blank, tiles", kMultiBlank, {2, 40, 37, true, 0, both});
  CheckLattice<float>("masks, products, more columns than threads", kProducts, {1, 5, 300, true, 0.05, few});
  // Arcs far from 0, with and without masks that need wide mode.
  for (const double shift : {-1e3, -1e4, -1e6, 1e3}) {
    Masks far, mixed = few, masked = labels;
    far.shift = mixed.shift = shift;
    masked.shift = std::max(shift, -5e5);  // arcs of two planes stay below 2^20, where wide mode takes them for masks
    for (const Table& table : {kUnit, kMonotonic, kMultiBlank, kProducts}) {
      char text[100];
      snprintf(text, sizeof text, "arcs near %g, %zu arcs a node", shift, table.Arcs());
      CheckLattice<float>(text, table, {2, 12, 5, true, 0.05, far});
      CheckLattice<double>(text, table, {2, 12, 5, false, 0.05, far});
      CheckLattice<float>(text, table, {2, 9, 4, true, 0, mixed});
      CheckLattice<double>(text, table, {2, 9, 4, true, 0, masked});
    }
  }
  // A path through faint arcs dominates, since it also has high arcs, or since the other path is small.
  const Masks high = MasksOf(-2.2e6, 1e5, [](int p, int t, int u) { return u == 0 && t >= 5 ? 1 - p : -1; });
  const Masks small = MasksOf(-2.2e6, -1.9e6, [](int p, int t, int u) {
    return p == 1 || t < 3 || t > 4 ? -1 : u > 2 ? 1 : t == 3 ? 0 : -1;
  });
  const Masks faint = MasksOf(-1e9, 0, [](int p, int t, int u) { return p == 1 && (t + u) % 3 == 0 ? 0 : -1; });
  for (const Table& table : {kUnit, kMonotonic, kMultiBlank}) {
    // Mantissas double with every diagonal.
    CheckLattice<float>("equal arcs", table, {1, 360, 40, false, 0, Everywhere(-0.69314718)});
    CheckLattice<float>("a faint node alone", table, {1, 1, 0, true, 0, Everywhere(-3.4028234663852886e38)});
    CheckLattice<float>("a node at the limit alone", table, {1, 1, 0, true, 0, Everywhere(-0x1p21)});
    CheckLattice<double>("a node at the limit alone", table, {1, 1, 0, true, 0, Everywhere(-0x1p21)});
    CheckLattice<float>("high arcs", table, {2, 32, 3, true, 0, high});
    CheckLattice<double>("small likelihood", table, {1, 9, 6, true, 0, small});
    CheckLattice<float>("small likelihood", table, {1, 9, 6, false, 0, small});
    // Sequences so long that these arcs count as extreme: exponents would saturate.
    CheckLattice<float>("many faint arcs", table, {1, 260, 1, true, 0, Everywhere(-2e6)});
    CheckLattice<float>("many huge arcs", table, {1, 160, 1, true, 0, Everywhere(2e6)});
    LatticeProblem<float>("faint arcs", table, {1, 30, 4, true, 0, faint}).CheckFaint();
  }
}

}  // namespace
}  // namespace jax_rnnt::cuda

// An argument is the size of the largest problem: logits of an emission, nodes of a lattice.
int main(int count, char** arguments) {
  using namespace jax_rnnt::cuda;
  if (count > 1) most_numbers = atoll(arguments[1]);
  MakeContext();
  LoadKernels();  // from here on the emulation runs no kernel that this did not find
  CheckEmissions();
  CheckJoints();
  CheckUnitSteps();
  CheckSkips();
  CheckSizes();
  printf("largest error: %.2f of what is allowed\n", worst);
  printf("%d passed, %d failed, checksum %016llx\n", num_passed, num_failed, static_cast<unsigned long long>(checksum));
  return num_failed != 0;
}
