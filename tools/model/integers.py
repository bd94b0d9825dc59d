"""Opcodes of integers, bits and predicates: see operands.py."""

import functools

import numpy as np
from operands import (
    FULL,
    addend,
    integer,
    lanes,
    mask_of,
    only,
    op,
    outputs,
    pred,
    put,
    put_pred,
    put_wide,
    signed,
    wide,
    widened,
    words,
)

COMPARE = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}
BOOL = {"AND": lambda a, b: a & b, "OR": lambda a, b: a | b}


def low_word(v):
    return (v & np.uint64(FULL)).astype(np.uint32)


def elementwise(read=integer, allowed=()):
    """Registers a function of the values of an instruction's inputs as the instruction `__name__`."""

    def add(f):
        @op(f.__name__)
        def _(x):
            only(x, *allowed)
            d, gets = x.operands[0].index, [read(o, x) for o in x.operands[1:]]
            return lambda w, m: put(w, d, f(*(g(w) for g in gets)), m)

        return f

    return add


@elementwise()
def MOV(a, *_):
    return a


@elementwise()
def VIADD(a, b):
    return a + b


@elementwise(signed)
def IABS(a):
    return np.abs(a).view(np.uint32)


@elementwise()
def BREV(a):
    return functools.reduce(np.bitwise_or, ((a >> np.uint32(k) & np.uint32(1)) << np.uint32(31 - k) for k in range(32)))


