"""Opcodes of the machine's registers, collectives of a warp, control flow and memory: see operands.py."""

import itertools
import re

import numpy as np
from operands import (
    FULL,
    LANES,
    NOWHERE,
    SHARED_WINDOW,
    Barrier,
    constant_lanes,
    integer,
    lanes,
    machine,
    mask_of,
    pred,
    put,
    put_pred,
    step,
)
from sass import RZ, Unsupported

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


@step("S2R", "CS2R")
def _(x, w, m):
    d, o = x.operands
    if o.text not in SPECIAL:
        raise Unsupported(f"special register {o.text}")
    value = SPECIAL[o.text](w, 32 * w.number + LANES)
    put(w, d.index, np.full(32, value, np.uint64 if x.name == "CS2R" else np.uint32), m)


@machine("LDC", allow="64 U8 128")
def _(x):
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


@step("R2UR")
def _(x, w, m):
    put(w, x.operands[0].index, integer(x.operands[-1], x)(w)[(m & -m).bit_length() - 1], m)


# ---- collectives of a warp


@machine("SHFL", allow="UP DOWN BFLY IDX")
def _(x):
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


@step("VOTE", allow="ANY")
def _(x, w, m):
    *d, out, o = x.operands  # the register may be missing
    votes = pred(o)(w) & m
    if d:
        put(w, d[0].index, np.uint32(votes), m)
    put_pred(w, out.index, FULL if votes else 0, m)


# ---- control flow


@machine("BRA", allow="DIV U")
def _(x):
    assert x.target is not None
    conditions = [pred(o) for o in x.operands if o.kind == "pred"]
    divergent = integer(x.operands[0]) if "DIV" in x else None

    def run(w, m):
        for p in conditions:
            m &= p(w)
        if m and not (divergent and int(divergent(w)[0]) & w.alive & ~w.group.mask == 0):
            w.jump(m, x.target)

    return run


@step("EXIT")
def _(x, w, m):
    w.alive &= ~m
    w.group.mask &= ~m
    w.wake()


@step("BSSY", allow="RECONVERGENT")
def _(x, w, m):
    w.group.barriers[x.operands[0].index] = Barrier(w.group.mask)


@step("BSYNC", allow="RECONVERGENT")
def _(x, w, m):
    group = w.group if m == w.group.mask else w.split(w.group, m, w.group.pc)
    barrier = group.barriers[x.operands[0].index]
    if barrier.mask & w.alive & ~group.mask:
        group.state = ("converge", barrier)
        w.wake()


@step("BREAK")
def _(x, w, m):
    w.group.barriers[x.operands[0].index].mask &= ~m
    w.wake()


@step("WARPSYNC", allow="ALL COLLECTIVE")
def _(x, w, m):
    named = FULL if "ALL" in x else int(np.bitwise_or.reduce(integer(x.operands[0], x)(w)[lanes(m)]))
    if named & w.alive & ~w.group.mask == 0:
        w.group.parts = [w.group.mask]
        return
    w.group.state = ("warp", named & w.alive)
    w.wake()


@step("ENDCOLLECTIVE")
def _(x, w, m):
    for part in w.group.parts[1:]:
        w.split(w.group, part, w.group.pc)


@step("CALL", allow="REL NOINC")
def _(x, w, m):
    w.jump(m, x.target)


