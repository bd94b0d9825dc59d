"""What opcodes share: their table, and how operands are read and results written.

A register is a row of 32 words, a predicate a mask of 32 bits. `op` registers the function of an opcode from the values
of its operands to those of its results; where an opcode does more, `step` registers what executes it for the lanes of a
mask, or `machine` a function that reads the instruction once and returns that. Instructions of the uniform datapath are
the vector instructions of the same name, on registers whose lanes are equal. An opcode, a form of it or a modifier that
is missing raises Unsupported and names it: the table has what nvcc 13.0 makes of the kernels for sm_90. integers.py,
floats.py and machine.py fill it.
"""

import functools
import re

import numpy as np
from sass import PT, RZ, UNIFORM, Unsupported

FULL = 0xFFFFFFFF
LANES = np.arange(32)
SHARED_WINDOW = 0x1000  # high word of generic addresses of shared memory
STACK = 1 << 14  # bytes of local memory of a thread
NOWHERE = RZ, UNIFORM + 63


@functools.cache
def lanes(mask):
    return np.array([mask >> i & 1 for i in range(32)], bool)


def mask_of(array):
    return int.from_bytes(np.packbits(array, bitorder="little").tobytes(), "little")


class Barrier:
    """A convergence barrier: the lanes that meet at BSYNC."""

    def __init__(self, mask):
        self.mask = mask


# ---- the table

OPS = {}  # name: (function of an instruction that returns run, its modifiers)


def machine(*names, allow=""):
    def add(builder):
        OPS.update(dict.fromkeys(names, (builder, frozenset(allow.split()))))
        return builder

    return add


def step(*names, allow=""):
    """Registers f(instruction, warp, mask), which executes it."""
    return lambda f: machine(*names, allow=allow)(lambda x: functools.partial(f, x))


def op(*names, allow="", read=None):
    """Registers f(instruction, values of its inputs) -> value of the result, or an iterator of several. `read(o, x)` is
    a function of a warp, the value of an operand in each lane, or one such for each place; predicates are bools."""

    def add(f):
        @machine(*names, allow=allow)
        def _(x):
            out, inputs = outputs(x)
            reads = read if isinstance(read, tuple) else len(inputs) * (read or integer,)
            gets = [flags(o) if o.kind == "pred" else get(o, x) for o, get in zip(inputs, reads + 2 * (integer,))]

            def run(w, m):
                found = f(x, *[get(w) for get in gets])
                for o, value in zip(out, (found,) if isinstance(found, np.ndarray) else found):
                    put_pred(w, o.index, mask_of(value), m) if o.kind == "pred" else put(w, o.index, value, m)

            return run

        return f

    return add


def outputs(x):
    """(operands that are written, the others): a register with predicates around it, or predicates alone."""
    ops, n = x.operands, 0
    if x.name.endswith(("SETP", "PLOP3")):
        n = 2
    elif x.name == "FCHK":
        n = 1
    else:
        n = next(i for i, o in enumerate(ops) if o.kind == "reg") + 1
        while n < len(ops) and ops[n].kind == "pred":
            n += 1
    return ops[:n], ops[n:]


# Uniform instructions whose name is not U and the name of the vector instruction.
UNIFORM_NAMES = {"VOTEU": "VOTE", "S2UR": "S2R", "ULDC": "LDC", "LDCU": "LDC"}


