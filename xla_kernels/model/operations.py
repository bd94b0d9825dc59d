"""What each instruction does. An opcode is a function under `@op`: it reads the instruction once and returns
run(warp, mask), which executes it for the lanes of the mask.

A register is a row of 32 words, a predicate a mask of 32 bits. Instructions of the uniform datapath are the vector
instructions of the same name, on registers whose lanes are equal. An opcode or a form of it that is missing raises
Unsupported and names it.

Approximations: MUFU results are rounded from double precision; DFMA rounds the product to 64 bits first.
"""

import functools
import itertools
import re

import numpy as np
from sass import PT, RZ, UNIFORM, Operand, Unsupported

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
UNIFORM_NAMES = {"VOTEU": "VOTE", "S2UR": "S2R", "ULDC": "LDC", "UMOV": "MOV"}


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


def constant_lanes(w, o, size):
    at = np.zeros(32, np.int64)
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


# ---- integers


@op("MOV")
def _(x):
    only(x)
    d, get = x.operands[0].index, integer(x.operands[1], x)
    return lambda w, m: put(w, d, get(w), m)


@op("IMAD")
def _(x):
    only(x, "MOV", "U32", "IADD", "SHL", "X", "WIDE", "HI")
    d, carries, (oa, ob, oc, *ins) = outputs(x)
    if "MOV" in x or (oa.text in ("RZ", "URZ") and not ins and not carries and "WIDE" not in x and "HI" not in x):
        c = integer(oc, x)
        return lambda w, m: put(w, d, c(w), m)
    carry = pred(ins[0]) if ins else None
    if "WIDE" not in x and "HI" not in x:
        a, b, c = integer(oa, x), integer(ob, x), integer(oc, x)

        def low(w, m):
            v = a(w) * b(w) + c(w)
            put(w, d, v + lanes(carry(w)) if carry else v, m)

        return low
    if "U32" in x:
        a, b = (widened(integer(o, x), np.uint64) for o in (oa, ob))
    else:
        a, b = (widened(signed(o, x), np.int64) for o in (oa, ob))
    c = wide(oc, x)

    def product(w, m):
        ab, cc = a(w) * b(w), c(w)
        v = ab + cc
        if carry:
            v = v + lanes(carry(w)).astype(np.uint64)
        if "HI" in x:
            put(w, d, (v >> np.uint64(32)).astype(np.uint32), m)
        else:
            put_wide(w, d, v, m)
        if carries:
            put_pred(w, carries[0], mask_of(v < ab), m)

    return product


@op("IADD3", "IADD")
def _(x):
    only(x, "X")
    d, carries, rest = outputs(x)
    ins = [pred(o) for o in rest if o.kind == "pred"]
    terms = [o for o in rest if o.kind != "pred" and o.text not in ("RZ", "URZ")]
    if not carries and not ins:
        gets = [integer(o, x) for o in terms]
        if len(gets) == 2:
            a, b = gets
            return lambda w, m: put(w, d, a(w) + b(w), m)
        return lambda w, m: put(w, d, sum((g(w) for g in gets), np.zeros(32, np.uint32)), m)
    gets = [addend(o, x) for o in terms]

    def add(w, m):
        v = np.zeros(32, np.uint64)
        for g in gets:
            v = v + g(w)
        for p in ins:
            v = v + lanes(p(w)).astype(np.uint64)
        put(w, d, (v & np.uint64(FULL)).astype(np.uint32), m)
        for k, p in enumerate(carries):
            put_pred(w, p, mask_of(v >> np.uint64(32) > k), m)

    return add


@op("VIADD")
def _(x):
    only(x)
    d, a, b = x.operands[0].index, integer(x.operands[1], x), integer(x.operands[2], x)
    return lambda w, m: put(w, d, a(w) + b(w), m)


@op("LEA")
def _(x):
    only(x, "HI", "X", "SX32")
    d, carries, (oa, ob, *rest) = outputs(x)
    carry = pred(rest.pop()) if "X" in x else None
    oc = rest.pop(0) if "HI" in x and "SX32" not in x else None
    shift = np.uint64(rest[0].value)
    a, b, c = words(oa, x), addend(ob, x), integer(oc, x) if oc else None
    assert not oa.inverted
    assert not (oa.negative and "HI" in x)

    def lea(w, m):
        low = a(w)
        if "HI" in x:
            high = c(w) if c else (low.view(np.int32) >> 31).view(np.uint32)
            v = (low | high.astype(np.uint64) << np.uint64(32)) << shift >> np.uint64(32)
        else:
            v = low.astype(np.uint64) << shift & np.uint64(FULL)
        if oa.negative:  # as in addend
            v = np.uint64(1 << 32) - v
        v = v + b(w)
        if carry:
            v = v + lanes(carry(w)).astype(np.uint64)
        put(w, d, (v & np.uint64(FULL)).astype(np.uint32), m)
        if carries:
            put_pred(w, carries[0], mask_of(v >> np.uint64(32) > 0), m)

    return lea


@op("SHF")
def _(x):
    only(x, "L", "R", "W", "U32", "S32", "U64", "S64", "HI")
    d, (oa, os_, oc) = x.operands[0].index, x.operands[1:]
    a, s, c = integer(oa, x), integer(os_, x), integer(oc, x)
    bits = 64 if "U64" in x or "S64" in x else 32
    part = np.uint64(32 if "HI" in x else 0)
    arithmetic = "S32" in x or "S64" in x

    def shift(w, m):
        by = s(w) & np.uint32(bits - 1) if "W" in x else np.minimum(s(w), np.uint32(bits))
        v = a(w) | c(w).astype(np.uint64) << np.uint64(32)
        all_out, by = by >= 64, np.minimum(by, 63).astype(np.uint64)
        if "L" in x:
            v = np.where(all_out, np.uint64(0), v << by)
        elif arithmetic:
            v = (v.view(np.int64) >> by.astype(np.int64)).view(np.uint64)
        else:
            v = np.where(all_out, np.uint64(0), v >> by)
        put(w, d, (v >> part & np.uint64(FULL)).astype(np.uint32), m)

    return shift


