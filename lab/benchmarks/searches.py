"""What a step of the searches launches on a GPU, where the host waits, and its cycles on a TPU, by XLA, without either.

    python lab/benchmarks/searches.py                     # every search for an H100, a B200 and a v5e: a table
    python lab/benchmarks/searches.py h100 --only greedy  # searches whose names hold this text
    python lab/benchmarks/searches.py --json FILE         # the counts as JSON
    python lab/benchmarks/searches.py --graphs            # with the option that puts loops into CUDA graphs
    python lab/benchmarks/searches.py --steps             # how many steps searches take, which the CPU runs

`lab/run.sh searches` installs what it compiles with. Programs are compiled ahead of time and their parts counted;
nothing runs, and nothing is timed. A GPU's program is XLA's sequence of thunks after the pass that makes CUDA graphs. A
step is one turn of the loop that does most: its condition, its body, and the longer branch of each conditional. Loops
inside of it count one turn, and `loops` says how many there are; `around` counts what a turn of the loop around it
launches besides, every 32 steps of a beam. The host waits for a predicate of each loop and conditional that is in no
graph.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import tempfile

import ahead  # before JAX
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import decode as models
import ngrams
from jax_rnnt import LinearJoint, RNNTLoss, TDTLoss, decode

T, V, H, LABELS = 250, 1025, 640, 200  # frames, classes, width of all rows, room for labels
DURATIONS = 0, 1, 2, 3, 4
DEVICES = *ahead.GPUS, "v5e"


# ------------------------------------------------------------------------------------------------------- programs


LAYER = 2 * H, 4 * H
PREDICTORS = {"stateless": (models.stateless, [(2 * H, H)])}
PREDICTORS |= {"LSTM": (models.lstm, [LAYER]), "two LSTMs": (models.lstm, [LAYER, LAYER])}
SEARCHES = {
    "greedy": {},
    "greedy TDT": {"tdt": True},
    "beam 4": {"width": 4},
    "beam 6": {"width": 6},
    "beam 8": {"width": 8},
}


def trigram(labels):
    """An n-gram model of chains of labels, for `fusion`: its tables are as a file's would be."""
    pairs = [(i, 1 + i * 7 % (labels - 1)) for i in range(1, labels)]
    triples = [(*pair, 1 + sum(pair) % (labels - 1)) for pair in pairs]
    grams = {("<s>",): (-99, -0.5), ("</s>",): (-2, 0)}
    for chains, scores in (([(i,) for i, _ in pairs], (-3.0, -0.5)), (pairs, (-1.0, -0.5)), (triples, (-0.5, 0))):
        grams |= {tuple(map(str, chain)): scores for chain in chains}
    with tempfile.TemporaryDirectory() as folder:
        path = ngrams.written(pathlib.Path(folder) / "trigram.arpa", ngrams.arpa(grams))
        return decode.NGram.from_arpa(path, [None, *map(str, range(1, labels))])


def phrases(labels):
    """300 phrases of three labels each."""
    rng = np.random.default_rng(0)
    return decode.Phrases(rng.integers(1, labels, (300, 3)).tolist(), classes=labels)


MODELS = {"trigram": trigram, "phrases": phrases}


def search(name, predictor="LSTM", batch=16, classes=V, width=0, tdt=False, model=None):
    """(function, shapes of its arguments) of a search in one program."""
    make, layers = PREDICTORS[predictor]
    loss = TDTLoss(blank=0, durations=DURATIONS) if tdt else RNNTLoss(blank=0)

    def run(weights, output, bias, encoder_out, lengths):
        fusion = ((model, 0.3),) if model else ()
        search = decode.Search(loss, LinearJoint(output, bias), make(*weights), LABELS, fusion=fusion)
        found = search.beam(encoder_out, lengths, width) if width else search.greedy(encoder_out, lengths)
        return found[:-1]

    run.__name__ = re.sub(r"\W", "_", name)
    outputs = classes + len(DURATIONS) * tdt
    shapes = [[(classes, H), *layers], (H, outputs), (outputs,), (batch, T, H)]
    return run, shapes, (batch,)


