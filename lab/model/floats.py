"""Opcodes of float32, float64 and pairs of halves: see operands.py. MUFU results are rounded from double precision;
DFMA rounds the product to 64 bits first."""

import functools

import numpy as np
from integers import COMPARE, both, high_word, pair
from operands import double, flush, integer, op, real, wide, words

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
ROUNDING = "RM RP RZ"


def rounded(v, x):
    """float64 -> float32 by the rounding that the instruction names."""
    r = v.astype(np.float32)
    if "RM" in x:
        r = np.where(r > v, np.nextafter(r, np.float32(-np.inf)), r)
    elif "RP" in x:
        r = np.where(r < v, np.nextafter(r, np.float32(np.inf)), r)
    elif "RZ" in x:
        r = np.where(np.abs(r) > np.abs(v), np.nextafter(r, np.float32(0)), r)
    return flush(r) if "FTZ" in x else r


def arithmetic(x, v):
    """Of float64 values: the product of two floats is exact there."""
    return v[0] * v[1] + v[2] if "FMA" in x.name else v[0] * v[1] if "MUL" in x.name else v[0] + v[1]


@op("FADD", "FMUL", "FFMA", allow=f"FTZ {ROUNDING}", read=real)
def _(x, *v):
    if not x.modifiers and x.name != "FFMA":  # one rounding either way
        return arithmetic(x, v)
    return rounded(arithmetic(x, [k.astype(np.float64) for k in v]), x)


@op("DADD", "DMUL", "DFMA", allow=ROUNDING, read=double)
def _(x, *v):
    return arithmetic(x, [k.astype(np.longdouble) for k in v] if x.name == "DFMA" else v).astype(np.float64)


op("FSEL", read=real)(lambda x, a, b, p: np.where(p, a, b))


def compare(x, a, b, extra):
    return both(x, FLOAT_COMPARE[x.modifiers[0]](a, b), extra)


op("FSETP", allow=f"{' '.join(FLOAT_COMPARE)} AND OR FTZ", read=real)(compare)
op("DSETP", allow=f"{' '.join(FLOAT_COMPARE)} AND OR", read=double)(compare)


def extreme(x, v, least):
    """The least or the largest of float32 values in each lane."""
    low, high = (np.minimum, np.maximum) if "NAN" in x else (np.fmin, np.fmax)
    return np.where(least, functools.reduce(low, v), functools.reduce(high, v))


op("FMNMX", "FMNMX3", allow="NAN FTZ", read=real)(lambda x, *v: extreme(x, v[:-1], v[-1]))

MUFU = {"EX2": np.exp2, "LG2": np.log2, "RCP": lambda v: 1 / v, "RSQ": lambda v: 1 / np.sqrt(v)}


def is_high(x):
    """Whether MUFU works on the high word of a double."""
    return x.modifiers[0].endswith("64H")


@op("MUFU", allow="EX2 LG2 RCP RSQ RCP64H RSQ64H", read=lambda o, x: (integer if is_high(x) else real)(o, x))
def _(x, a):
    f = MUFU[x.modifiers[0].removesuffix("64H")]
    if is_high(x):
        return high_word(f(pair(np.uint32(0), a).view(np.float64)).view(np.uint64))
    return flush(f(flush(a).astype(np.float64)).astype(np.float32))


@op("FCHK", read=real)
def _(x, a, b):
    ea, eb = (v.view(np.uint32).astype(np.int64) >> 23 & 255 for v in (a, b))
    return (eb == 0) | (eb >= 253) | (ea == 255) | (ea < 24) | (ea - eb > 126) | (ea - eb < -125)


def kind_of(x):
    kind = next((k for k in x.modifiers if k[0] in "SU"), "S32")
    return np.dtype(f"{'i' if kind[0] == 'S' else 'u'}{int(kind[1:]) // 8}")


@op(
    "I2F",
    "I2FP",
    allow=f"F32 F64 S16 U16 S32 U32 S64 U64 {ROUNDING}",
    read=lambda o, x: (wide if kind_of(x).itemsize == 8 else integer)(o, x),
)
def _(x, a):
    kind = kind_of(x)
    v = a.astype(f"u{kind.itemsize}").view(kind).astype(np.float64)
    return v if "F64" in x else rounded(v, x)


@op("F2I", allow="TRUNC NTZ FTZ U32 S32 F64 F32", read=lambda o, x: (double if "F64" in x else real)(o, x))
def _(x, a):
    low, high = (0, 2**32 - 1) if "U32" in x else (-(2**31), 2**31 - 1)
    v = a.astype(np.float64)
    v = np.clip(np.nan_to_num(np.trunc(v) if "TRUNC" in x else np.rint(v)), low, high)
    return v.astype(np.int64).astype(np.uint32)


@op("F2F", allow="F16 F32 F64", read=lambda o, x: (double if x.modifiers[1] == "F64" else real)(o, x))
def _(x, a):
    to = x.modifiers[0]
    return to_half(a, False) if to == "F16" else a.astype({"F32": np.float32, "F64": np.float64}[to])


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


def is_bfloat(x):
    return "BF16_V2" in x or "BF16" in x


def halves(o, x):
    """(low, high) as float32."""
    get = (lambda w: np.full(32, x.bits, np.uint32)) if o.kind == "imm" else words(o, x)
    parts = {".H0_H0": (0, 0), ".H1_H1": (1, 1), "": (0, 1), ".H1_H0": (0, 1)}[o.suffix]

    def value(w):
        v = [from_half(get(w) >> np.uint32(16 * k), is_bfloat(x)) for k in parts]
        v = [np.abs(k) for k in v] if o.absolute else v
        return [-k for k in v] if o.negative else v

    return value


def both_halves(x, f, pairs):
    low, high = (f(part) for part in zip(*pairs))
    return low.astype(np.float32) if "F32" in x else packed(x, low, high)


def packed(x, low, high):
    return to_half(low, is_bfloat(x)) | to_half(high, is_bfloat(x)) << np.uint32(16)


@op("HADD2", "HFMA2", allow="F32 BF16_V2 MMA FTZ BF16", read=halves)
def _(x, *pairs):
    return both_halves(x, lambda part: arithmetic(x, [v.astype(np.float64) for v in part]), pairs)


@op("HMNMX2", "VHMNMX", allow="BF16_V2 NAN", read=halves)
def _(x, *pairs):
    *pairs, least = pairs
    return both_halves(x, lambda part: extreme(x, part, least), pairs)


op("F2FP", allow="BF16 F16 F32 PACK_AB", read=real)(lambda x, high, low: packed(x, low, high))