def lut(table, a, b, c, ones):
    """A bitwise function of three inputs by its truth table."""
    value = a ^ a
    for k in range(8):
        if table >> k & 1:
            value = value | ((a if k & 4 else a ^ ones) & (b if k & 2 else b ^ ones) & (c if k & 1 else c ^ ones))
    return value


LUTS = {
    0xC0: lambda a, b, c: a & b,
    0xFC: lambda a, b, c: a | b,
    0x3C: lambda a, b, c: a ^ b,
    0xFE: lambda a, b, c: a | b | c,
    0xF8: lambda a, b, c: a | (b & c),
    0xEA: lambda a, b, c: (a & b) | c,
    0x80: lambda a, b, c: a & b & c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0x30: lambda a, b, c: a & ~b,
    0x33: lambda a, b, c: ~b,
    0x0F: lambda a, b, c: ~a,
}


@op("LOP3")
def _(x):
    only(x, "LUT", "PAND")
    ops, out = list(x.operands), None
    if ops[0].kind == "pred":
        out = ops.pop(0).index
    d, (a, b, c) = ops[0].index, (integer(o, x) for o in ops[1:4])
    table = ops[4].value
    f = LUTS.get(table) or (lambda a, b, c: lut(table, a, b, c, np.uint32(FULL)))
    extra = pred(ops[5]) if len(ops) > 5 else None

    def logic(w, m):
        v = f(a(w), b(w), c(w))
        put(w, d, v, m)
        if out is not None:
            some = mask_of(v != 0)
            put_pred(w, out, some & extra(w) if "PAND" in x else some | extra(w) if extra else some, m)

    return logic


@op("PLOP3")
def _(x):
    only(x, "LUT")
    d, e, *ins = x.operands
    a, b, c = (pred(o) for o in ins[:3])
    first, second = ins[3].value, ins[4].value

    def logic(w, m):
        args = a(w), b(w), c(w), FULL
        one, two = lut(first, *args), lut(second, *args)
        put_pred(w, d.index, one, m)
        put_pred(w, e.index, two, m)

    return logic


COMPARE = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}
FLOAT_COMPARE = {
    **COMPARE,
    "NE": lambda a, b: (a < b) | (a > b),
    "NUM": lambda a, b: (a == a) & (b == b),
    "NAN": lambda a, b: (a != a) | (b != b),
    "LTU": lambda a, b: ~(a >= b),
    "LEU": lambda a, b: ~(a > b),
    "GTU": lambda a, b: ~(a <= b),
    "GEU": lambda a, b: ~(a < b),
    "EQU": lambda a, b: ~((a < b) | (a > b)),
    "NEU": lambda a, b: a != b,
}
BOOL = {"AND": lambda a, b: a & b, "OR": lambda a, b: a | b, "XOR": lambda a, b: a ^ b}


@op("ISETP")
def _(x):
    only(x, *COMPARE, *BOOL, "U32", "EX")
    d, e, oa, ob, oin, *oex = x.operands
    read = integer if "U32" in x else signed
    a, b, extra = read(oa, x), read(ob, x), pred(oin)
    compare, combine = COMPARE[x.modifiers[0]], BOOL[next(k for k in x.modifiers if k in BOOL)]
    low = pred(oex[0]) if oex else None
    if low:
        strict = COMPARE[{"GE": "GT", "LE": "LT"}.get(x.modifiers[0], x.modifiers[0])]

    def setp(w, m):
        va, vb = a(w), b(w)
        if not low:
            v = mask_of(compare(va, vb))
        elif "EQ" in x:
            v = mask_of(va == vb) & low(w)
        elif "NE" in x:
            v = mask_of(va != vb) | low(w)
        else:
            v = mask_of(strict(va, vb)) | mask_of(va == vb) & low(w)
        p = extra(w)
        put_pred(w, d.index, combine(v, p), m)
        put_pred(w, e.index, combine(~v & FULL, p), m)

    return setp


@op("SEL", "FSEL")
def _(x):
    only(x, "FTZ")
    d, oa, ob, op_ = x.operands
    if x.name == "FSEL":
        a, b = real(oa, x), real(ob, x)
    else:
        a, b = integer(oa, x), integer(ob, x)
    p = pred(op_)
    return lambda w, m: put(w, d.index, np.where(lanes(p(w)), a(w), b(w)).view(np.uint32), m)


@op("VIMNMX", "VIMNMX3", "IMNMX")
def _(x):
    only(x, "U32", "RELU")
    d, *ins, op_ = x.operands
    gets, p = [(integer if "U32" in x else signed)(o, x) for o in ins], pred(op_)

    def run(w, m):
        v = [g(w) for g in gets]
        least, most = functools.reduce(np.minimum, v), functools.reduce(np.maximum, v)
        v = np.where(lanes(p(w)), least, most)
        put(w, d.index, (np.maximum(v, 0) if "RELU" in x else v).view(np.uint32), m)

    return run


