"""Replays traces of the interpreter in order, with the stalls and scoreboards that the compiler wrote into the code."""

import collections
import heapq
import itertools
import types

# Pipes of a multiprocessor: warp instructions a cycle. Four schedulers issue one each; every pipe is there four times,
# but for memory.
RATES = {"issue": 4, "ALU": 2, "FMA": 4, "IMAD": 2, "XU": 0.5, "FP64": 2, "memory": 1, "uniform": 2, "control": 4}
PIPES = {
    "FMA": "FADD FMUL FFMA HADD2 HMUL2 HFMA2",
    "IMAD": "IMAD",
    "XU": "MUFU F2I I2F F2F POPC FLO BREV FRND",
    "FP64": "DADD DMUL DFMA DSETP DMNMX",
    "memory": "LDG STG LDS STS LDL STL LDC LDGSTS SHFL S2R S2UR MATCH REDUX CCTL ULDC",
    "control": "BRA JMP EXIT BSSY BSYNC BREAK WARPSYNC ENDCOLLECTIVE CALL RET BAR B2R NOP YIELD MEMBAR DEPBAR "
    "LDGDEPBAR NANOSLEEP",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}
# Cycles until a scoreboard is released: by results, and by operands that have been read.
LATENCY = {"global": 500, "L2": 260, "L1": 33, "LDL": 33, "LDS": 29, "SHFL": 23, "LDC": 35, "ULDC": 35, "S2R": 25}
LATENCY |= {"S2UR": 25, "XU": 20, "other": 20}
OPERANDS = {"LDG": 14, "STG": 14, "LDGSTS": 14, "STS": 12, "LDS": 10, "SHFL": 10, "other": 8}
TAKEN = 8  # cycles that a taken branch adds
BARRIER = 20  # cycles from the last arrival to the next instruction


def pipe(x):
    found = PIPE_OF.get(x.name)
    return found or ("uniform" if x.name[0] == "U" else "ALU")


def memory_cycles(x, detail, tags=False):
    """Cycles that an instruction occupies the memory pipe. Nothing public says what an access to global memory takes
    that is spread over many cache lines: 128 bytes a cycle, or, with `tags`, no more than one line a cycle either."""
    if pipe(x) != "memory":
        return 0
    if detail is None:
        return 1
    if detail[0] != "global":
        return max(1, detail[1])  # one access to each bank
    return max(1, detail[2] / 4, detail[5] if tags else 0)


class Replay:
    """Blocks, each a list of its warps' traces, side by side on one multiprocessor. Every scheduler issues at most one
    instruction a cycle, each warp in order.

    `end`: the last block's cycle. `loads`: [(first cycle, last cycle, bytes)] of those that go to
    memory. `waits`: cycles that warps wait for the scoreboards of an instruction, by its number. `tags`: as in
    memory_cycles.
    """

    def __init__(self, blocks, latency=LATENCY["global"], tags=False):
        self.latency, self.tags = latency, tags
        self.heap, self.keys, self.free, self.memory_free = [], itertools.count(), {}, 0.0
        self.arrived, self.end = {}, 0.0
        self.loads, self.waits = [], collections.Counter()
        for block, traces in enumerate(blocks):
            for k, trace in enumerate(traces):
                w = types.SimpleNamespace(block=block, trace=trace, at=0, scheduler=(block * len(traces) + k) % 4)
                w.boards, w.groups, w.pending = [0.0] * 6, [], []  # scoreboards; groups of copies; copies of no group
                heapq.heappush(self.heap, (0.0, next(self.keys), w))
        while self.heap:
            self.issue(*heapq.heappop(self.heap))

    def issue(self, time, key, w):
        x, detail = w.trace[w.at]
        ready = self.ready(w, x, time)
        if ready > time:
            heapq.heappush(self.heap, (ready, key, w))
            return
        which = pipe(x)
        self.free[w.scheduler, "issue"] = time + 1
        if which == "memory":
            self.memory_free = max(self.memory_free, time) + memory_cycles(x, detail, self.tags)
        else:
            self.free[w.scheduler, which] = time + 4 / RATES[which]
        wait = self.result(w, x, detail, time)
        if x.write < 6:
            w.boards[x.write] = max(w.boards[x.write], time + wait)
        if x.read < 6:
            w.boards[x.read] = max(w.boards[x.read], time + OPERANDS.get(x.name, OPERANDS["other"]))
        self.advance(w, x, detail, key, time + max(x.stall, 1))

    def ready(self, w, x, time):
        """When the instruction may issue."""
        ready = max([time, *(w.boards[b] for b in range(6) if x.wait >> b & 1)])
        if x.name == "DEPBAR" and len(w.groups) > (allowed := x.operands[1].value):
            ready = max(ready, w.groups[len(w.groups) - allowed - 1])
        self.waits[x.number] += ready - time
        free = self.free.get((w.scheduler, "issue"), 0.0), self.free.get((w.scheduler, pipe(x)), 0.0)
        return max(ready, *free, self.memory_free if pipe(x) == "memory" else 0.0)

    def result(self, w, x, detail, time):
        """Cycles until the result is there."""
        if x.name in ("LDG", "LDGSTS"):
            new = detail[1] if detail else 0
            wait = self.latency if new else LATENCY[detail[4] if detail else "L1"]
            if new:
                self.loads.append((time, time + wait, new))
            if x.name == "LDGSTS":
                w.pending.append(time + wait)
            return wait
        if x.name == "LDGDEPBAR":
            w.groups.append(max(w.pending, default=time))
            w.pending = []
            return w.groups[-1] - time
        return LATENCY.get(x.name, LATENCY.get(pipe(x), LATENCY["other"]))

    def advance(self, w, x, detail, key, after):
        w.at += 1
        if w.at == len(w.trace):
            self.end = max(self.end, after)
            return
        if pipe(x) == "control" and w.trace[w.at][0].number != x.number + 1:
            after += TAKEN
        if not (detail and detail[0] == "bar" and detail[2]):
            heapq.heappush(self.heap, (after, key, w))
            return
        meet = w.block, id(detail[1])
        self.arrived.setdefault(meet, []).append((key, w))
        if len(self.arrived[meet]) == len({id(v) for v, _ in detail[1][2]}):
            for k, v in self.arrived.pop(meet):
                heapq.heappush(self.heap, (after + BARRIER, k, v))
