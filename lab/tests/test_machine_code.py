"""The interpreter of machine code of lab/model: what it must refuse, and the CUDA kernels as compiled for sm_90 against
float64, whose results show nearly every instruction that they have. Needs no GPU; the kernels need nvcc and nvdisasm.
"""

import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "lab/model"))
import cycles
import interpreter
import kernel_problems as model
import operands
import sass


def warp():
    """A warp of a block without code, whose registers R2 ... R9 are random."""
    block = types.SimpleNamespace(kernel=types.SimpleNamespace(name="test"), size=(32, 1, 1), index=(5, 0, 0))
    w = interpreter.Warp(block, 0, operands.FULL)
    w.registers[2:10] = np.random.default_rng(0).integers(0, 2**32, (8, 32), np.uint32)
    w.group = w.groups[0]
    return w


def execute(w, text, mask=operands.FULL):
    operands.compile_instruction(sass.Instruction(0, text, 0, 0))(w, mask)


def test_copies_arrive_when_the_warp_waits():
    w = warp()
    memory = interpreter.Memory(1 << 16)
    source = memory.array(np.arange(64, dtype=np.uint32))
    w.block.memory, w.block.shared = memory, np.zeros(1024, np.uint8)
    w.block.read, w.block.written = set(), set()
    w.registers[2] = 4 * np.arange(32)
    for first in (0, 32):
        at = source[first:].ctypes.data + 4 * np.arange(32, dtype=np.uint64)
        w.registers[4], w.registers[5] = at & operands.FULL, at >> 32
        execute(w, f"LDGSTS.E [R2+{hex(4 * first)}], desc[UR4][R4.64]")
        execute(w, "LDGDEPBAR")
    shared = w.block.shared.view(np.uint32)
    assert not shared.any()
    execute(w, "DEPBAR.LE SB0, 0x1")
    assert shared[:64].tolist() == [*range(32), *32 * [0]]
    execute(w, "DEPBAR.LE SB0, 0x0")
    assert shared[:64].tolist() == [*range(64)]


def test_lanes_outside_the_mask():
    """They keep their registers, and no shuffle reads them."""
    w = warp()
    before = w.registers[3].copy()
    execute(w, "IADD3 R3, R2, R4, RZ", mask=0xFF)
    np.testing.assert_array_equal(w.registers[3, 8:], before[8:])
    np.testing.assert_array_equal(w.registers[3, :8], (w.registers[2] + w.registers[4])[:8])
    with pytest.raises(RuntimeError, match="does not take part"):
        execute(w, "SHFL.UP PT, R10, R2, 0x1, RZ", mask=0xFFFF0000)


def test_negative_words_and_nan():
    """Which the problems below do not show."""
    w = warp()
    w.registers[2, ::3] = 0x7FC00000
    execute(w, "SHF.R.S32.HI R0, RZ, 0x1f, R6")
    np.testing.assert_array_equal(w.registers[0].view(np.int32), w.registers[6].view(np.int32) >> 31)
    execute(w, "FSETP.GEU.AND P3, PT, R2, R4, PT")
    assert w.p[3] == operands.mask_of(~np.less(*w.registers[2:5:2].view(np.float32)))


@pytest.mark.parametrize(
    "text", ["WGMMA R2, R4", "PRMT.F4E R2, R4, R5, R6", "S2R R0, SR_VIRTID", "FADD.XYZ R2, R3, R4"]
)
def test_what_is_unknown_is_named(text):
    with pytest.raises(sass.Unsupported, match=text.split()[0].split(".")[0] if "S2R" not in text else "SR_VIRTID"):
        execute(warp(), text)


def trace(*rows):
    """[(opcode, stall, scoreboard written, mask waited for, detail)] as a trace of consecutive instructions."""
    found = []
    for number, (text, stall, write, wait, detail) in enumerate(rows):
        found.append((sass.Instruction(number, text, 0, (stall | write << 5 | 7 << 8 | wait << 11) << 41), detail))
    return found