@op("VIADDMNMX")
def _(x):
    only(x, "U32", "RELU")
    d, *ins, op_ = x.operands
    a, b = (integer(o, x) for o in ins[:2])
    c, p, kind = integer(ins[2], x), pred(op_), np.uint32 if "U32" in x else np.int32

    def run(w, m):
        s, t = (a(w) + b(w)).view(kind), c(w).view(kind)
        v = np.where(lanes(p(w)), np.minimum(s, t), np.maximum(s, t))
        put(w, d.index, (np.maximum(v, kind(0)) if "RELU" in x else v).view(np.uint32), m)

    return run


@op("IABS")
def _(x):
    d, a = x.operands[0].index, signed(x.operands[1], x)
    return lambda w, m: put(w, d, np.abs(a(w)).view(np.uint32), m)


@op("PRMT")
def _(x):
    only(x)
    d, oa, os_, ob = x.operands
    a, s, b = integer(oa, x), integer(os_, x), integer(ob, x)

    def run(w, m):
        v, how = a(w) | b(w).astype(np.uint64) << np.uint64(32), s(w)
        out = np.zeros(32, np.uint32)
        for k in range(4):
            pick = how >> np.uint32(4 * k)
            byte = (v >> (pick & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)).astype(np.uint32)
            byte = np.where(pick & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
            out |= byte << np.uint32(8 * k)
        put(w, d.index, out, m)

    return run


@op("POPC")
def _(x):
    only(x)
    d, a = x.operands[0].index, integer(x.operands[1], x)
    return lambda w, m: put(w, d, np.array([k.bit_count() for k in a(w).tolist()], np.uint32), m)


@op("BREV")
def _(x):
    only(x)
    d, a = x.operands[0].index, integer(x.operands[1], x)

    def run(w, m):
        v, out = a(w), np.zeros(32, np.uint32)
        for k in range(32):
            out |= (v >> np.uint32(k) & np.uint32(1)) << np.uint32(31 - k)
        put(w, d, out, m)

    return run


@op("FLO")
def _(x):
    only(x, "U32", "SH")
    assert "U32" in x
    d, a = x.operands[0].index, integer(x.operands[1], x)

    def run(w, m):
        v = a(w)
        place = np.array([int(k).bit_length() - 1 for k in v], np.int64)
        place = np.where(v == 0, -1, 31 - place if "SH" in x else place)
        put(w, d, (place & FULL).astype(np.uint32), m)

    return run


@op("SGXT")
def _(x):
    only(x, "U32", "W")
    d, a, s = x.operands[0].index, integer(x.operands[1], x), integer(x.operands[2], x)

    def run(w, m):
        by = (32 - np.minimum(s(w), 32)).astype(np.int64)
        v = a(w).astype(np.uint64) << by.astype(np.uint64) & np.uint64(FULL)
        v = v if "U32" in x else v.astype(np.uint32).view(np.int32).astype(np.int64)
        put(w, d, (v >> by.astype(v.dtype)).astype(np.uint32), m)

    return run


@op("P2R")
def _(x):
    only(x)
    d, _, oa, om = x.operands
    a, mask = integer(oa, x), om.value

    def run(w, m):
        v = a(w) & np.uint32(~mask & FULL)
        for k in range(7):
            if mask >> k & 1:
                v = v | lanes(w.p[k]).astype(np.uint32) << np.uint32(k)
        put(w, d.index, v, m)

    return run


@op("R2P")
def _(x):
    only(x)
    _, oa, om = x.operands
    a, mask = integer(oa, x), om.value

    def run(w, m):
        v = a(w)
        for k in range(7):
            if mask >> k & 1:
                put_pred(w, k, mask_of(v >> np.uint32(k) & 1 != 0), m)

    return run


# ---- floats


@op("FADD", "FMUL", "FFMA")
def _(x):
    only(x, "FTZ", "RM", "RP", "RZ", "SAT")
    d, gets = x.operands[0].index, [real(o, x) for o in x.operands[1:]]
    plain = not x.modifiers
    a, b = gets[:2]
    if plain and x.name == "FADD":
        return lambda w, m: put(w, d, (a(w) + b(w)).view(np.uint32), m)
    if plain and x.name == "FMUL":
        return lambda w, m: put(w, d, (a(w) * b(w)).view(np.uint32), m)
    if x.name == "FFMA":
        c = gets[2]
        if plain:  # the product of two floats is exact in double precision
            return lambda w, m: put_float(w, d, a(w).astype(np.float64) * b(w) + c(w), m)
        return lambda w, m: put_float(w, d, rounded(a(w).astype(np.float64) * b(w) + c(w), x), m)
    if x.name == "FADD":
        return lambda w, m: put_float(w, d, rounded(a(w).astype(np.float64) + b(w), x), m)
    return lambda w, m: put_float(w, d, rounded(a(w).astype(np.float64) * b(w), x), m)


@op("FSETP", "DSETP")
def _(x):
    only(x, *FLOAT_COMPARE, *BOOL, "FTZ")
    d, e, oa, ob, oin = x.operands
    read = real if x.name == "FSETP" else double
    a, b, extra = read(oa, x), read(ob, x), pred(oin)
    compare = FLOAT_COMPARE[x.modifiers[0]]
    combine = BOOL[next(k for k in x.modifiers if k in BOOL)]

    def setp(w, m):
        v, p = mask_of(compare(a(w), b(w))), extra(w)
        put_pred(w, d.index, combine(v, p), m)
        put_pred(w, e.index, combine(~v & FULL, p), m)

    return setp


@op("FMNMX", "FMNMX3", "DMNMX")
def _(x):
    only(x, "NAN", "FTZ")
    d, *ins, op_ = x.operands
    gets, p = [(double if x.name[0] == "D" else real)(o, x) for o in ins], pred(op_)
    low, high = (np.minimum, np.maximum) if "NAN" in x else (np.fmin, np.fmax)
    store = put_double if x.name[0] == "D" else put_float

    def run(w, m):
        v = [g(w) for g in gets]
        store(w, d.index, np.where(lanes(p(w)), functools.reduce(low, v), functools.reduce(high, v)), m)

    return run


MUFU = {
    "EX2": np.exp2,
    "LG2": np.log2,
    "RCP": lambda v: 1 / v,
    "RSQ": lambda v: 1 / np.sqrt(v),
    "SQRT": np.sqrt,
    "SIN": np.sin,
    "COS": np.cos,
    "TANH": np.tanh,
}


@op("MUFU")
def _(x):
    d = x.operands[0].index
    if x.modifiers[0] in ("RCP64H", "RSQ64H"):  # the high word of a double
        a, f = integer(x.operands[1], x), MUFU[x.modifiers[0][:3]]

        def high(w, m):
            v = f((a(w).astype(np.uint64) << np.uint64(32)).view(np.float64))
            put(w, d, (v.view(np.uint64) >> np.uint64(32)).astype(np.uint32), m)

        return high
    only(x, *MUFU)
    a, f = real(x.operands[1], x), MUFU[x.modifiers[0]]
    return lambda w, m: put_float(w, d, flush(f(flush(a(w)).astype(np.float64)).astype(np.float32)), m)


@op("FCHK")
def _(x):
    only(x)
    d, a, b = x.operands[0].index, real(x.operands[1], x), real(x.operands[2], x)

    def run(w, m):
        ea, eb = (g(w).view(np.uint32).astype(np.int64) >> 23 & 255 for g in (a, b))
        slow = (eb == 0) | (eb >= 253) | (ea == 255) | (ea < 24) | (ea - eb > 126) | (ea - eb < -125)
        put_pred(w, d, mask_of(slow), m)

    return run


@op("DADD", "DMUL", "DFMA")
def _(x):
    only(x, "RP", "RM", "RZ")
    d, (a, b, *c) = x.operands[0].index, [double(o, x) for o in x.operands[1:]]
    if x.name == "DADD":
        return lambda w, m: put_double(w, d, a(w) + b(w), m)
    if x.name == "DMUL":
        return lambda w, m: put_double(w, d, a(w) * b(w), m)
    return lambda w, m: put_double(w, d, a(w).astype(np.longdouble) * b(w) + c[0](w), m)


@op("I2F", "I2FP")
def _(x):
    only(x, "F32", "F64", "S32", "U32", "S64", "U64", "S16", "U16", "S8", "U8", "RP", "RM", "RZ")
    d, o = x.operands
    kind = next((k for k in x.modifiers if k[0] in "SU"), "S32")
    if kind.endswith("64"):
        get = wide(o, x)
        value = lambda w: get(w).view(np.int64 if kind[0] == "S" else np.uint64)  # noqa: E731
    else:
        get, dtype = integer(o, x), np.dtype(f"{'i' if kind[0] == 'S' else 'u'}{int(kind[1:]) // 8}")
        value = lambda w: get(w).astype(f"u{dtype.itemsize}").view(dtype)  # noqa: E731
    if "F64" in x:
        return lambda w, m: put_double(w, d.index, value(w).astype(np.float64), m)
    return lambda w, m: put_float(w, d.index, rounded(value(w).astype(np.float64), x), m)


ROUND = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}


