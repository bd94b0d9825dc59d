"""What opcodes share: their table, and how operands are read and results written.

An opcode is a function under `@op`: it reads the instruction once and returns run(warp, mask), which executes it for
the lanes of the mask. A register is a row of 32 words, a predicate a mask of 32 bits. Instructions of the uniform
datapath are the vector instructions of the same name, on registers whose lanes are equal. An opcode or form of it that
is missing raises Unsupported and names it: the table has what nvcc 12.4 and 13.0 make of the kernels. integers.py,
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


@functools.cache
def lanes(mask):
    return np.array([mask >> i & 1 for i in range(32)], bool)


def mask_of(array):
    return int.from_bytes(np.packbits(array, bitorder="little").tobytes(), "little")


class Barrier:
    """A convergence barrier: the lanes that meet at BSYNC."""

    def __init__(self, mask):
        self.mask = mask


OPS = {}


def op(*names):
    def add(builder):
        OPS.update(dict.fromkeys(names, builder))
        return builder

    return add


# Uniform instructions whose name is not U and the name of the vector instruction.
UNIFORM_NAMES = {"VOTEU": "VOTE", "S2UR": "S2R", "ULDC": "LDC", "LDCU": "LDC", "UMOV": "MOV"}


def compile_instruction(x):
    name = UNIFORM_NAMES.get(x.name) or (x.name[1:] if x.name[0] == "U" and x.name[1:] in OPS else x.name)
    if name not in OPS:
        raise Unsupported(f"opcode {x.opcode}: {x.text}")
    try:
        run = OPS[name](x)
    except (AssertionError, KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise Unsupported(f"form of an opcode: {x.text} ({error!r})") from error
    if x.name != name:  # uniform: one value for the warp, whatever lanes are active

        def uniform(w, m, run=run):
            run(w, m if name in ("VOTE",) else FULL)

        x.run = uniform
    else:
        x.run = run
    return x.run


def put(w, d, value, m):
    if d == RZ or d == UNIFORM + 63:
        return
    if m == FULL or d >= UNIFORM:
        w.r[d][...] = value
    else:
        np.copyto(w.r[d], value, where=lanes(m), casting="unsafe")


def put_wide(w, d, value, m):
    """64 bits to a pair of registers."""
    put(w, d, (value & np.uint64(FULL)).astype(np.uint32), m)
    if d not in (RZ, UNIFORM + 63):
        put(w, d + 1, (value >> np.uint64(32)).astype(np.uint32), m)


def put_float(w, d, value, m):
    put(w, d, value.astype(np.float32, copy=False).view(np.uint32), m)


def put_double(w, d, value, m):
    put_wide(w, d, np.ascontiguousarray(value, np.float64).view(np.uint64), m)


def put_pred(w, d, value, m):
    if d % 8 != PT:
        w.p[d] = (w.p[d] & ~m | value & m) if d < 8 else (FULL if value else 0)


def pred(o):
    assert o.kind == "pred"
    i = o.index
    return (lambda w: ~w.p[i] & FULL) if o.inverted else (lambda w: w.p[i])


def words(o, x=None):
    """Function: warp -> 32 words of an operand, without signs."""
    if o.kind == "reg":
        i = o.index
        if ".64" in o.suffix:
            raise ValueError("a pair of registers")
        if part := re.search(r"\.([BH])(\d)(?!_)", o.suffix):
            size = 8 if part[1] == "B" else 16
            return lambda w: w.r[i] >> np.uint32(size * int(part[2])) & np.uint32((1 << size) - 1)
        return lambda w: w.r[i]
    if o.kind == "imm":
        if isinstance(o.value, str):
            value = np.full(32, x.bits, np.uint32)  # a float: its bits are in the encoding
        else:
            value = np.full(32, o.value & FULL, np.uint32)
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


def signed(o, x=None):
    get = integer(o, x)
    return lambda w: get(w).view(np.int32)


def widened(get, kind):
    return lambda w: get(w).astype(kind).view(np.uint64)


def addend(o, x=None):
    """uint64 as the adder sees it: -x is 2^32 - x, so that a carry means no borrow."""
    get = words(o, x)
    if o.negative:
        return lambda w: np.uint64(1 << 32) - get(w)
    if o.inverted:
        return lambda w: (~get(w)).astype(np.uint64)
    return lambda w: get(w).astype(np.uint64)


def wide(o, x=None):
    """uint64 of a pair of registers, a constant or an immediate."""
    if o.kind == "reg":
        i = o.index
        if i in (RZ, UNIFORM + 63):
            return lambda w: np.zeros(32, np.uint64)
        return lambda w: w.r[i] | w.r[i + 1].astype(np.uint64) << np.uint64(32)
    if o.kind == "const":
        offset = sum(c for _, _, c in o.terms)
        return lambda w: (w.block.constant(o.value, offset)
                          | w.block.constant(o.value, offset + 4).astype(np.uint64) << np.uint64(32))  # fmt: skip
    value = np.full(32, o.value & (2**64 - 1), np.uint64)
    return lambda w: value


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

    def value(w):
        v = get(w).view(np.float32)
        if o.absolute:
            v = np.abs(v)
        return -v if o.negative else v

    if "FTZ" in x:
        return lambda w: flush(value(w))
    return value


def double(o, x):
    if o.kind == "imm":
        value = np.full(32, x.bits << 32, np.uint64).view(np.float64)
        return lambda w: value
    get = wide(o, x)

    def value(w):
        v = get(w).view(np.float64)
        if o.absolute:
            v = np.abs(v)
        return -v if o.negative else v

    return value


def rounded(v, x):
    """float64 -> float32 by the rounding that the instruction names."""
    r = v.astype(np.float32)
    if "RM" in x:
        r = np.where(r > v, np.nextafter(r, np.float32(-np.inf)), r)
    elif "RP" in x:
        r = np.where(r < v, np.nextafter(r, np.float32(np.inf)), r)
    elif "RZ" in x:
        r = np.where(np.abs(r) > np.abs(v), np.nextafter(r, np.float32(0)), r)
    if "FTZ" in x:
        r = flush(r)
    return np.clip(np.nan_to_num(r), 0, 1).astype(np.float32) if "SAT" in x else r


def only(x, *allowed):
    """Fails for a modifier that is not listed."""
    for modifier in x.modifiers:
        if modifier not in allowed:
            raise Unsupported(f"modifier {modifier}: {x.text}")


def outputs(x):
    """(register, [predicates], the operands after them). Predicates that are written follow the register."""
    d, *rest = x.operands
    found = []
    while rest and rest[0].kind == "pred":
        found.append(rest.pop(0).index)
    return d.index, found, rest
