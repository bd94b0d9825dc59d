"""Runs the machine code of CUDA kernels (sm_90) on the CPU, one warp instruction at a time, and records what ran.

A cubin is disassembled by nvdisasm. A warp is 32 lanes: a register is a row of 32 words, a predicate a mask of 32 bits.
Lanes diverge and reconverge as the code says (BSSY, BSYNC, BREAK, WARPSYNC), barriers stop warps, and global memory is
memory of this process. So a launch gives real results, and each warp a trace: the instructions it issued, with the
sectors and the barriers they met. `cycles` replays traces in order, with the stalls and scoreboards that the compiler
wrote into the instructions.

Approximations: MUFU results are rounded from double precision; DFMA rounds the product to 64 bits first.

An opcode or a form of it without an entry here raises Unsupported and names it: add a function under `@op`.
"""

import functools
import heapq
import importlib.util
import itertools
import mmap
import os
import pathlib
import re
import shutil
import struct
import subprocess
import types

import numpy as np

FULL = 0xFFFFFFFF
LANES = np.arange(32)
RZ, PT = 255, 7
UNIFORM = 256  # register UR0; URZ is UNIFORM + 63. Predicates UP0 ... UPT follow PT.
PARAMETERS = 0x210  # of constant bank 0, on sm_90
SHARED_BASE = 0x400  # the first KiB of shared memory belongs to the system
STACK = 1 << 14  # bytes of local memory of a thread
INSTALL = "no nvdisasm: pip install nvidia-cuda-nvdisasm, or name one in the environment variable NVDISASM"


class Unsupported(Exception):
    """An opcode, a modifier or an operand that the interpreter does not know."""


def find_nvdisasm():
    """Path of nvdisasm, or None: from $NVDISASM, the package nvidia-cuda-nvdisasm, or the path."""
    if name := os.environ.get("NVDISASM"):
        return name if os.path.isfile(name) else None
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found in sorted(pathlib.Path(folder).glob("*/bin/nvdisasm")):
            return str(found)
    return shutil.which("nvdisasm")


# ------------------------------------------------------------------------------------------------------------- decoding


class Operand:
    """An operand as text and in parts: kind is reg, pred, imm, const, memory, special, barrier or label."""

    def __init__(self, text):
        self.text = text
        self.negative = self.absolute = self.inverted = False
        self.suffix, self.index, self.value, self.terms = "", None, None, ()
        body = text.replace(".reuse", "")
        if re.fullmatch(r"-?0x[0-9a-f]+", body):
            self.kind, self.value = "imm", int(body, 16)
            return
        if re.fullmatch(r"[+-]?(\d[\d.]*(e[+-]?\d+)?|INF|QNAN|SNAN)", body):
            self.kind, self.value = "imm", body
            return
        if body.startswith("`("):
            self.kind, self.value = "label", body[2:-1]
            return
        if body[0] in "!~":
            self.inverted, body = True, body[1:]
        if body[0] == "-":
            self.negative, body = True, body[1:]
        if body[0] == "|":
            self.absolute = True
            body = re.sub(r"\|", "", body)
        if m := re.fullmatch(r"(U?)P(\d|T)((?:\.\w+)*)", body):
            self.kind, self.suffix = "pred", m[3]
            self.index = (PT if m[2] == "T" else int(m[2])) + (8 if m[1] else 0)
        elif m := re.fullmatch(r"(U?)R(\d+|Z)((?:\.\w+)*)", body):
            self.kind, self.suffix, self.index = "reg", m[3], register(m[1], m[2])
        elif m := re.fullmatch(r"c\[0x([0-9a-f]+)\]\[(.*)\]((?:\.\w+)*)", body):
            self.kind, self.value, self.terms, self.suffix = "const", int(m[1], 16), address_terms(m[2]), m[3]
        elif m := re.fullmatch(r"(?:desc\[UR\d+\])?\[(.*)\]", body):
            self.kind, self.terms = "memory", address_terms(m[1])
        elif body.startswith(("SR", "PR")):
            self.kind = "special"
        elif re.fullmatch(r"(B|SB)\d+", body):
            self.kind, self.index = "barrier", int(body.strip("SB"))
        else:
            raise Unsupported(f"operand {text!r}")