@op("F2I", "F2IP")
def _(x):
    only(x, "TRUNC", "FLOOR", "CEIL", "NTZ", "FTZ", "U32", "S32", "S64", "U64", "F64", "F32")
    d, o = x.operands
    get = double(o, x) if "F64" in x else real(o, x)
    how = next((ROUND[k] for k in x.modifiers if k in ROUND), np.rint)
    kind = next((k for k in x.modifiers if k[0] in "SU"), "S32")
    low, high = (
        (0, 2 ** int(kind[1:]) - 1) if kind[0] == "U" else (-(2 ** (int(kind[1:]) - 1)), 2 ** (int(kind[1:]) - 1) - 1)
    )

    def run(w, m):
        v = how(get(w).astype(np.float64))
        v = [0 if k != k else int(min(max(k, low), high)) & (2**64 - 1) for k in v.tolist()]
        v = np.array(v, np.uint64)
        if kind.endswith("64"):
            put_wide(w, d.index, v, m)
        else:
            put(w, d.index, (v & np.uint64(FULL)).astype(np.uint32), m)

    return run


@op("F2F")
def _(x):
    only(x, "F32", "F64")
    d, o = x.operands
    if x.modifiers == ["F64", "F32"]:
        get = real(o, x)
        return lambda w, m: put_double(w, d.index, get(w).astype(np.float64), m)
    assert x.modifiers == ["F32", "F64"]
    get = double(o, x)
    return lambda w, m: put_float(w, d.index, get(w), m)


@op("FRND")
def _(x):
    only(x, *ROUND)
    d, get = x.operands[0].index, real(x.operands[1], x)
    how = next((ROUND[k] for k in x.modifiers if k in ROUND), np.rint)
    return lambda w, m: put_float(w, d, how(get(w)), m)


# ---- halves


def to_half(v, bfloat):
    """float64 or float32 -> 16 bits, rounded to nearest, ties to even; NaN is 0x7fff."""
    if not bfloat:
        return np.where(v != v, np.uint32(0x7FFF), v.astype(np.float16).view(np.uint16).astype(np.uint32))
    bits = v.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(v != v, np.uint32(0x7FFF), bits.astype(np.uint32))