def end(*traces, **options):
    return cycles.Replay([list(traces)], **options).end


def test_cycles():
    add = ("FADD R0, R1, R2", 4, 7, 0, None)
    assert end(trace(add, add, add)) == 12  # stalls
    load = ("LDG.E R0, desc[UR4][R2.64]", 1, 0, 0, ("global", 32, 1, 0, "global", 1))
    near = ("LDG.E R0, desc[UR4][R2.64]", 1, 0, 0, ("global", 0, 1, 0, "L1", 1))
    use = ("FADD R0, R1, R2", 4, 7, 1, None)
    assert end(trace(load, use), latency=500) == 504
    assert end(trace(near, use), latency=500) == cycles.LATENCY["L1"] + 4
    assert end(trace(load, load, use), latency=500) == 505  # in flight together
    assert cycles.Replay([[trace(load, load, use)]], latency=500).loads == [(0.0, 500.0, 32), (1.0, 501.0, 32)]
    copy = ("LDGSTS.E [R0], desc[UR4][R2.64]", 1, 7, 0, ("global", 32, 1, 0, "global", 1))
    commit, last = ("LDGDEPBAR", 1, 0, 0, None), ("DEPBAR.LE SB0, 0x1", 4, 7, 0, None)
    every = ("DEPBAR.LE SB0, 0x0", 4, 7, 0, None)
    assert end(trace(copy, commit, *10 * [add], copy, commit, last), latency=500) == 504
    assert end(trace(copy, commit, *10 * [add], copy, commit, every), latency=500) == 42 + 504
    half = ("ISETP.LT.AND P0, PT, R1, R2, PT", 1, 7, 0, None)
    assert end(trace(*10 * [half])) == 2 * 9 + 1  # the ALU takes one in two cycles from a scheduler
    taken = trace(("BRA `(.L_x_1)", 5, 7, 0, None))
    assert end([*taken, (sass.Instruction(9, "EXIT", 0, 1 << 41), None)]) == 5 + cycles.TAKEN + 1

    spread = ("LDG.E.128 R0, desc[UR4][R2.64]", 1, 0, 0, ("global", 512, 32, 0, "global", 32))  # a row a lane
    whole = ("LDG.E.128 R0, desc[UR4][R2.64]", 1, 0, 0, ("global", 512, 16, 0, "global", 4))  # the same bytes of rows
    for row, by_sectors, by_lines in ((spread, 8, 32), (whole, 4, 4)):
        assert [cycles.memory_cycles(*trace(row)[0], tags=tags) for tags in (False, True)] == [by_sectors, by_lines]
        assert end(trace(row, load), tags=True) == by_lines + 1

    warps = [object(), object()]
    entry = [64, [0, 0], [(w, None) for w in warps]]
    bar = ("BAR.SYNC 0x0", 1, 7, 0, ["bar", entry, True])
    slow, fast = trace(*5 * [add], bar, add), trace(bar, *9 * [add])
    assert end(slow, fast) == 20 + 1 + cycles.BARRIER + 36  # both go on when the last is there


# ---- the kernels


@pytest.fixture(scope="module")
def kernels():
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    if sass.find_nvdisasm() is None:
        pytest.skip(sass.INSTALL)
    return model.Kernels()


ROUNDING = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-10}


def run_emission(kernels, problem):
    """Planes, norm and gradient of both passes against float64."""
    rows = np.arange(problem.rows)
    launch = problem.forward(kernels)
    for index in np.ndindex(launch.grid):
        model.run_block(launch, problem.memory, index)
    np.testing.assert_allclose(problem.blank_plane, problem.log_probs[:, -1], atol=5e-6)
    label = problem.row_label
    expected = np.where(label < 0, -np.inf, problem.log_probs[rows, label])
    np.testing.assert_allclose(problem.label_plane, expected, atol=5e-6)
    np.testing.assert_allclose(problem.norm.astype(np.float64), problem.true_norm(), rtol=1e-5)

    launch = problem.backward(kernels)
    expected = problem.gradient()
    for index in np.ndindex(launch.grid):
        model.run_block(launch, problem.memory, index)
    rounding = ROUNDING[problem.dtype] + 1e-5
    np.testing.assert_allclose(model.widen(problem.logits, problem.dtype), expected, atol=1e-6, rtol=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("V", "offset"), [(5, 1), (29, 0), (32, 0), (32, 1), (129, 0), (500, 0), (500, 3), (9000, 1)])