@elementwise()
def PRMT(a, how, b):
    v, out = a | b.astype(np.uint64) << np.uint64(32), np.zeros(32, np.uint32)
    for k in range(4):
        pick = how >> np.uint32(4 * k)
        byte = (v >> (pick & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)).astype(np.uint32)
        byte = np.where(pick & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
        out |= byte << np.uint32(8 * k)
    return out


@op("IMAD")
def _(x):
    only(x, "MOV", "U32", "IADD", "SHL", "X", "WIDE", "HI")
    d, carries, (oa, ob, oc, *ins) = outputs(x)
    carry = pred(ins[0]) if ins else None
    if "WIDE" not in x and "HI" not in x:
        a, b, c = integer(oa, x), integer(ob, x), integer(oc, x)
        if not carry:
            return lambda w, m: put(w, d, a(w) * b(w) + c(w), m)
        return lambda w, m: put(w, d, a(w) * b(w) + c(w) + lanes(carry(w)), m)
    read, kind = (integer, np.uint64) if "U32" in x else (signed, np.int64)
    a, b, c = widened(read(oa, x), kind), widened(read(ob, x), kind), wide(oc, x)

    def product(w, m):
        ab = a(w) * b(w)
        v = ab + c(w)
        if carry:
            v = v + lanes(carry(w)).astype(np.uint64)
        if "HI" in x:
            put(w, d, (v >> np.uint64(32)).astype(np.uint32), m)
        else:
            put_wide(w, d, v, m)
        for p in carries:
            put_pred(w, p, mask_of(v < ab), m)

    return product


@op("IADD3")
def _(x):
    only(x, "X")
    d, carries, rest = outputs(x)
    ins = [pred(o) for o in rest if o.kind == "pred"]
    gets = [addend(o, x) for o in rest if o.kind != "pred" and o.text not in ("RZ", "URZ")]

    def add(w, m):
        v = sum((g(w) for g in gets), np.zeros(32, np.uint64))
        for p in ins:
            v = v + lanes(p(w)).astype(np.uint64)
        put(w, d, low_word(v), m)
        for k, p in enumerate(carries):
            put_pred(w, p, mask_of(v >> np.uint64(32) > k), m)

    return add


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
        put(w, d, low_word(v), m)
        for p in carries:
            put_pred(w, p, mask_of(v >> np.uint64(32) > 0), m)

    return lea


@op("SHF")
def _(x):
    only(x, "L", "R", "W", "U32", "S32", "U64", "S64", "HI")
    d, (a, s, c) = x.operands[0].index, (integer(o, x) for o in x.operands[1:])
    bits = 64 if "U64" in x or "S64" in x else 32
    part = np.uint64(32 if "HI" in x else 0)

    def shift(w, m):
        by = s(w) & np.uint32(bits - 1) if "W" in x else np.minimum(s(w), np.uint32(bits))
        v = a(w) | c(w).astype(np.uint64) << np.uint64(32)
        all_out, by = by >= 64, np.minimum(by, 63).astype(np.uint64)
        if "S32" in x or "S64" in x:
            v = (v.view(np.int64) >> by.astype(np.int64)).view(np.uint64)
        else:
            v = np.where(all_out, np.uint64(0), v << by if "L" in x else v >> by)
        put(w, d, low_word(v >> part), m)

    return shift


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


@op("LOP3")
def _(x):
    only(x, "LUT", "PAND")
    ops, out = list(x.operands), None
    if ops[0].kind == "pred":
        out = ops.pop(0).index
    d, (a, b, c) = ops[0].index, (integer(o, x) for o in ops[1:4])
    f = LUTS.get(ops[4].value) or functools.partial(lut, ops[4].value, ones=np.uint32(FULL))
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
    gets, tables = [pred(o) for o in ins[:3]], [o.value for o in ins[3:5]]

    def logic(w, m):
        values = [g(w) for g in gets]
        results = [lut(table, *values, FULL) for table in tables]
        put_pred(w, d.index, results[0], m)
        put_pred(w, e.index, results[1], m)

    return logic


def put_comparison(w, x, found, combine, extra, m):
    """A comparison and its complement, each combined with a third predicate."""
    d, e, *_ = x.operands
    put_pred(w, d.index, combine(found, extra), m)
    put_pred(w, e.index, combine(~found & FULL, extra), m)


@op("ISETP")
def _(x):
    only(x, *COMPARE, *BOOL, "U32", "EX")
    _, _, oa, ob, oin, *oex = x.operands
    read = integer if "U32" in x else signed
    a, b, extra = read(oa, x), read(ob, x), pred(oin)
    name, combine = x.modifiers[0], BOOL[next(k for k in x.modifiers if k in BOOL)]
    strict = COMPARE[{"GE": "GT", "LE": "LT"}.get(name, name)]
    low = pred(oex[0]) if oex else None  # of the low words

    def setp(w, m):
        va, vb = a(w), b(w)
        if not low:
            v = mask_of(COMPARE[name](va, vb))
        elif name == "NE":
            v = mask_of(va != vb) | low(w)
        else:
            v = mask_of(va == vb) & low(w)
            v |= 0 if name == "EQ" else mask_of(strict(va, vb))
        put_comparison(w, x, v, combine, extra(w), m)

    return setp


@op("SEL")
def _(x):
    only(x)
    d, oa, ob, op_ = x.operands
    a, b, p = integer(oa, x), integer(ob, x), pred(op_)
    return lambda w, m: put(w, d.index, np.where(lanes(p(w)), a(w), b(w)), m)


@op("VIMNMX", "VIMNMX3", "IMNMX", "VIADDMNMX")
def _(x):
    only(x, "U32", "RELU")
    d, *ins, op_ = x.operands
    while ins[0].text == "PT":  # on sm_100: predicates that nobody wants
        ins.pop(0)
    gets, p, kind = [integer(o, x) for o in ins], pred(op_), np.uint32 if "U32" in x else np.int32

    def run(w, m):
        v = [g(w) for g in gets]
        if x.name == "VIADDMNMX":
            v[:2] = [v[0] + v[1]]
        v = [k.view(kind) for k in v]
        v = np.where(lanes(p(w)), functools.reduce(np.minimum, v), functools.reduce(np.maximum, v))
        put(w, d.index, (np.maximum(v, kind(0)) if "RELU" in x else v).view(np.uint32), m)

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


@op("P2R", "R2P")
def _(x):
    only(x)
    d, _, oa, om = x.operands if x.name == "P2R" else (None, *x.operands)
    a, chosen = integer(oa, x), [k for k in range(7) if om.value >> k & 1]

    def pack(w, m):
        v = a(w) & np.uint32(~om.value & FULL)
        for k in chosen:
            v = v | lanes(w.p[k]).astype(np.uint32) << np.uint32(k)
        put(w, d.index, v, m)

    def unpack(w, m):
        v = a(w)
        for k in chosen:
            put_pred(w, k, mask_of(v >> np.uint32(k) & 1 != 0), m)

    return pack if d else unpack