def register(uniform, number):
    if uniform:
        return UNIFORM + (63 if number == "Z" else int(number))
    return RZ if number == "Z" else int(number)


def address_terms(text):
    """[(register or None, scale or "64", constant)] of an address."""
    terms = []
    for part in text.split("+"):
        if m := re.fullmatch(r"(U?)R(\d+|Z)((?:\.\w+)*)", part):
            terms.append((register(m[1], m[2]), m[3], 0))
        elif re.fullmatch(r"-?0x[0-9a-f]+", part):
            terms.append((None, "", int(part, 16)))
        elif part:
            raise Unsupported(f"address {text!r}")
    return terms


class Instruction:
    """One instruction and its control bits: cycles to the next issue; scoreboards to wait for (a mask), and those set
    when the result is there (write) or the operands have been read (read); 7 is none."""

    def __init__(self, number, text, low, high):
        text = re.sub(r"\s*\(\*.*?\*\)", "", text)  # remarks
        self.number, self.text, self.bits = number, text, low >> 32  # a 32-bit immediate lies there
        control = high >> 41
        self.stall, self.write, self.read, self.wait = (control & 15, control >> 5 & 7, control >> 8 & 7,
                                                        control >> 11 & 63)  # fmt: skip
        self.guard, self.guard_inverted = PT, False
        if m := re.match(r"@(!?)(U?)P(\d|T)\s+", text):
            self.guard = (PT if m[3] == "T" else int(m[3])) + (8 if m[2] else 0)
            self.guard_inverted, text = bool(m[1]), text[m.end() :]
        self.opcode, _, rest = text.partition(" ")
        self.name, *self.modifiers = self.opcode.split(".")
        self.operands = [Operand(x.strip()) for x in re.split(r",| (?=`\()", rest) if x.strip()]
        self.target = None  # number of the instruction that a branch names
        self.run = None  # compiled at first use

    def __contains__(self, modifier):
        return modifier in self.modifiers


class Kernel:
    """Code of a kernel, sizes of its parameters, and what a block of it takes."""

    def __init__(self, symbol, name, lines, registers, shared, parameters, constants):
        self.symbol, self.name, self.registers, self.shared = symbol, name, registers, shared
        self.parameters, self.constants = parameters, constants  # [(offset, size)]; {bank: bytes}
        self._lines, self._code = lines, None

    @property
    def code(self):
        """The instructions, decoded at first use."""
        if self._code is None:
            self._code, labels = [], {}
            for i, line in enumerate(self._lines):
                if m := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/", line):
                    high = re.search(r"/\* 0x([0-9a-f]{16}) \*/", self._lines[i + 1])
                    self._code.append(Instruction(len(self._code), m[2], int(m[3], 16), int(high[1], 16)))
                    assert int(m[1], 16) == 16 * self._code[-1].number
                elif m := re.match(r"(\S+):$", line):
                    labels[m[1]] = len(self._code)
            for instruction in self._code:
                for operand in instruction.operands:
                    if operand.kind == "label" and operand.value in labels:
                        instruction.target = labels[operand.value]
            self._lines = None
        return self._code