def test_emission(kernels, V, offset, dtype):
    """15 rows, or 5 if they are long."""
    run_emission(kernels, model.EmissionProblem(V, dtype, offset, case=(1, 1 if V > 5000 else 3, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [1e3, -1e4, 1e6])
@pytest.mark.parametrize(("V", "offset"), [(6, 0), (70, 1), (500, 0), (4096, 1)])
def test_common_offsets(kernels, V, offset, shift):
    """The compiler may fuse no product whose rounding matters: errors would be those of products with the logits."""
    for dtype in ROUNDING if abs(shift) <= 1e4 else ("float32", "bfloat16"):
        run_emission(kernels, model.EmissionProblem(V, dtype, offset, case=(1, 1, 5), shift=shift))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", [False, True])
def test_tiny_rows_move_whole_cache_lines(kernels, backward, dtype):
    """No access to global memory takes more cycles by lines than by bytes, and copies of rows touch four lines."""
    problem = model.EmissionProblem(32, dtype)
    launch = problem.backward(kernels) if backward else problem.forward(kernels)
    block = model.run_block(launch, problem.memory, (0, 0, 0))
    found = [(x, d) for w in block.warps for x, d in w.trace if d and d[0] == "global"]
    assert found and all(d[5] == -(-d[2] // 4) for x, d in found if "128" in x)
    total = [sum(cycles.memory_cycles(x, d, tags=tags) for x, d in found) for tags in (False, True)]
    assert total[1] < 1.25 * total[0]


TABLES = {
    "standard": (model.STANDARD, 20, 40),
    "monotonic": (model.MONOTONIC, 45, 33),
    "standard, two columns a lane": (model.STANDARD, 10, 150),
    "standard, a last column alone": (model.STANDARD, 9, 128),
    "monotonic, a last column alone": (model.MONOTONIC, 140, 128),
    "two columns a lane, a last column alone": (model.STANDARD, 5, 256),
    "monotonic, two columns a lane": (model.MONOTONIC, 140, 130),
    "token and duration": (model.token_and_duration(range(5)), 9, 6),
    "multi-blank": (model.multi_blank((1, 2, 4)), 7, 9),
}


def run_lattice(kernels, problem):
    assert len(list(problem.run(kernels))) > 4
    loss, gradients = problem.truth()
    np.testing.assert_allclose(problem.loss, loss, rtol=1e-6)
    for gradient, expected in zip(problem.gradients, gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1e3, -1e6])
@pytest.mark.parametrize("name", ["standard", "monotonic", "multi-blank"])  # float32 rounds sums of two planes
def test_arcs_far_from_0(kernels, name, shift):
    run_lattice(kernels, model.LatticeProblem(TABLES[name][0], 7, 4, shift=shift))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_lattice(kernels, name):
    run_lattice(kernels, model.LatticeProblem(*TABLES[name]))


@pytest.mark.slow
def test_memory_is_checked(kernels):
    """A launch whose logits end too early stops at the instruction that reads beyond them."""
    problem = model.EmissionProblem(500, "float32", case=(1, 3, 5))
    launch = problem.forward(kernels)
    memory = problem.memory
    memory.ends[memory.starts == problem.logits.ctypes.data] -= np.uint64(15 * 500 * 4 - 2000)  # one row is left
    with pytest.raises(IndexError, match="LDG"):
        model.run_block(launch, memory, (0, 0, 0))
