"""Replays traces of the interpreter in order, with the stalls and scoreboards that the compiler wrote into the code."""

import collections
import heapq
import itertools
import types

from sass import PT, RZ, UNIFORM

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
LATENCY = {
    "global": 500,
    "L2": 260,
    "L1": 33,
    "LDL": 33,
    "LDS": 29,
    "SHFL": 23,
    "LDC": 35,
    "ULDC": 35,
    "S2R": 25,
    "S2UR": 25,
    "XU": 20,
    "other": 20,
}
OPERANDS = {"LDG": 14, "STG": 14, "LDGSTS": 14, "STS": 12, "LDS": 10, "SHFL": 10, "other": 8}
TAKEN = 8  # cycles that a taken branch adds
RESULT = 4  # cycles until a result is there, where the code has no scoreboard for it
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


def floor(traces):
    """Cycles that the busiest scheduler or pipe takes for the instructions of a block's warps, if none ever waits."""
    busy = collections.Counter()
    for k, trace in enumerate(traces):
        for x, detail in trace:
            which = pipe(x)
            busy[k % 4, "issue"] += 1
            if which == "memory":
                busy[which] += memory_cycles(x, detail)
            else:
                busy[k % 4, which] += 4 / RATES[which]
    return max(busy.values())


def flow(x):
    """(what an instruction reads, what it writes): numbers of registers, and minus one minus those of predicates."""
    size = 4 if "128" in x else 2 if "64" in x and pipe(x) == "memory" else 1
    stores = x.name in ("STG", "STS", "STL", "LDGSTS") or pipe(x) == "control"
    reads, writes, found = [], [], stores
    for i, o in enumerate(x.operands):
        if o.kind == "pred":
            # In front of the first register, or behind it and in front of the others: a comparison, a carry.
            compares = x.name.endswith("SETP") or x.name == "PLOP3"
            behind = found and not stores and i == 1 and x.name not in ("SEL", "FSEL")
            writes_it = not stores and (i < 2 if compares else not found or behind)
            (writes if writes_it else reads).append(-1 - o.index)
        elif o.kind == "reg":
            first = not found and not x.name.endswith("SETP")
            found = True
            last = "WIDE" in x and i == len(x.operands) - 1
            n = max(size, 2 if x.name[0] == "D" or ("WIDE" in x and (first or last)) else 1)
            (writes if first else reads).extend(range(o.index, o.index + n))
        elif o.kind in ("memory", "const"):
            for r, suffix, _ in o.terms:
                if r is not None:
                    reads.extend((r, r + 1) if "64" in suffix else (r,))
        elif o.kind == "special" and x.name == "R2P":
            writes.extend(range(-7, 0))
            found = True
    if x.guard != PT:
        reads += [-1 - x.guard, *writes]
    nothing = {RZ, UNIFORM + 63, -1 - PT, -1 - (PT + 8)}
    return [r for r in reads if r not in nothing], [r for r in writes if r not in nothing]


def chain(traces):
    """Cycles of the longest chain of a block in which each instruction needs the result of the one before: from
    register to register, and through shared memory at barriers. Copies and loads from memory come in time."""
    flows, barrier = {}, 0.0
    ready = [collections.defaultdict(float) for _ in traces]
    at, end = [0] * len(traces), 0.0
    while any(i < len(trace) for i, trace in zip(at, traces)):
        stored = barrier
        for k, trace in enumerate(traces):
            times = ready[k]
            while at[k] < len(trace):
                x, detail = trace[at[k]]
                at[k] += 1
                if detail and detail[0] == "bar" and detail[2]:
                    break
                if x not in flows:
                    flows[x] = flow(x)
                reads, writes = flows[x]
                start = max((times[r] for r in reads), default=0.0)
                if x.name == "LDS":
                    start = max(start, barrier)
                elif x.name == "STS":
                    stored = max(stored, start + RESULT)
                wait = RESULT if x.write > 5 else LATENCY.get(x.name, LATENCY.get(pipe(x), LATENCY["L1"]))
                wait = max(wait, LATENCY.get(x.name, 0))
                for r in writes:
                    times[r] = start + wait
                end = max(end, start + wait)
        barrier = stored + BARRIER
    return end


def cycles(blocks, latency=LATENCY["global"], copy=None, waits=None, tags=False):
    """Replays the traces of blocks, a list of lists of warps' traces, on one multiprocessor.

    The blocks of a list run one after the other, the lists side by side. Every scheduler issues at most one instruction
    a cycle, each warp in order. `copy`: bytes a cycle that memory moves, None for any number. Returns [(list, place in
    it, cycle of its end)] and [(first cycle, last cycle, bytes)] of the loads that go to memory. `waits`, a Counter:
    cycles that warps wait for the scoreboards of an instruction, by its number. `tags`: as in memory_cycles.
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
            allowed = x.operands[1].value
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
            memory_free = max(memory_free, time) + memory_cycles(x, detail, tags)
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
            w.pending, wait = [], w.groups[-1] - time
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