@step("RET", allow="REL NODEC")
def _(x, w, m):
    to = integer(x.operands[0], x)(w)
    for value in np.unique(to[lanes(m)]):
        w.jump(mask_of(to == value) & m, int(value) // 16)


@step("BAR", allow="SYNC RED OR DEFER_BLOCKING")
def _(x, w, m):
    block, group = w.block, w.group
    numbers = [o.value for o in x.operands if o.kind == "imm"]
    votes = [pred(o)(w) & m for o in x.operands if o.kind == "pred"]
    if m != group.mask:
        raise RuntimeError(f"{block.kernel.name}: {x.text}: a barrier for a part of the lanes")
    key = numbers[0], numbers[1] if len(numbers) > 1 else 0
    entry = block.arrived.setdefault(key, [0, False, []])
    entry[0] += m.bit_count()
    entry[1] |= any(votes)
    entry[2].append((w, group))
    group.state = ("bar", (key, tuple(x.modifiers)))
    for other, _ in entry[2][:-1]:
        if other is w:  # another group of this warp: the warp waits at the last
            w.last_bar[2] = False
    w.detail = w.last_bar = ["bar", entry, True]


@step("B2R", allow="RESULT")
def _(x, w, m):
    put(w, x.operands[0].index, np.uint32(w.result), m)
    put_pred(w, x.operands[1].index, FULL if w.result else 0, m)


@step("NOP")
def _(x, w, m):
    pass


@step("LDGDEPBAR")
def _(x, w, m):
    w.copy_groups.append(w.copies)
    w.copies = []


@step("DEPBAR", allow="LE")
def _(x, w, m):
    arrived = w.copy_groups[: len(w.copy_groups) - x.operands[1].value]
    del w.copy_groups[: len(arrived)]
    for target, into, words in itertools.chain(*arrived):
        for k, row in enumerate(words):
            target[into + k] = row


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
                if r not in NOWHERE:
                    v = v + (w.r[r] | w.r[r + 1].astype(np.uint64) << np.uint64(32))
            else:
                scale = re.search(r"\.X(\d+)", suffix)
                v = v + w.r[r].astype(np.uint64) * np.uint64(int(scale[1]) if scale else 1)
        return v

    return value


SIZES = {"U16": 2, "64": 8, "128": 16}
MEMORY = "U16 64 128 E CONSTANT SYS U BYPASS"  # of which some say nothing about results


def size_of(x):
    return next((SIZES[k] for k in x.modifiers if k in SIZES), 4)


def touch(w, addresses, size, store):
    """Records an access to global memory: (kind, bytes first read by the block, sectors, bytes first written, level,
    lines of 128 bytes).

    A sector comes from memory the first time, from L2 if the block has only written it, and from L1 afterwards.
    """
    sectors, read, written = set((addresses // np.uint64(32)).tolist()), w.block.read, w.block.written
    lines = len({sector // 4 for sector in sectors})
    if store:
        w.detail = "global", 0, len(sectors), 32 * len(sectors - written), None, lines
        written |= sectors
        w.block.stored.append((addresses, size))
        return
    new = sectors - read
    missing = len(new - written)
    level = "global" if missing else "L2" if new else "L1"
    w.detail = "global", 32 * missing, len(sectors), 0, level, lines
    read |= sectors


def shared_memory(w, addresses, size, what):
    """(shared memory as words, the indexes of the addresses)."""
    addresses, space, word = addresses & np.uint64(FULL), w.block.shared, min(size, 4)
    if (addresses & np.uint64(size - 1)).any() or int(addresses.max()) + size > len(space):
        where = f"{int(addresses.max()):#x} of {len(space):#x}"
        raise IndexError(f"{w.block.kernel.name}: {what}: shared memory at {where}")
    return space.view(f"u{word}"), (addresses // np.uint64(word)).astype(np.int64)


def conflicts(addresses, size):
    """Passes that an access to shared memory takes: distinct words in the fullest of the 32 banks."""
    words_ = np.unique(np.concatenate([addresses // np.uint64(4) + np.uint64(k) for k in range(max(1, size // 4))]))
    return int(np.bincount((words_ % np.uint64(32)).astype(np.int64)).max()) if len(words_) else 1


@machine("LDG", "LDS", "LD", "STG", "STS", "ST", allow=MEMORY)
def _(x):
    store, size = x.name.startswith("ST"), size_of(x)
    o, register = x.operands if store else x.operands[::-1]
    where = address(o)

    def run(w, m):
        on = lanes(m)
        addresses = where(w)[on]
        if x.name in ("LDS", "STS"):
            data, at = shared_memory(w, addresses, size, x.text)
            w.detail = "shared", conflicts(addresses, size)
        else:
            data, at = w.block.memory.view(addresses, size, x.text)
            touch(w, addresses, size, store)
        for k in range(max(1, size // 4)):
            row = w.r[register.index + (k if register.index != RZ else 0)]
            if store:
                data[at + k] = row[on].astype(data.dtype)
            elif register.index != RZ:
                row[on] = data[at + k]

    return run


@machine("LDGSTS", allow=MEMORY)
def _(x):
    to, source = x.operands
    size, write, read = size_of(x), address(to), address(source)

    def run(w, m):
        on = lanes(m)
        addresses = read(w)[on]
        target, into = shared_memory(w, write(w)[on], size, x.text)
        data, at = w.block.memory.view(addresses, size, x.text)
        touch(w, addresses, size, False)
        # The words arrive when the warp waits for them.
        w.copies.append((target, into, [data[at + k].copy() for k in range(max(1, size // 4))]))

    return run