def compile_instruction(x):
    name = UNIFORM_NAMES.get(x.name) or (x.name[1:] if x.name[0] == "U" and x.name[1:] in OPS else x.name)
    if name not in OPS:
        raise Unsupported(f"opcode {x.opcode}: {x.text}")
    builder, allowed = OPS[name]
    if unknown := set(x.modifiers) - allowed:
        raise Unsupported(f"modifiers {', '.join(unknown)}: {x.text}")
    try:
        run = builder(x)
    except (AssertionError, KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise Unsupported(f"form of an opcode: {x.text} ({error!r})") from error
    # Uniform: one value for the warp, whatever lanes are active.
    x.run = run if name in (x.name, "VOTE") else lambda w, m: run(w, FULL)
    return x.run


# ---- results


def put(w, d, value, m):
    """Words of any type to a register; 64 bits to a pair of registers."""
    if d in NOWHERE:
        return
    if value.itemsize == 8:
        value = np.ascontiguousarray(value).view(np.uint64)
        put(w, d + 1, (value >> np.uint64(32)).astype(np.uint32), m)
        value = value.astype(np.uint32)
    elif value.dtype == np.float32:
        value = value.view(np.uint32)
    if m == FULL or d >= UNIFORM:
        w.r[d][...] = value
    else:
        np.copyto(w.r[d], value, where=lanes(m), casting="unsafe")


def put_pred(w, d, value, m):
    if d % 8 != PT:
        w.p[d] = (w.p[d] & ~m | value & m) if d < 8 else (FULL if value else 0)


# ---- operands: functions of a warp


def pred(o):
    """A mask."""
    assert o.kind == "pred"
    i = o.index
    return (lambda w: ~w.p[i] & FULL) if o.inverted else (lambda w: w.p[i])


def flags(o):
    """Bools."""
    get = pred(o)
    return lambda w: lanes(get(w))


def words(o, x=None):
    """32 words, without signs."""
    if o.kind == "reg":
        i = o.index
        if ".64" in o.suffix:
            raise ValueError("a pair of registers")
        if part := re.search(r"\.([BH])(\d)(?!_)", o.suffix):
            size = 8 if part[1] == "B" else 16
            return lambda w: w.r[i] >> np.uint32(size * int(part[2])) & np.uint32((1 << size) - 1)
        return lambda w: w.r[i]
    if o.kind == "imm":  # the bits of a float are in the encoding
        value = np.full(32, x.bits if isinstance(o.value, str) else o.value & FULL, np.uint32)
        return lambda w: value
    if o.kind == "const":
        if all(r is None or r == RZ for r, _, _ in o.terms):
            offset = sum(c for _, _, c in o.terms)
            return lambda w: w.block.constant(o.value, offset)
        return lambda w: constant_lanes(w, o, 4)
    raise ValueError(o.kind)


def constant_lanes(w, o, size, extra=0):
    at = np.full(32, extra, np.int64)
    for r, _, c in o.terms:
        at += c if r is None else w.r[r].astype(np.int64)
    data = w.block.constants[o.value]
    at = np.where((at >= 0) & (at + size <= len(data)), at, 0)  # lanes that are not active
    value = np.zeros(32, np.uint32)
    for k in range(size):
        value |= data[at + k].astype(np.uint32) << np.uint32(8 * k)
    return value


def integer(o, x=None):
    """Words with sign and complement applied."""
    get = words(o, x)
    if o.absolute:
        raise ValueError("absolute value")
    if o.negative:
        return lambda w: (np.uint32(0) - get(w)).astype(np.uint32)
    return (lambda w: ~get(w)) if o.inverted else get


def ordered(o, x):
    """Words, signed unless the instruction says otherwise."""
    get = integer(o, x)
    return get if "U32" in x else lambda w: get(w).view(np.int32)


def addend(o, x=None):
    """uint64 as the adder sees it: -x is 2^32 - x, so that a carry means no borrow."""
    get = words(o, x)
    if o.negative:
        return lambda w: np.uint64(1 << 32) - get(w)
    return lambda w: (~get(w) if o.inverted else get(w)).astype(np.uint64)


def wide(o, x=None):
    """uint64 of a pair of registers, a constant or an immediate."""
    if o.kind == "reg":
        i = o.index
        if i in NOWHERE:
            return lambda w: np.zeros(32, np.uint64)
        return lambda w: w.r[i] | w.r[i + 1].astype(np.uint64) << np.uint64(32)
    if o.kind == "const":
        offset = sum(c for _, _, c in o.terms)
        return lambda w: (w.block.constant(o.value, offset)
                          | w.block.constant(o.value, offset + 4).astype(np.uint64) << np.uint64(32))  # fmt: skip
    value = np.full(32, o.value & (2**64 - 1), np.uint64)
    return lambda w: value


def with_sign(o, get):
    """A float with its absolute value and sign applied."""
    if o.absolute:
        return lambda w: -np.abs(get(w)) if o.negative else np.abs(get(w))
    return (lambda w: -get(w)) if o.negative else get


def flush(v):
    return np.where(np.abs(v) < np.float32(2**-126), v * np.float32(0), v)


def real(o, x):
    """float32 of an operand."""
    get = words(o, x)
    if o.kind == "imm":  # the bits include the sign
        value = np.full(32, x.bits, np.uint32).view(np.float32)
        return lambda w: value
    if ".H0_H0" in o.suffix or ".H1_H1" in o.suffix:
        raise ValueError("half")
    value = with_sign(o, lambda w: get(w).view(np.float32))
    return (lambda w: flush(value(w))) if "FTZ" in x else value


def double(o, x):
    if o.kind == "imm":
        value = np.full(32, x.bits << 32, np.uint64).view(np.float64)
        return lambda w: value
    get = wide(o, x)
    return with_sign(o, lambda w: get(w).view(np.float64))