def load(cubin, nvdisasm):
    """{symbol: Kernel} of a cubin."""
    data = pathlib.Path(cubin).read_bytes()
    text = subprocess.run([nvdisasm, "-c", "-hex", cubin], capture_output=True, text=True, check=True).stdout
    start, count, names = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 60))
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * i) for i in range(count)]
    sections = {}
    for header in headers:
        at = headers[names][4] + header[0]
        sections[data[at : data.index(b"\0", at)].decode()] = header
    registers, (_, _, _, _, at, size, link, *_) = {}, sections[".symtab"]
    info, names = sections[".nv.info"], headers[link][4]
    for symbol, value in attributes(data[info[4] : info[4] + info[5]], 0x2F, "<II"):  # EIATTR_REGCOUNT
        start = names + struct.unpack_from("<I", data, at + 24 * symbol)[0]
        registers[data[start : data.index(b"\0", start)].decode()] = value
    kernels = {}
    symbols = [part.partition(":\n")[0] for part in text.split("\n.text.")[1:]]
    short = subprocess.run(["c++filt", *symbols], capture_output=True, text=True, check=True).stdout.splitlines()
    for part, symbol, name in zip(text.split("\n.text.")[1:], symbols, short):
        name = name.replace("jax_rnnt::cuda::", "").replace("(anonymous namespace)", "")
        name = re.search(r"(\w+(?:<[^()]*>)?)\(", name)[1]
        info = sections[f".nv.info.{symbol}"]
        shared = sections.get(f".nv.shared.{symbol}")
        constants = {}
        for bank in range(18):
            if section := sections.get(f".nv.constant{bank}.{symbol}" if bank != 3 else ".nv.constant3"):
                constants[bank] = data[section[4] : section[4] + section[5]]
        kernels[symbol] = Kernel(
            symbol,
            name,
            part.splitlines()[1:],
            registers[symbol],
            shared[5] if shared else SHARED_BASE,
            [
                (offset, bits >> 18)
                for _, _, offset, bits in sorted(  # EIATTR_KPARAM_INFO
                    attributes(data[info[4] : info[4] + info[5]], 0x17, "<IHHI"), key=lambda x: x[1]
                )
            ],
            constants,
        )
    return kernels


def attributes(info, wanted, form):
    """Values of an attribute in a section .nv.info."""
    i = 0
    while i + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, i)
        i += 4
        if kind != 4:  # the value is in the 16 bits
            continue
        if attribute == wanted:
            yield struct.unpack_from(form, info, i)
        i += size


# --------------------------------------------------------------------------------------------------------------- state


@functools.cache
def lanes(mask):
    return np.array([mask >> i & 1 for i in range(32)], bool)


def mask_of(array):
    return int.from_bytes(np.packbits(array, bitorder="little").tobytes(), "little")


