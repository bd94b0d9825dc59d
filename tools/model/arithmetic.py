"""Opcodes of integers, float32 and float64, and pairs of halves: see operations.py."""

import functools

import numpy as np
from operands import (
    FULL,
    addend,
    double,
    flush,
    integer,
    lanes,
    mask_of,
    only,
    op,
    outputs,
    pred,
    put,
    put_double,
    put_float,
    put_pred,
    put_wide,
    real,
    rounded,
    signed,
    wide,
    widened,
    words,
)

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
    while ins[0].text == "PT":  # on sm_100: predicates that nobody wants
        ins.pop(0)
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