def from_half(bits, bfloat):
    """16 bits in the low part of a word -> float32."""
    if bfloat:
        return ((bits & np.uint32(0xFFFF)) << np.uint32(16)).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def halves(o, x, bfloat):
    """Function: warp -> (low, high) as float32."""
    if o.kind == "imm":
        bits = np.full(32, x.bits, np.uint32)
        value = from_half(bits, bfloat), from_half(bits >> np.uint32(16), bfloat)
        return lambda w: value
    get = words(o, x)
    parts = {".H0_H0": (0, 0), ".H1_H1": (1, 1), "": (0, 1), ".H1_H0": (0, 1)}[o.suffix]

    def value(w):
        bits = get(w)
        v = [from_half(bits >> np.uint32(16 * k), bfloat) for k in parts]
        if o.absolute:
            v = [np.abs(k) for k in v]
        return [-k for k in v] if o.negative else v

    return value


def half_operands(x):
    """An immediate of two halves is printed as two numbers."""
    ops = list(x.operands[1:])
    for i in range(len(ops) - 1):
        if ops[i].kind == ops[i + 1].kind == "imm":
            del ops[i + 1]
            break
    return ops


@op("HADD2", "HMUL2", "HFMA2")
def _(x):
    only(x, "F32", "BF16_V2", "MMA", "RELU", "SAT", "FTZ", "BF16")
    bfloat = "BF16_V2" in x or "BF16" in x
    d, gets = x.operands[0].index, [halves(o, x, bfloat) for o in half_operands(x)]

    def run(w, m):
        parts = []
        for k in range(2):
            v = [g(w)[k].astype(np.float64) for g in gets]
            v = v[0] + v[1] if x.name == "HADD2" else v[0] * v[1] if x.name == "HMUL2" else v[0] * v[1] + v[2]
            v = np.where(v > 0, v, np.where(v != v, v, 0)) if "RELU" in x else v
            parts.append(np.clip(np.nan_to_num(v), 0, 1) if "SAT" in x else v)
        if "F32" in x:
            put_float(w, d, parts[0], m)
        else:
            put(w, d, to_half(parts[0], bfloat) | to_half(parts[1], bfloat) << np.uint32(16), m)

    return run


@op("HMNMX2", "VHMNMX")
def _(x):
    only(x, "BF16_V2", "NAN")
    *ops, op_ = half_operands(x)
    bfloat, p = "BF16_V2" in x, pred(op_)
    d, gets = x.operands[0].index, [halves(o, x, bfloat) for o in ops]
    low, high = (np.minimum, np.maximum) if "NAN" in x else (np.fmin, np.fmax)

    def run(w, m):
        least, v = lanes(p(w)), []
        for parts in zip(*(g(w) for g in gets)):
            v.append(to_half(np.where(least, functools.reduce(low, parts), functools.reduce(high, parts)), bfloat))
        put(w, d, v[0] | v[1] << np.uint32(16), m)

    return run


@op("HSETP2")
def _(x):
    only(x, *FLOAT_COMPARE, *BOOL, "BF16_V2", "FTZ")
    d, e, *ins = x.operands
    extra = pred(ins.pop())
    if len(ins) == 3:
        ins.pop()
    a, b = (halves(o, x, "BF16_V2" in x) for o in ins)
    compare = FLOAT_COMPARE[next(k for k in x.modifiers if k in FLOAT_COMPARE)]
    combine = BOOL[next(k for k in x.modifiers if k in BOOL)]

    def run(w, m):
        (a0, a1), (b0, b1), p = a(w), b(w), extra(w)
        put_pred(w, d.index, combine(mask_of(compare(a0, b0)), p), m)
        put_pred(w, e.index, combine(mask_of(compare(a1, b1)), p), m)

    return run


@op("F2FP")
def _(x):
    only(x, "BF16", "F16", "F32", "PACK_AB", "RELU")
    assert "PACK_AB" in x
    d, oa, ob = x.operands
    a, b, bfloat = real(oa, x), real(ob, x), "BF16" in x

    def run(w, m):
        v = [g(w) for g in (a, b)]
        if "RELU" in x:
            v = [np.where(k < 0, np.float32(0), k) for k in v]
        put(w, d.index, to_half(v[0], bfloat) << np.uint32(16) | to_half(v[1], bfloat), m)

    return run


# ---- registers of the machine


def special(w, name):
    block = w.block
    thread = 32 * w.number + LANES
    x, y, _ = block.size
    values = {
        "SR_TID.X": lambda: thread % x,
        "SR_TID.Y": lambda: thread // x % y,
        "SR_TID.Z": lambda: thread // (x * y),
        "SR_CTAID.X": lambda: LANES * 0 + block.index[0],
        "SR_CTAID.Y": lambda: LANES * 0 + block.index[1],
        "SR_CTAID.Z": lambda: LANES * 0 + block.index[2],
        "SR_LANEID": lambda: LANES,
        "SR_LTMASK": lambda: (1 << LANES) - 1,
        "SR_LEMASK": lambda: (2 << LANES) - 1,
        "SR_EQMASK": lambda: 1 << LANES,
        "SR_GTMASK": lambda: FULL & ~((2 << LANES) - 1),
        "SR_GEMASK": lambda: FULL & ~((1 << LANES) - 1),
        "SR_CgaCtaId": lambda: LANES * 0,
        "SR_SWINHI": lambda: LANES * 0 + SHARED_WINDOW,
        "SR_SWINLO": lambda: LANES * 0,
        "SRZ": lambda: LANES * 0,
    }
    if name not in values:
        raise Unsupported(f"special register {name}")
    return values[name]().astype(np.uint32)


