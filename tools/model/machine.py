"""Opcodes of the machine's registers, collectives of a warp, control flow and memory: see operands.py."""

import itertools
import re

import numpy as np
from operands import (
    FULL,
    LANES,
    SHARED_WINDOW,
    Barrier,
    constant_lanes,
    integer,
    lanes,
    mask_of,
    only,
    op,
    pred,
    put,
    put_pred,
    put_wide,
)
from sass import RZ, UNIFORM, Unsupported

# ---- registers of the machine


SPECIAL = {
    "SR_TID.X": lambda w, thread: thread % w.block.size[0],
    "SR_TID.Y": lambda w, thread: thread // w.block.size[0] % w.block.size[1],
    "SR_TID.Z": lambda w, thread: thread // (w.block.size[0] * w.block.size[1]),
    "SR_CTAID.X": lambda w, thread: w.block.index[0],
    "SR_CTAID.Y": lambda w, thread: w.block.index[1],
    "SR_CTAID.Z": lambda w, thread: w.block.index[2],
    "SR_LANEID": lambda w, thread: LANES,
    "SR_LEMASK": lambda w, thread: (2 << LANES) - 1,
    "SR_CgaCtaId": lambda w, thread: 0,
    "SR_SWINHI": lambda w, thread: SHARED_WINDOW,
    "SRZ": lambda w, thread: 0,
}


@op("S2R", "CS2R")
def _(x):
    only(x, "32")
    d, o = x.operands
    if o.text not in SPECIAL:
        raise Unsupported(f"special register {o.text}")
    store = put_wide if x.name == "CS2R" and "32" not in x else put

    def run(w, m):
        v = SPECIAL[o.text](w, 32 * w.number + LANES)
        store(w, d.index, np.broadcast_to(np.asarray(v, np.uint64), 32), m)

    return run


@op("LDC")
def _(x):
    only(x, "64", "U8", "128")
    d, o = x.operands
    assert o.kind == "const"
    if "U8" in x:
        return lambda w, m: put(w, d.index, constant_lanes(w, o, 1), m)
    count = {"64": 2, "128": 4}.get("".join(x.modifiers), 1)
    fixed = all(r in (None, RZ) for r, _, _ in o.terms)
    offset = sum(c for _, _, c in o.terms)

    def run(w, m):
        at = [4 * k for k in range(count)]
        words = [w.block.constant(o.value, offset + k) if fixed else constant_lanes(w, o, 4, k) for k in at]
        for k, word in enumerate(words):
            put(w, d.index + k, word, m)

    return run


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
        by, limit = (b(w) & np.uint32(31)).astype(np.int64), int(c(w)[0])
        if limit != (0 if how == "UP" else 31):
            raise Unsupported(f"a part of a warp: {x.text}")
        source = {"UP": LANES - by, "DOWN": LANES + by, "BFLY": LANES ^ by, "IDX": by}[how]
        inside = (source >= 0) & (source < 32)
        source = np.where(inside, source, LANES)
        if not lanes(m)[source][lanes(m)].all():
            raise RuntimeError(f"{w.block.kernel.name}: {x.text} reads a lane that does not take part")
        put(w, d.index, a(w)[source], m)
        put_pred(w, out.index, mask_of(inside), m)

    return run


@op("VOTE")
def _(x):
    only(x, "ANY")
    *d, out, o = x.operands  # the register may be missing
    p = pred(o)

    def run(w, m):
        votes = p(w) & m
        if d:
            put(w, d[0].index, np.uint32(votes), m)
        put_pred(w, out.index, FULL if votes else 0, m)

    return run


# ---- control flow


@op("BRA")
def _(x):
    only(x, "DIV", "U")
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
        if m:
            w.jump(m, target)

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


@op("BMOV")
def _(x):  # on sm_75: a barrier that no lane waits for any more
    only(x, "32", "CLEAR")
    d, b = x.operands
    assert d.index == RZ
    return lambda w, m: w.group.barriers.pop(b.index, None)


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
    return lambda w, m: w.jump(m, x.target)


@op("RET")
def _(x):
    only(x, "REL", "NODEC")
    a = integer(x.operands[0], x)

    def run(w, m):
        to = a(w)
        for value in np.unique(to[lanes(m)]):
            w.jump(mask_of(to == value) & m, int(value) // 16)

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


@op("NOP", "YIELD")
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


SIZES = {"U16": 2, "64": 8, "128": 16}
CACHE = "E", "CONSTANT", "SYS", "U", "BYPASS"  # say nothing about results


def size_of(x):
    return next((SIZES[k] for k in x.modifiers if k in SIZES), 4)


def touch(w, addresses, size, store=False):
    """Records an access to global memory: (kind, bytes first read by the block, sectors, bytes first written, level,
    lines of 128 bytes).

    A sector comes from memory the first time, from L2 if the block has only written it, and from L1 afterwards.
    """
    sectors, read, written = set((addresses // np.uint64(32)).tolist()), w.block.read, w.block.written
    lines = len({sector // 4 for sector in sectors})
    if store:
        w.detail = "global", 0, len(sectors), 32 * len(sectors - written), None, lines
        written |= sectors
        return
    new = sectors - read
    missing = len(new - written)
    level = "global" if missing else "L2" if new else "L1"
    w.detail = "global", 32 * missing, len(sectors), 0, level, lines
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


@op("LDG", "LDS", "LD")
def _(x):
    only(x, *SIZES, *CACHE)
    d, o = x.operands[0], next(o for o in x.operands if o.kind == "memory")
    size, where = size_of(x), address(o)

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
                w.r[d.index + k][on] = data[at + k].astype(np.uint32)

    return run


@op("STG", "STS", "ST")
def _(x):
    only(x, *SIZES, *CACHE)
    o, s = x.operands
    size, where = size_of(x), address(o)

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
            data[at + k] = w.r[s.index + (0 if s.index == RZ else k)][on].astype(data.dtype)

    return run


def conflicts(addresses, size):
    """Passes that an access to shared memory takes: distinct words in the fullest of the 32 banks."""
    words_ = np.unique(np.concatenate([addresses // np.uint64(4) + np.uint64(k) for k in range(max(1, size // 4))]))
    return int(np.bincount((words_ % np.uint64(32)).astype(np.int64)).max()) if len(words_) else 1


@op("LDGSTS")
def _(x):
    only(x, *SIZES, *CACHE, "ZFILL")
    to, source = (o for o in x.operands if o.kind == "memory")
    extra = next((pred(o) for o in x.operands if o.kind == "pred"), None)
    size = size_of(x)
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
