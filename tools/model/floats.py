"""Opcodes of float32, float64 and pairs of halves: see operands.py. MUFU results are rounded from double precision;
DFMA rounds the product to 64 bits first."""

import functools

import numpy as np
from integers import BOOL, COMPARE, put_comparison
from operands import (
    FULL,
    double,
    flush,
    integer,
    lanes,
    mask_of,
    only,
    op,
    pred,
    put,
    put_double,
    put_float,
    put_pred,
    real,
    rounded,
    wide,
    words,
)

FLOAT_COMPARE = {
    **COMPARE,
    "NE": lambda a, b: (a < b) | (a > b),
    "NAN": lambda a, b: (a != a) | (b != b),
    "LTU": lambda a, b: ~(a >= b),
    "LEU": lambda a, b: ~(a > b),
    "GTU": lambda a, b: ~(a <= b),
    "GEU": lambda a, b: ~(a < b),
    "NEU": lambda a, b: a != b,
}


def sum_or_product(name, v):
    """Of float64 values: the product of two floats is exact there."""
    return v[0] + v[1] if name[1:] in ("ADD", "ADD2") else v[0] * v[1] + v[2] if "FMA" in name else v[0] * v[1]


@op("FADD", "FMUL", "FFMA")
def _(x):
    only(x, "FTZ", "RM", "RP", "RZ", "SAT")
    d, gets = x.operands[0].index, [real(o, x) for o in x.operands[1:]]
    if not x.modifiers and x.name != "FFMA":  # one rounding either way
        return lambda w, m: put_float(w, d, sum_or_product(x.name, [g(w) for g in gets]), m)

    def run(w, m):
        v = sum_or_product(x.name, [g(w).astype(np.float64) for g in gets])
        put_float(w, d, rounded(v, x) if x.modifiers else v, m)

    return run


@op("DADD", "DMUL", "DFMA")
def _(x):
    only(x, "RP", "RM", "RZ")
    d, gets = x.operands[0].index, [double(o, x) for o in x.operands[1:]]
    kind = np.longdouble if x.name == "DFMA" else np.float64
    return lambda w, m: put_double(w, d, sum_or_product(x.name, [g(w).astype(kind) for g in gets]), m)


@op("FSEL")
def _(x):
    only(x)
    d, oa, ob, op_ = x.operands
    a, b, p = real(oa, x), real(ob, x), pred(op_)
    return lambda w, m: put_float(w, d.index, np.where(lanes(p(w)), a(w), b(w)), m)


@op("FSETP", "DSETP")
def _(x):
    only(x, *FLOAT_COMPARE, *BOOL, "FTZ")
    _, _, oa, ob, oin = x.operands
    read = real if x.name == "FSETP" else double
    a, b, extra = read(oa, x), read(ob, x), pred(oin)
    compare = FLOAT_COMPARE[x.modifiers[0]]
    combine = BOOL[next(k for k in x.modifiers if k in BOOL)]
    return lambda w, m: put_comparison(w, x, mask_of(compare(a(w), b(w))), combine, extra(w), m)


@op("FMNMX", "FMNMX3")
def _(x):
    only(x, "NAN", "FTZ")
    d, *ins, op_ = x.operands
    gets, p = [real(o, x) for o in ins], pred(op_)
    low, high = (np.minimum, np.maximum) if "NAN" in x else (np.fmin, np.fmax)

    def run(w, m):
        v = [g(w) for g in gets]
        put_float(w, d.index, np.where(lanes(p(w)), functools.reduce(low, v), functools.reduce(high, v)), m)

    return run


MUFU = {"EX2": np.exp2, "LG2": np.log2, "RCP": lambda v: 1 / v, "RSQ": lambda v: 1 / np.sqrt(v)}


@op("MUFU")
def _(x):
    d, f = x.operands[0].index, MUFU[x.modifiers[0].removesuffix("64H")]
    if x.modifiers[0].endswith("64H"):  # the high word of a double
        a = integer(x.operands[1], x)

        def high(w, m):
            v = f((a(w).astype(np.uint64) << np.uint64(32)).view(np.float64))
            put(w, d, (v.view(np.uint64) >> np.uint64(32)).astype(np.uint32), m)

        return high
    only(x, *MUFU)
    a = real(x.operands[1], x)
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


@op("I2F", "I2FP")
def _(x):
    only(x, "F32", "F64", "S32", "U32", "S64", "U64", "S16", "U16", "RP", "RM", "RZ")
    d, o = x.operands
    kind = next((k for k in x.modifiers if k[0] in "SU"), "S32")
    dtype = np.dtype(f"{'i' if kind[0] == 'S' else 'u'}{int(kind[1:]) // 8}")
    get = wide(o, x) if dtype.itemsize == 8 else integer(o, x)

    def run(w, m):
        v = get(w).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float64)
        put_double(w, d.index, v, m) if "F64" in x else put_float(w, d.index, rounded(v, x), m)

    return run


@op("F2I")
def _(x):
    only(x, "TRUNC", "NTZ", "FTZ", "U32", "S32", "F64", "F32")
    d, o = x.operands
    get = double(o, x) if "F64" in x else real(o, x)
    low, high = (0, 2**32 - 1) if "U32" in x else (-(2**31), 2**31 - 1)

    def run(w, m):
        v = get(w).astype(np.float64)
        v = np.clip(np.nan_to_num(np.trunc(v) if "TRUNC" in x else np.rint(v)), low, high)
        put(w, d.index, (v.astype(np.int64) & FULL).astype(np.uint32), m)

    return run


@op("F2F")
def _(x):
    d, o = x.operands
    if x.modifiers == ["F64", "F32"]:
        get = real(o, x)
        return lambda w, m: put_double(w, d.index, get(w), m)
    get = (double if x.modifiers[1] == "F64" else real)(o, x)
    if x.modifiers[0] == "F16":
        return lambda w, m: put(w, d.index, to_half(get(w), False), m)
    assert x.modifiers == ["F32", "F64"]
    return lambda w, m: put_float(w, d.index, get(w), m)


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


@op("HADD2", "HFMA2")
def _(x):
    only(x, "F32", "BF16_V2", "MMA", "FTZ", "BF16")
    bfloat = "BF16_V2" in x or "BF16" in x
    d, gets = x.operands[0].index, [halves(o, x, bfloat) for o in half_operands(x)]

    def run(w, m):
        low, high = (
            sum_or_product(x.name, [v.astype(np.float64) for v in part]) for part in zip(*(g(w) for g in gets))
        )
        if "F32" in x:
            put_float(w, d, low, m)
        else:
            put(w, d, to_half(low, bfloat) | to_half(high, bfloat) << np.uint32(16), m)

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


@op("F2FP")
def _(x):
    only(x, "BF16", "F16", "F32", "PACK_AB")
    assert "PACK_AB" in x
    d, oa, ob = x.operands
    a, b, bfloat = real(oa, x), real(ob, x), "BF16" in x
    return lambda w, m: put(w, d.index, to_half(a(w), bfloat) << np.uint32(16) | to_half(b(w), bfloat), m)