@op("S2R", "CS2R")
def _(x):
    only(x, "32")
    d, o = x.operands
    pair = x.name == "CS2R" and "32" not in x

    def run(w, m):
        v = special(w, o.text)
        put_wide(w, d.index, v.astype(np.uint64), m) if pair else put(w, d.index, v, m)

    return run


@op("LDC")
def _(x):
    only(x, "64", "U8", "S8", "U16", "S16", "128")
    d, o = x.operands
    assert o.kind == "const"
    if x.modifiers and x.modifiers[0] in ("U8", "S8", "U16", "S16"):
        size, kind = int(x.modifiers[0][1:]) // 8, x.modifiers[0][0]

        def narrow(w, m):
            v = constant_lanes(w, o, size)
            put(
                w,
                d.index,
                v if kind == "U" else v.astype(f"u{size}").view(f"i{size}").astype(np.int32).view(np.uint32),
                m,
            )

        return narrow
    count = {"64": 2, "128": 4}.get("".join(x.modifiers), 1)
    fixed = all(r in (None, RZ) for r, _, _ in o.terms)
    offset = sum(c for _, _, c in o.terms)

    def run(w, m):
        whole = None if fixed else [constant_lanes_at(w, o, 4 * k) for k in range(count)]
        for k in range(count):
            put(w, d.index + k, w.block.constant(o.value, offset + 4 * k) if fixed else whole[k], m)

    return run


def constant_lanes_at(w, o, extra):
    other = Operand("c[0x0][RZ]")
    other.value, other.terms = o.value, [*o.terms, (None, "", extra)]
    return constant_lanes(w, other, 4)


@op("R2UR")
def _(x):
    only(x)
    d, a = x.operands[0].index, integer(x.operands[-1], x)
    return lambda w, m: put(w, d, a(w)[(m & -m).bit_length() - 1], m)


# ---- collectives of a warp


@op("SHFL")
def _(x):
    only(x, "UP", "DOWN", "BFLY", "IDX")
    out, d, oa, ob, oc = x.operands
    a, b, c = integer(oa, x), integer(ob, x), integer(oc, x)
    how = x.modifiers[0]

    def run(w, m):
        by, clamp = (b(w) & np.uint32(31)).astype(np.int64), c(w)
        limit, segment = (
            (clamp & np.uint32(31)).astype(np.int64),
            (clamp >> np.uint32(8) & np.uint32(31)).astype(np.int64),
        )
        least = LANES & segment
        most = least | limit & ~segment
        if how == "UP":
            source = LANES - by
            inside = source >= most
        else:
            source = LANES + by if how == "DOWN" else LANES ^ by if how == "BFLY" else least | by & ~segment
            inside = source <= most
        source = np.where(inside, source, LANES)
        if not lanes(m)[source][lanes(m)].all():
            raise RuntimeError(f"{w.block.kernel.name}: {x.text} reads a lane that does not take part")
        put(w, d.index, a(w)[source], m)
        put_pred(w, out.index, mask_of(inside), m)

    return run


@op("VOTE")
def _(x):
    only(x, "ANY", "ALL", "EQ")
    *d, out, o = x.operands  # the register may be missing
    p = pred(o)

    def run(w, m):
        votes, active = p(w) & m, w.group.mask
        if d:
            put(w, d[0].index, np.uint32(votes), m)
        put_pred(w, out.index, FULL if (votes != 0 if "ANY" in x else votes == active) else 0, m)

    return run


@op("MATCH")
def _(x):
    only(x, "ANY")
    d, a = x.operands[0].index, integer(x.operands[-1], x)
    weights = np.uint64(1) << LANES.astype(np.uint64)

    def run(w, m):
        v = a(w)
        same = (v[:, None] == v[None, :]) & lanes(m)[None, :]
        put(w, d, (same * weights[None, :]).sum(1).astype(np.uint32), m)

    return run


@op("REDUX")
def _(x):
    only(x, "OR", "AND", "XOR", "SUM", "MIN", "MAX", "S32", "U32")
    d, a = x.operands[0].index, (signed if "S32" in x else integer)(x.operands[1], x)
    f = {"OR": np.bitwise_or, "AND": np.bitwise_and, "XOR": np.bitwise_xor, "MIN": np.minimum, "MAX": np.maximum}
    f = f.get(next((k for k in x.modifiers if k in f), ""), np.add)
    return lambda w, m: put(w, d, np.array(f.reduce(a(w)[lanes(m)])).astype(np.int64).astype(np.uint32), m)


# ---- control flow


@op("BRA", "JMP")
def _(x):
    only(x, "DIV", "CONV", "U", "ANY")
    assert x.target is not None
    target = x.target
    conditions = [pred(o) for o in x.operands if o.kind == "pred"]
    divergent = integer(x.operands[0]) if "DIV" in x else None

    def run(w, m):
        group = w.group
        for p in conditions:
            m &= p(w)
        if "DIV" in x and int(divergent(w)[0]) & w.alive & ~group.mask == 0:
            return
        if not m:
            return
        if m == group.mask:
            group.pc = target
        else:
            w.split(group, m, target)

    return run


@op("EXIT")
def _(x):
    def run(w, m):
        w.alive &= ~m
        w.group.mask &= ~m
        w.wake()

    return run


@op("BSSY")
def _(x):
    only(x, "RECONVERGENT")
    b = x.operands[0].index

    def run(w, m):
        w.group.barriers[b] = Barrier(w.group.mask)

    return run


