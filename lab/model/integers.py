"""Opcodes of integers, bits and predicates: see operands.py."""

import functools
import operator

import numpy as np
from operands import FULL, addend, integer, lanes, mask_of, op, ordered, put, put_pred, step, wide, words

COMPARE = {name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")}


def low_word(v):
    return v.astype(np.uint32)


def high_word(v):
    return (v >> np.uint64(32)).astype(np.uint32)


def pair(low, high):
    return low | high.astype(np.uint64) << np.uint64(32)


op("MOV")(lambda x, a, *_: a)
op("VIADD")(lambda x, a, b: a + b)
op("IABS", read=ordered)(lambda x, a: np.abs(a))
op("SEL")(lambda x, a, b, p: np.where(p, a, b))


@op("BREV")
def _(x, a):
    bit, top = np.uint32(1), range(32)
    return functools.reduce(np.bitwise_or, ((a >> np.uint32(k) & bit) << np.uint32(31 - k) for k in top))


@op("FLO", allow="U32 SH")
def _(x, a):
    assert "U32" in x
    place = np.array([int(k).bit_length() - 1 for k in a], np.int32)
    return np.where(a == 0, np.int32(-1), 31 - place if "SH" in x else place)


@op("PRMT")
def _(x, a, how, b):
    v, out = pair(a, b), np.zeros(32, np.uint32)
    for k in range(4):
        pick = how >> np.uint32(4 * k)
        byte = low_word(v >> (pick & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255))
        byte = np.where(pick & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
        out |= byte << np.uint32(8 * k)
    return out


def factor(o, x):
    if "WIDE" not in x and "HI" not in x:
        return integer(o, x)
    get = ordered(o, x)
    return lambda w: get(w).astype(np.uint64 if "U32" in x else np.int64).view(np.uint64)


def term(o, x):
    return (wide if "WIDE" in x or "HI" in x else integer)(o, x)


@op("IMAD", allow="MOV U32 IADD SHL X WIDE HI", read=(factor, factor, term))
def _(x, a, b, c, carry=None):
    ab = a * b
    v = ab + c if carry is None else ab + c + carry
    yield high_word(v) if "HI" in x else v
    yield v < ab


@op("IADD3", allow="X", read=addend)
def _(x, *terms):
    v = sum(terms, np.uint64(0))
    yield low_word(v)
    for k in (0, 1):
        yield high_word(v) > k


def shifted(o, x):
    """The first operand of LEA, and whether its product is subtracted."""
    assert not o.inverted
    assert not (o.negative and "HI" in x)
    get = words(o, x)
    return lambda w: (get(w), o.negative)


@op("LEA", allow="HI X SX32", read=(shifted, addend, integer))
def _(x, first, b, *rest):
    (a, negative), (*rest, carry) = first, rest if "X" in x else (*rest, False)
    by = rest[-1].astype(np.uint64)
    if "HI" in x:
        high = (a.view(np.int32) >> 31).view(np.uint32) if "SX32" in x else rest[0]
        v = pair(a, high) << by >> np.uint64(32)
    else:
        v = a.astype(np.uint64) << by & np.uint64(FULL)
    v = (np.uint64(1 << 32) - v if negative else v) + b + carry  # as in addend
    yield low_word(v)
    yield high_word(v) > 0


@op("SHF", allow="L R W U32 S32 U64 S64 HI")
def _(x, a, by, c):
    bits = 64 if "U64" in x or "S64" in x else 32
    by = by & np.uint32(bits - 1) if "W" in x else np.minimum(by, np.uint32(bits))
    v, all_out, by = pair(a, c), by >= 64, np.minimum(by, 63).astype(np.uint64)
    if "S32" in x or "S64" in x:
        v = (v.view(np.int64) >> by.astype(np.int64)).view(np.uint64)
    else:
        v = np.where(all_out, np.uint64(0), v << by if "L" in x else v >> by)
    return high_word(v) if "HI" in x else low_word(v)


def lut(table, a, b, c, ones):
    """A bitwise function of three inputs by its truth table."""
    value = a ^ a
    for k in range(8):
        if table >> k & 1:
            value = value | ((a if k & 4 else a ^ ones) & (b if k & 2 else b ^ ones) & (c if k & 1 else c ^ ones))
    return value


LUTS = {  # the frequent ones, faster
    0xC0: lambda a, b, c: a & b,
    0xFC: lambda a, b, c: a | b,
    0x3C: lambda a, b, c: a ^ b,
    0xFE: lambda a, b, c: a | b | c,
    0xF8: lambda a, b, c: a | (b & c),
    0xEA: lambda a, b, c: (a & b) | c,
}


@op("LOP3", allow="LUT PAND")
def _(x, a, b, c, table, extra=None):
    table = int(table[0])
    v = LUTS[table](a, b, c) if table in LUTS else lut(table, a, b, c, np.uint32(FULL))
    if x.operands[0].kind == "pred":
        some = v != 0
        yield some & extra if "PAND" in x else some | extra
    yield v


@op("PLOP3", allow="LUT")
def _(x, a, b, c, *tables):
    return (lut(int(table[0]), a, b, c, np.True_) for table in tables)


def both(x, found, extra):
    """A comparison and its complement, each combined with a third predicate."""
    combine = np.logical_and if "AND" in x else np.logical_or
    yield combine(found, extra)
    yield combine(~found, extra)


@op("ISETP", allow="LT LE GT GE EQ NE AND OR U32 EX", read=ordered)
def _(x, a, b, extra, low=None):
    """`low`: of the low words."""
    name = x.modifiers[0]
    if low is None:
        found = COMPARE[name](a, b)
    elif name == "NE":
        found = (a != b) | low
    else:
        found = COMPARE[{"GE": "GT", "LE": "LT"}.get(name, name)](a, b) & (name != "EQ") | (a == b) & low
    return both(x, found, extra)


@op("VIMNMX", "VIMNMX3", "IMNMX", "VIADDMNMX", allow="U32 RELU", read=ordered)
def _(x, *v):
    *v, least = v
    if x.name.endswith("VIADDMNMX"):
        v[:2] = [v[0] + v[1]]
    v = np.where(least, functools.reduce(np.minimum, v), functools.reduce(np.maximum, v))
    return np.maximum(v, v.dtype.type(0)) if "RELU" in x else v


@step("P2R")
def _(x, w, m):
    d, _, oa, om = x.operands
    v = integer(oa, x)(w) & np.uint32(~om.value & FULL)
    for k in range(7):
        if om.value >> k & 1:
            v = v | lanes(w.p[k]).astype(np.uint32) << np.uint32(k)
    put(w, d.index, v, m)


@step("R2P")
def _(x, w, m):
    _, oa, om = x.operands
    v = integer(oa, x)(w)
    for k in range(7):
        if om.value >> k & 1:
            put_pred(w, k, mask_of(v >> np.uint32(k) & 1 != 0), m)