class Memory:
    """Global memory: a part of this process that takes no pages until they are written."""

    def __init__(self, size=1 << 36):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which older Pythons do not name
        data = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
        self.views = {1: data, 2: data.view(np.uint16), 4: data.view(np.uint32)}
        self.base, self.used = data.ctypes.data, 0
        self.starts, self.ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def zeros(self, shape, dtype=np.float32, offset=0):
        """An array, `offset` elements after a multiple of 4096 bytes."""
        dtype, count = np.dtype(dtype), int(np.prod(shape, dtype=np.int64))
        start = self.used + offset * dtype.itemsize
        end = start + count * dtype.itemsize
        self.used = (end + 8191) // 4096 * 4096  # with a gap
        self.starts = np.append(self.starts, np.uint64(self.base + start))
        self.ends = np.append(self.ends, np.uint64(self.base + end))
        return self.views[1][start:end].view(dtype).reshape(shape)

    def array(self, values):
        values = np.asarray(values)
        array = self.zeros(values.shape, values.dtype)
        array[...] = values
        return array

    def view(self, addresses, size, what):
        """(all of memory as words, indexes)."""
        if (addresses & np.uint64(size - 1)).any():
            raise ValueError(f"{what}: an address is not a multiple of {size}")
        i = np.searchsorted(self.starts, addresses, "right") - 1
        if (i < 0).any() or (addresses + np.uint64(size) > self.ends[i]).any():
            raise IndexError(f"{what}: outside all arrays")
        word = min(size, 4)
        return self.views[word], ((addresses - np.uint64(self.base)) // np.uint64(word)).astype(np.int64)


class Barrier:
    """A convergence barrier: the lanes that meet at BSYNC."""

    def __init__(self, mask):
        self.mask = mask


class Group:
    """Lanes of a warp that run together."""

    __slots__ = ("barriers", "mask", "parts", "pc", "state")

    def __init__(self, mask, pc, barriers):
        self.mask, self.pc, self.barriers = mask, pc, barriers
        self.state = None  # None: may run. Otherwise what it waits for: (kind, detail)
        self.parts = None  # of a collective: the groups that it merged


class Warp:
    def __init__(self, block, number, mask):
        self.block, self.number, self.alive = block, number, mask
        self.registers = np.zeros((UNIFORM + 64, 32), np.uint32)
        self.r = list(self.registers)
        self.f = list(self.registers.view(np.float32))
        self.p = [0] * 7 + [FULL] + [0] * 7 + [FULL]
        self.groups = [Group(mask, 0, {})]
        self.trace = []  # (Instruction, detail); detail: what memory or a barrier met, or None
        self.detail = None
        self.group = None
        self.local = None  # the stack, at first use

    def split(self, group, mask, pc):
        """Lanes `mask` of the group continue at pc."""
        other = Group(mask, pc, dict(group.barriers))
        group.mask &= ~mask
        self.groups.append(other)
        return other

    def wake(self):
        """Releases groups whose convergence barrier or WARPSYNC is complete."""
        groups = self.groups
        waiting = 0
        for g in groups:
            if g.state is not None and g.state[0] == "warp":
                waiting |= g.mask
        for g in list(groups):
            if g.state is None or g not in self.groups:
                continue
            kind, detail = g.state
            if kind == "converge":
                need = detail.mask & self.alive
                here = [x for x in groups if x.state == g.state and x.pc == g.pc]
                if sum(x.mask for x in here) & need == need:
                    self.merge(here)
            elif kind == "warp" and detail & self.alive & ~waiting == 0:
                here = [x for x in groups if x.state is not None and x.state[0] == "warp" and x.pc == g.pc]
                here = [x for x in here if x.state[1] & detail]
                if "COLLECTIVE" in self.block.code[g.pc - 1]:
                    parts = [x.mask for x in here]
                    self.merge(here).parts = parts
                else:
                    self.merge(here)

    def merge(self, groups):
        first = groups[0]
        first.mask = sum(x.mask for x in groups)
        first.state = None
        for x in groups[1:]:
            self.groups.remove(x)
        return first


class Block:
    """A block of a launch. `run` executes it; `warps` then have the traces."""

    def __init__(self, kernel, grid, block, dynamic, parameters, memory, index):
        self.kernel, self.code, self.memory = kernel, kernel.code, memory
        self.grid, self.size, self.index = grid, block, index
        self.shared = np.full((kernel.shared + dynamic + 15) // 16 * 16, 0xFF, np.uint8)
        constants = dict(kernel.constants)
        bank = bytearray(constants[0])
        struct.pack_into("<6I", bank, 0, *block, *grid)
        struct.pack_into("<I", bank, 0x28, STACK)
        for (offset, size), value in zip(kernel.parameters, parameters, strict=True):
            assert len(value) == size
            bank[PARAMETERS + offset : PARAMETERS + offset + size] = value
        constants[0] = bytes(bank)
        self.constants = {k: np.frombuffer(v + bytes(-len(v) % 8), np.uint8) for k, v in constants.items()}
        self.cached = {}
        threads = block[0] * block[1] * block[2]
        self.warps = []
        for first in range(0, threads, 32):
            n = min(32, threads - first)
            self.warps.append(Warp(self, first // 32, (1 << n) - 1))
        self.arrived = {}  # barrier: [lanes, [votes for, votes against], [(warp, group)]]
        self.read, self.written = set(), set()  # sectors of global memory
        self.stored = []  # (addresses, bytes) of global stores

    def constant(self, bank, offset, size=4):
        """32 lanes of a word of a constant bank."""
        key = bank, offset, size
        if key not in self.cached:
            data = self.constants[bank][offset : offset + size].tobytes()
            self.cached[key] = np.full(32, int.from_bytes(data, "little"), np.uint32)
        return self.cached[key]

    def run(self, limit=20_000_000):
        with np.errstate(all="ignore"):
            self._run(limit)
        return self

    def _run(self, limit):
        code, issued = self.code, 0
        while any(w.groups for w in self.warps):
            progress = False
            for warp in self.warps:
                while True:
                    group = next((g for g in warp.groups if g.state is None), None)
                    if group is None:
                        before = len(warp.groups), [g.state for g in warp.groups]
                        warp.wake()
                        if (len(warp.groups), [g.state for g in warp.groups]) == before:
                            break
                        continue
                    progress = True
                    warp.group = group
                    trace = warp.trace
                    while group.state is None and group.mask:
                        x = code[group.pc]
                        active = group.mask
                        if x.guard != PT:
                            active &= ~warp.p[x.guard] if x.guard_inverted else warp.p[x.guard]
                        group.pc += 1
                        warp.detail = None
                        if active:
                            run = x.run or compile_instruction(x)
                            run(warp, active)
                        trace.append((x, warp.detail))
                        issued += 1
                    if not group.mask and group in warp.groups:
                        warp.groups.remove(group)
                    if issued > limit:
                        raise RuntimeError(f"{self.kernel.name}: more than {limit} instructions in a block")
            self.release()
            if not progress and any(w.groups for w in self.warps):
                where = {g.pc - 1 for w in self.warps for g in w.groups}
                raise RuntimeError(f"{self.kernel.name}: deadlock at {[code[i].text for i in sorted(where)]}")

    def release(self):
        """Opens the barriers at which all threads have arrived."""
        for key, (count, results, groups) in list(self.arrived.items()):
            alive = sum(w.alive.bit_count() for w in self.warps)
            if count < (key[1] or alive):
                continue
            del self.arrived[key]
            for warp in {id(w): w for w, _ in groups}.values():
                mine = [g for w, g in groups if w is warp]
                warp.result = results
                by_place = {}
                for g in mine:
                    by_place.setdefault(g.pc, []).append(g)
                for same in by_place.values():
                    warp.merge(same)


# ---------------------------------------------------------------------------------------------------------- semantics

OPS = {}


def op(*names):
    def add(builder):
        OPS.update(dict.fromkeys(names, builder))
        return builder

    return add


# Instructions of the uniform datapath run as the vector instruction of the same name, on registers whose lanes are equal.
UNIFORM_NAMES = {"VOTEU": "VOTE", "S2UR": "S2R", "ULDC": "LDC", "UMOV": "MOV"}


def compile_instruction(x):
    name = UNIFORM_NAMES.get(x.name) or (x.name[1:] if x.name[0] == "U" and x.name[1:] in OPS else x.name)
    if name not in OPS:
        raise Unsupported(f"opcode {x.opcode}: {x.text}")
    try:
        run = OPS[name](x)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
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
        a, b = (lambda w, g=integer(o, x): g(w).astype(np.uint64) for o in (oa, ob))
    else:
        a, b = (lambda w, g=signed(o, x): g(w).astype(np.int64).view(np.uint64) for o in (oa, ob))
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
    a, b, c = integer(oa, x), addend(ob, x), integer(oc, x) if oc else None

    def lea(w, m):
        low = a(w)
        if "HI" in x:
            high = c(w) if c else (low.view(np.int32) >> 31).view(np.uint32)
            v = (low | high.astype(np.uint64) << np.uint64(32)) << shift >> np.uint64(32)
        else:
            v = low.astype(np.uint64) << shift & np.uint64(FULL)
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
        a, b = (lambda w, g=real(o, x): g(w).view(np.uint32) for o in (oa, ob))
    else:
        a, b = integer(oa, x), integer(ob, x)
    p = pred(op_)
    return lambda w, m: put(w, d.index, np.where(lanes(p(w)), a(w), b(w)), m)


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
    return lambda w, m: put(w, d, np.bitwise_count(a(w)).astype(np.uint32), m)


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
    only(x, "BF16", "F16", "F32", "PACK_AB", "RELU", "RZ")
    assert "PACK_AB" in x and "RZ" not in x
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
    only(x, "SYNC", "RED", "OR", "AND", "POPC", "DEFER_BLOCKING", "ARV")
    numbers = [o for o in x.operands if o.kind != "pred"]
    assert all(o.kind == "imm" for o in numbers) and "ARV" not in x
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


@op("NOP", "YIELD", "MEMBAR", "ERRBAR", "CCTL", "DEPBAR", "LDGDEPBAR", "NANOSLEEP", "FENCE", "ACQBULK", "PREEXIT")
def _(x):
    return lambda w, m: None


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
CACHE = ("E", "CONSTANT", "EF", "EL", "LU", "EU", "NA", "STRONG", "SYS", "GPU", "SM", "WEAK", "LTC64B", "LTC128B", "LTC256B",
         "BYPASS", "ACCESS", "PRIVATE", "U")  # fmt: skip


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
    """uint32 words [n, 1 or more] at the addresses."""
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
        if full.any():
            data, at = gather(w, None, addresses[full], size, x.text)
            touch(w, addresses[full], size)
            for k in range(max(1, size // 4)):
                target[into[full] + k] = data[at + k]
        for k in range(max(1, size // 4)):
            target[into[~full] + k] = 0

    return run


# --------------------------------------------------------------------------------------------------------------- cycles

# Pipes of a multiprocessor: warp instructions a cycle. Four schedulers issue one each; every pipe is there four times,
# but for memory.
RATES = {"issue": 4, "ALU": 2, "FMA": 4, "IMAD": 2, "XU": 0.5, "FP64": 2, "memory": 1, "uniform": 2, "control": 4}
PIPES = {
    "FMA": "FADD FMUL FFMA HADD2 HMUL2 HFMA2",
    "IMAD": "IMAD",
    "XU": "MUFU F2I I2F F2F POPC FLO BREV FRND",
    "FP64": "DADD DMUL DFMA DSETP DMNMX",
    "memory": "LDG STG LDS STS LDC LDGSTS SHFL S2R S2UR MATCH REDUX CCTL ULDC",
    "control": "BRA JMP EXIT BSSY BSYNC BREAK WARPSYNC ENDCOLLECTIVE CALL RET BAR B2R NOP YIELD MEMBAR DEPBAR LDGDEPBAR",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
# Cycles until a scoreboard is released: by results, and by operands that have been read.
LATENCY = {"global": 500, "L2": 260, "L1": 33, "LDS": 29, "SHFL": 23, "LDC": 35, "ULDC": 35, "S2R": 25, "S2UR": 25, "XU": 20, "BAR": 25,
           "other": 20}  # fmt: skip
OPERANDS = {"LDG": 14, "STG": 14, "LDGSTS": 14, "STS": 12, "LDS": 10, "SHFL": 10, "other": 8}
TAKEN = 8  # cycles that a taken branch adds
BARRIER = 20  # cycles from the last arrival to the next instruction


def pipe(x):
    found = PIPE_OF.get(x.name)
    return found or ("uniform" if x.name[0] == "U" else "ALU")


def passes(x, detail):
    """Cycles that an access occupies the memory pipe."""
    if detail is None:
        return 1
    if detail[0] == "global":
        return max(1, detail[2] / 4)  # 128 bytes a cycle
    return max(1, detail[1])


def cycles(blocks, latency=LATENCY["global"], copy=None, waits=None):
    """Replays the traces of blocks, a list of lists of warps' traces, on one multiprocessor.

    The blocks of a list run one after the other, the lists side by side. Every scheduler issues at most one instruction
    a cycle, each warp in order. `copy`: bytes a cycle that memory moves, None for any number. Returns [(list, place in
    it, cycle of its end)] and [(first cycle, last cycle, bytes)] of the loads that go to memory. `waits`, a Counter:
    cycles that warps wait for the scoreboards of an instruction, by its number.
    """
    heap, free, memory_free, dram, loads, ends = [], {}, 0.0, 0.0, [], []
    arrived, running, keys = {}, {}, itertools.count()

    def start(slot, place, time):
        running[slot] = len(blocks[slot][place])
        for k, trace in enumerate(blocks[slot][place]):
            scheduler = (slot * len(blocks[slot][place]) + k) % 4
            w = types.SimpleNamespace(slot=slot, place=place, trace=trace, at=0, scheduler=scheduler)
            w.boards, w.groups, w.pending = [0.0] * 6, [], []
            heapq.heappush(heap, (time, next(keys), w))

    for slot in range(len(blocks)):
        start(slot, 0, 0.0)
    while heap:
        time, key, w = heapq.heappop(heap)
        x, detail = w.trace[w.at]
        ready = time
        for b in range(6):
            if x.wait >> b & 1 and w.boards[b] > ready:
                ready = w.boards[b]
        if x.name == "DEPBAR":
            allowed = int(x.operands[1].value) if len(x.operands) > 1 else 0
            if len(w.groups) > allowed:
                ready = max(ready, w.groups[len(w.groups) - allowed - 1])
        if waits is not None:
            waits[x.number] += ready - time
        which = pipe(x)
        at = w.scheduler, which
        ready = max(ready, free.get((w.scheduler, "issue"), 0.0), free.get(at, 0.0))
        if which == "memory":
            ready = max(ready, memory_free)
        if ready > time:
            heapq.heappush(heap, (ready, key, w))
            continue
        free[w.scheduler, "issue"] = time + 1
        if which == "memory":
            memory_free = max(memory_free, time) + passes(x, detail)
        else:
            free[at] = time + 4 / RATES[which]
        if x.name in ("LDG", "LDGSTS"):
            new = detail[1] if detail else 0
            wait = latency if new else LATENCY[detail[4] if detail else "L1"]
            if copy and new:
                dram = max(dram, time) + new / copy
                wait = max(wait, dram - time)
            if new:
                loads.append((time, time + wait, new))
            if x.name == "LDGSTS":
                w.pending.append(time + wait)
        else:
            wait = LATENCY.get(x.name, LATENCY.get(which, LATENCY["other"]))
            if copy and x.name == "STG" and detail:
                dram = max(dram, time) + detail[3] / copy
        if x.name == "LDGDEPBAR":
            w.groups.append(max(w.pending, default=time))
            w.pending = []
        if x.write < 6:
            w.boards[x.write] = max(w.boards[x.write], time + wait)
        if x.read < 6:
            w.boards[x.read] = max(w.boards[x.read], time + OPERANDS.get(x.name, OPERANDS["other"]))
        w.at += 1
        after = time + max(x.stall, 1)
        if w.at < len(w.trace):
            if which == "control" and w.trace[w.at][0].number != x.number + 1:
                after += TAKEN
            if detail and detail[0] == "bar" and detail[2]:
                meet = w.slot, w.place, id(detail[1])
                arrived.setdefault(meet, []).append((after, key, w))
                if len(arrived[meet]) == len({id(v) for v, _ in detail[1][2]}):
                    for _, k, v in arrived.pop(meet):
                        heapq.heappush(heap, (after + BARRIER, k, v))
            else:
                heapq.heappush(heap, (after, key, w))
        else:
            running[w.slot] -= 1
            if running[w.slot] == 0:
                ends.append((w.slot, w.place, after))
                if w.place + 1 < len(blocks[w.slot]):
                    start(w.slot, w.place + 1, after)
    return ends, loads