def searches():
    """{name: program}"""
    found = {}
    for batch in (1, 16, 128):
        for kind in ("stateless", "LSTM"):
            for name, options in SEARCHES.items():
                found[f"{name}, {kind}, B = {batch}"] = dict(predictor=kind, batch=batch) | options
    large = dict(predictor="two LSTMs", batch=16, classes=8193, tdt=True)
    found |= {"greedy TDT, V = 8193, two LSTMs": large, "beam 4 TDT, V = 8193, two LSTMs": large | {"width": 4}}
    for name, width in (("greedy", 0), ("beam 4", 4)):
        for model in MODELS:
            found[f"{name}, {model}"] = dict(predictor="LSTM", batch=16, width=width, model=model)
    return found


def compiled(device, name, options, graphs=False):
    """(the program of a search for a device, the name of its module)"""
    options = options | ({"model": MODELS[options["model"]](V)} if options.get("model") else {})
    run, floats, integers = search(name, **options)
    sharding = NamedSharding(ahead.mesh(device), P())
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    arguments = jax.tree.map(lambda x: shaped(x, jnp.float32), floats, is_leaf=lambda x: isinstance(x, tuple))
    arguments.append(shaped(integers, jnp.int32))
    gpu = ahead.GPU_OPTIONS | (models.ON_DEVICE if graphs else {})
    return jax.jit(run).lower(*arguments).compile(gpu if device in ahead.GPUS else {}), run.__name__


# ------------------------------------------------------------------------------------------------------- steps


def steps(only):
    """{search: steps} for 4 utterances of 250 frames with about 75 labels: a small model of benchmarks/decode.py.

    Rows are too few to be packed on a CPU, so a GPU takes as many.
    """
    kind, calls = models.KINDS["lstm"]._replace(classes=256, units=256, share=0.33), []
    networks, encoder, _ = models.plant(kind, 4, T, 0)
    planted, lengths = models.search_of(kind, networks, LABELS), jnp.full(4, T, jnp.int32)

    def joint(*rows):  # a step calls it once
        jax.debug.callback(lambda: calls.append(1))
        return planted.joint(*rows)

    search = dataclasses.replace(planted, joint=joint)
    searches = {f"greedy, {k} frames at once": functools.partial(search.greedy, frames_at_once=k) for k in (1, 4, 8)}
    for width, k in itertools.product((4, 6), (1, 4)):
        searches[f"beam {width}, {k} frames at once"] = functools.partial(search.beam, width=width, frames_at_once=k)
    found = {}
    for name, verb in searches.items():
        if any(text in name for text in only or [""]):
            calls.clear()
            labels = jax.block_until_ready(jax.jit(verb)(encoder, lengths).counts)
            jax.effects_barrier()
            best = labels if labels.ndim == 1 else labels[:, 0]
            found[name] = {"steps": len(calls), "labels": float(jnp.mean(best))}
            print(name, found[name], flush=True)
    return found


# ------------------------------------------------------------------------------------------------ reading programs


class Thunk:
    """A line of XLA's sequence, and the thunks inside by their headings."""

    def __init__(self, kind, indent):
        self.kind, self.indent, self.heading, self.inside = kind, indent, "", {}

    def all_inside(self):
        return [thunk for thunks in self.inside.values() for thunk in thunks]


def parse(text):
    """The thunks of a program, as a tree."""
    path = [Thunk("program", -1)]
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        heading, thunk = re.match(r"\s*([a-z_]\w*):\s*$", line), re.match(r"\s*\d+: k(\w+)", line)
        # The condition of a loop comes first, with the indent of the loop or less.
        while (thunk or (heading and heading[1] != "condition")) and path[-1].indent >= indent:
            path.pop()
        if heading:
            path[-1].heading = heading[1]
        elif thunk:
            path.append(Thunk(thunk[1], indent))
            path[-2].inside.setdefault(path[-2].heading, []).append(path[-1])
    return path[0]


def launches(thunk, loops=True):
    """Of one turn of all loops, or without those inside, and the longest branches."""
    if thunk.kind == "Conditional":
        return max(sum(launches(x, loops) for x in branch) for branch in thunk.inside.values())
    inside = sum(launches(x, loops) for x in thunk.all_inside() if loops or x.kind != "While")
    return inside + (not thunk.inside and thunk.kind not in ("While", "CommandBuffer"))