@op("BSYNC")
def _(x):
    only(x, "RECONVERGENT")
    b = x.operands[0].index

    def run(w, m):
        group = w.group
        if m != group.mask:
            group = w.split(group, m, group.pc)
        barrier = group.barriers[b]
        if barrier.mask & w.alive & ~group.mask == 0:
            return
        group.state = ("converge", barrier)
        w.wake()

    return run


@op("BREAK")
def _(x):
    only(x, "RELIABLE")
    b = x.operands[-1].index
    p = [pred(o) for o in x.operands if o.kind == "pred"]

    def run(w, m):
        for q in p:
            m &= q(w)
        if m:
            w.group.barriers[b].mask &= ~m
            w.wake()

    return run


@op("WARPSYNC")
def _(x):
    only(x, "ALL", "COLLECTIVE", "EXCLUSIVE")
    get = None if "ALL" in x else integer(x.operands[0], x)

    def run(w, m):
        group = w.group
        need = w.alive if get is None else int(np.bitwise_or.reduce(get(w)[lanes(m)])) & w.alive
        if need & ~group.mask == 0:
            group.parts = [group.mask]
            return
        group.state = ("warp", need)
        w.wake()

    return run


@op("ENDCOLLECTIVE")
def _(x):
    def run(w, m):
        group = w.group
        for part in group.parts[1:]:
            w.split(group, part, group.pc)

    return run


@op("CALL")
def _(x):
    only(x, "REL", "NOINC")
    assert x.target is not None
    target = x.target

    def run(w, m):
        if m == w.group.mask:
            w.group.pc = target
        else:
            w.split(w.group, m, target)

    return run


