"""Runs machine code on the CPU, one warp instruction at a time, and records what ran.

Lanes diverge and reconverge as the code says (BSSY, BSYNC, BREAK, WARPSYNC), barriers stop warps, and global memory is
memory of this process. So a launch gives real results, and each warp a trace: the instructions that it issued, with
the sectors and the barriers that they met.
"""

import mmap
import struct

import floats  # noqa: F401  opcodes enter the table as they are imported
import integers  # noqa: F401
import machine  # noqa: F401
import numpy as np
from operands import FULL, STACK, compile_instruction
from sass import PT, UNIFORM


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
        self.p = [0] * 7 + [FULL] + [0] * 7 + [FULL]
        self.groups = [Group(mask, 0, {})]
        self.trace = []  # (Instruction, detail); detail: what memory or a barrier met, or None
        self.detail = None
        self.group = None
        self.copies, self.copy_groups = [], []  # of LDGSTS, which have not arrived

    def split(self, group, mask, pc):
        """Lanes `mask` of the group continue at pc."""
        other = Group(mask, pc, dict(group.barriers))
        group.mask &= ~mask
        self.groups.append(other)
        return other

    def jump(self, mask, pc):
        """Lanes `mask` of the running group continue at pc."""
        if mask == self.group.mask:
            self.group.pc = pc
        else:
            self.split(self.group, mask, pc)

    def wake(self):
        """Releases groups whose convergence barrier or WARPSYNC is complete."""
        groups = self.groups
        waiting = sum(g.mask for g in groups if g.state and g.state[0] == "warp")
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
                here = [x for x in groups if x.state and x.state[0] == kind and x.pc == g.pc and x.state[1] & detail]
                parts = [x.mask for x in here]
                self.merge(here).parts = parts

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
        for place, values in ((0, block), (12, grid), (0x28, [STACK])):
            struct.pack_into(f"<{len(values)}I", bank, place, *values)
        for (offset, size), value in zip(kernel.parameters, parameters, strict=True):
            assert len(value) == size
            bank[kernel.base + offset : kernel.base + offset + size] = value
        constants[0] = bytes(bank)
        self.constants = {k: np.frombuffer(v + bytes(-len(v) % 8), np.uint8) for k, v in constants.items()}
        self.cached = {}
        threads = block[0] * block[1] * block[2]
        starts = range(0, threads, 32)
        self.warps = [Warp(self, first // 32, (1 << min(32, threads - first)) - 1) for first in starts]
        self.arrived = {}  # barrier: [lanes, [votes for, votes against], [(warp, group)]]
        self.read, self.written = set(), set()  # sectors of global memory
        self.stored = []  # (addresses, bytes) of global stores

    def constant(self, bank, offset):
        """32 lanes of a word of a constant bank."""
        key = bank, offset
        if key not in self.cached:
            data = self.constants[bank][offset : offset + 4].tobytes()
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
                for pc in {g.pc for g in mine}:
                    warp.merge([g for g in mine if g.pc == pc])