def kinds(thunk, kind, graph=False):
    """Thunks of a kind inside, as pairs (thunk, whether it is in a graph)."""
    for inside in thunk.all_inside():
        if inside.kind == kind:
            yield inside, graph
        yield from kinds(inside, kind, graph or inside.kind == "CommandBuffer")


def step_counts(program):
    """What a turn of the loop that does most in the program does."""
    all_loops = [*kinds(program, "While")]
    loop, graph = max(all_loops, key=lambda found: launches(found[0], loops=False))
    around = [launches(x) - launches(loop) for x, _ in all_loops if loop in (y for y, _ in kinds(x, "While"))]
    loops, branches = ([*kinds(loop, kind, graph)] for kind in ("While", "Conditional"))
    waits = sum(not inside for _, inside in [(loop, graph), *loops, *branches])
    graphs = len([*kinds(loop, "CommandBuffer")]) + graph
    return {"launches": launches(loop), "waits": waits, "loops": len(loops), "graphs": graphs, "around": sum(around)}


def step_cycles(text):
    """XLA's estimate for the loop of a TPU's program that does most, in cycles; loops inside count one turn."""
    bodies = re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text)
    named = {re.match(r"(?:ENTRY )?%([\w.\-]+)", body)[1]: body for body in bodies if body.startswith(("%", "ENTRY"))}

    def cycles(name, inside=True):
        own = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', named[name])))
        branches = re.findall(r"branch_computations=\{([^}]*)\}", named[name])
        branches += re.findall(r"true_computation=(\S+), false_computation=(\S+?)[,\s]", named[name])
        names = [re.findall(r"%?([\w.\-]+)", x if isinstance(x, str) else " ".join(x)) for x in branches]
        loops = re.findall(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", named[name]) if inside else []
        own += sum(max(cycles(y, inside) for y in x) for x in names)
        return own + sum(sum(map(cycles, x)) for x in loops)

    loops = re.findall(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", text)
    return sum(map(cycles, max(loops, key=lambda loop: sum(cycles(x, inside=False) for x in loop))))


def counted(dump, device, name, options, graphs=False):
    program, module = compiled(device, f"{name} {device}", options, graphs)
    if device in ahead.TPUS:
        return {"cycles": step_cycles(program.as_text())}
    return step_counts(parse(thunks(dump, module)))


def thunks(dump, module):
    """The text of a module's sequence of thunks."""
    files = pathlib.Path(dump).glob(f"*.jit_{module}.thunk_sequence*.txt")
    return max(files, key=lambda path: len(path.name)).read_text()  # where no graph is made there is no second one


def device_options(parser, known):
    """Parses the command line: some of the known devices, or all, and where the counts go."""
    parser.add_argument("devices", nargs="*", help=", ".join(known))
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where the counts go")
    options = parser.parse_args()
    if unknown := {*options.devices} - {*known}:
        parser.error(f"devices must be among {', '.join(known)}, got {', '.join(unknown)}")
    options.devices = options.devices or [*known]
    return options


@contextlib.contextmanager
def dumped():
    """A folder for what XLA writes, which reads its name at the first compilation."""
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        yield dump


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="searches whose names hold it, or another one")
    parser.add_argument("--graphs", action="store_true", help="loops in CUDA graphs")
    parser.add_argument("--steps", action="store_true", help="how many steps searches take, and nothing else")
    options, counts = device_options(parser, DEVICES), {}
    if options.steps:
        found = {"jax": jax.__version__, "steps": steps(options.only)}
        return options.json.write_text(json.dumps(found, indent=1) + "\n") if options.json else None
    with dumped() as dump:
        for name, program in searches().items():
            if any(text in name for text in options.only or [""]):
                counts[name] = {x: counted(dump, x, name, program, options.graphs) for x in options.devices}
                print(name, counts[name], flush=True)
    if options.json:
        found = {"jax": jax.__version__, "loops in graphs": options.graphs, "steps": counts}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