@op("RET")
def _(x):
    only(x, "REL", "NODEC")
    a = integer(x.operands[0], x)

    def run(w, m):
        to = a(w)
        for value in np.unique(to[lanes(m)]):
            mine = mask_of(to == value) & m
            if mine == w.group.mask:
                w.group.pc = int(value) // 16
            else:
                w.split(w.group, mine, int(value) // 16)

    return run


@op("BAR")
def _(x):
    only(x, "SYNC", "RED", "OR", "AND", "POPC", "DEFER_BLOCKING")
    numbers = [o for o in x.operands if o.kind != "pred"]
    assert all(o.kind == "imm" for o in numbers)
    key = numbers[0].value, numbers[1].value if len(numbers) > 1 else 0
    p = next((pred(o) for o in x.operands if o.kind == "pred"), None)

    def run(w, m):
        block, group = w.block, w.group
        if m != group.mask:
            raise RuntimeError(f"{block.kernel.name}: {x.text}: a barrier for a part of the lanes")
        entry = block.arrived.setdefault(key, [0, [0, 0], []])
        entry[0] += m.bit_count()
        if p:
            votes = (p(w) & m).bit_count()
            entry[1][0] += votes
            entry[1][1] += m.bit_count() - votes
        entry[2].append((w, group))
        group.state = ("bar", (key, tuple("".join(k) for k in x.modifiers)))
        w.reduction = x.modifiers
        for other, _ in entry[2][:-1]:
            if other is w:  # another group of this warp: the warp waits at the last
                w.last_bar[2] = False
        w.detail = w.last_bar = ["bar", entry, True]

    return run


@op("B2R")
def _(x):
    only(x, "RESULT")
    d, out = x.operands

    def run(w, m):
        yes, no = w.result
        count = yes if "POPC" in w.reduction else (yes > 0 if "OR" in w.reduction else no == 0)
        put(w, d.index, np.uint32(int(count)), m)
        put_pred(w, out.index, FULL if count else 0, m)

    return run


@op("NOP", "YIELD", "MEMBAR", "ERRBAR", "CCTL", "NANOSLEEP", "FENCE", "ACQBULK", "PREEXIT")
def _(x):
    return lambda w, m: None


@op("LDGDEPBAR")
def _(x):
    def run(w, m):
        w.copy_groups.append(w.copies)
        w.copies = []

    return run


@op("DEPBAR")
def _(x):
    only(x, "LE")
    allowed = x.operands[1].value

    def run(w, m):
        arrived = w.copy_groups[: len(w.copy_groups) - allowed]
        del w.copy_groups[: len(arrived)]
        for target, into, words in itertools.chain(*arrived):
            for k, row in enumerate(words):
                target[into + k] = row

    return run


# ---- memory


def address(o):
    """Function: warp -> uint64 addresses."""
    terms = o.terms

    def value(w):
        v = np.zeros(32, np.uint64)
        for r, suffix, c in terms:
            if r is None:
                v = v + np.uint64(c & (2**64 - 1))
            elif ".64" in suffix:
                if r not in (RZ, UNIFORM + 63):
                    v = v + (w.r[r] | w.r[r + 1].astype(np.uint64) << np.uint64(32))
            else:
                scale = re.search(r"\.X(\d+)", suffix)
                v = v + w.r[r].astype(np.uint64) * np.uint64(int(scale[1]) if scale else 1)
        return v

    return value


SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
CACHE = (
    *("E", "CONSTANT", "EF", "EL", "LU", "EU", "NA", "STRONG", "SYS", "GPU", "SM", "WEAK", "PRIVATE", "U"),
    *("LTC64B", "LTC128B", "LTC256B", "BYPASS", "ACCESS"),
)


def touch(w, addresses, size, store=False):
    """Records an access to global memory: (kind, bytes first read by the block, sectors, bytes first written, level).

    A sector comes from memory the first time, from L2 if the block has only written it, and from L1 afterwards.
    """
    sectors, read, written = set((addresses // np.uint64(32)).tolist()), w.block.read, w.block.written
    if store:
        w.detail = "global", 0, len(sectors), 32 * len(sectors - written), None
        written |= sectors
        return
    new = sectors - read
    missing = len(new - written)
    w.detail = "global", 32 * missing, len(sectors), 0, "global" if missing else "L2" if new else "L1"
    read |= sectors


def gather(w, space, addresses, size, what):
    """(a memory as words, the indexes of the addresses)."""
    if space is None:
        data, at = w.block.memory.view(addresses, size, what)
    else:
        addresses = addresses & np.uint64(FULL)
        if (addresses & np.uint64(size - 1)).any() or int(addresses.max()) + size > len(space):
            raise IndexError(
                f"{w.block.kernel.name}: {what}: shared memory at {int(addresses.max()):#x} of {len(space):#x}"
            )
        data, at = space.view(f"u{min(size, 4)}"), (addresses // np.uint64(min(size, 4))).astype(np.int64)
    return data, at


def extend(value, kind):
    """Words from 8 or 16 bits, with sign for S8 and S16."""
    if kind[0] != "S":
        return value.astype(np.uint32)
    size = SIZES[kind]
    return value.astype(f"u{size}").view(f"i{size}").astype(np.int32).view(np.uint32)


def words_of(w, index, k):
    """The k-th register of a vector; all of RZ are zero."""
    return w.r[index] if index == RZ else w.r[index + k]


@op("LDG", "LDS", "LD")
def _(x):
    only(x, *SIZES, *CACHE)
    d, o = x.operands[0], next(o for o in x.operands if o.kind == "memory")
    kind = next((k for k in x.modifiers if k in SIZES), "32")
    size, where = SIZES.get(kind, 4), address(o)

    def run(w, m):
        on = lanes(m)
        addresses = where(w)[on]
        data, at = gather(w, w.block.shared if x.name == "LDS" else None, addresses, size, x.text)
        if x.name != "LDS":
            touch(w, addresses, size)
        else:
            w.detail = ("shared", conflicts(addresses, size))
        for k in range(max(1, size // 4)):
            if d.index != RZ:
                w.r[d.index + k][on] = extend(data[at + k], kind)

    return run


@op("STG", "STS", "ST")
def _(x):
    only(x, *SIZES, *CACHE)
    o, s = x.operands
    size, where = SIZES.get(next((k for k in x.modifiers if k in SIZES), ""), 4), address(o)

    def run(w, m):
        on = lanes(m)
        addresses = where(w)[on]
        data, at = gather(w, w.block.shared if x.name == "STS" else None, addresses, size, x.text)
        if x.name != "STS":
            touch(w, addresses, size, True)
            w.block.stored.append((addresses, size))
        else:
            w.detail = ("shared", conflicts(addresses, size))
        for k in range(max(1, size // 4)):
            data[at + k] = words_of(w, s.index, k)[on].astype(data.dtype)

    return run


def conflicts(addresses, size):
    """Passes that an access to shared memory takes: distinct words in the fullest of the 32 banks."""
    words_ = np.unique(np.concatenate([addresses // np.uint64(4) + np.uint64(k) for k in range(max(1, size // 4))]))
    return int(np.bincount((words_ % np.uint64(32)).astype(np.int64)).max()) if len(words_) else 1


@op("LDL", "STL")
def _(x):
    only(x, *SIZES, "LU")
    o, r = sorted(x.operands, key=lambda o: o.kind != "memory")
    kind = next((k for k in x.modifiers if k in SIZES), "32")
    size, where = SIZES.get(kind, 4), address(o)

    def run(w, m):
        if w.local is None:
            w.local = np.zeros((STACK, 32), np.uint8)
        at = np.where(lanes(m), (where(w) & np.uint64(FULL)).astype(np.int64), 0)
        for k in range(max(1, size // 4)):
            value = np.zeros(32, np.uint32) if x.name == "LDL" else words_of(w, r.index, k)
            for byte in range(min(size, 4)):
                place = at + 4 * k + byte
                if x.name == "LDL":
                    value |= w.local[place, LANES].astype(np.uint32) << np.uint32(8 * byte)
                else:
                    on = lanes(m)
                    w.local[place[on], LANES[on]] = (value >> np.uint32(8 * byte)).astype(np.uint8)[on]
            if x.name == "LDL":
                put(w, r.index + k, extend(value, kind), m)

    return run


@op("LDGSTS")
def _(x):
    only(x, *SIZES, *CACHE, "ZFILL")
    to, source = (o for o in x.operands if o.kind == "memory")
    extra = next((pred(o) for o in x.operands if o.kind == "pred"), None)
    size = SIZES.get(next((k for k in x.modifiers if k in SIZES), ""), 4)
    write, read = address(to), address(source)

    def run(w, m):
        if extra and "ZFILL" not in x:
            m &= extra(w)
        if not m:
            return
        on = lanes(m)
        addresses, places = read(w)[on], write(w)[on]
        target, into = gather(w, w.block.shared, places, size, x.text)
        full = lanes(extra(w))[on] if extra and "ZFILL" in x else np.ones(len(addresses), bool)
        words = np.zeros((max(1, size // 4), len(addresses)), target.dtype)
        if full.any():
            data, at = gather(w, None, addresses[full], size, x.text)
            touch(w, addresses[full], size)
            for k, row in enumerate(words):
                row[full] = data[at + k]
        w.copies.append((target, into, words))  # the words arrive when the warp waits for them

    return run
