"""Writes traces.json: what greedy search does, move by move, in small models whose numbers are all in the file.

    python tests/golden/write.py

The moves are found by a plain loop in NumPy, float64, without the library; `tests/decode/test_traces.py` compares both.
docs/decoding.md says what the fields mean.
"""

import json
import pathlib

import numpy as np

FILE = pathlib.Path(__file__).parent / "traces.json"
FRAMES, UNITS, LABELS, MAX_SYMBOLS = 16, 4, 4, 2
CASES = {
    "rnnt": dict(seed=22),
    "multiblank": dict(seed=29, big_blanks=[2, 3]),
    "tdt, pair": dict(seed=5, durations=[0, 1, 2, 4]),
    "tdt, token first": dict(seed=5, durations=[0, 1, 2, 4], token_first=True),
}


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def model(seed, big_blanks=(), durations=(), token_first=False):
    """All numbers of a model. Classes are the labels, the big blanks, the last one first, the blank, the durations."""
    rng = np.random.default_rng(seed)
    blank = len(big_blanks) + LABELS
    classes = blank + 1 + len(durations)
    draw = lambda *shape: np.round(rng.normal(0, 1.5, shape), 2)
    arrays = dict(encoder=draw(FRAMES, UNITS), predictor=draw(blank + 1, UNITS), weight=draw(UNITS, classes))
    bias = np.zeros(classes)
    bias[LABELS : blank + 1] = 1.0
    options = dict(big_blanks=[*big_blanks], durations=[*durations], token_first=token_first, max_symbols=MAX_SYMBOLS)
    return options | dict(blank=blank, start=blank) | {k: x.tolist() for k, x in (arrays | dict(bias=bias)).items()}


def moves(row, blank, big_blanks, durations):
    """[(log-probability, label or None, frames that it reads)] in the order in which ties are broken."""
    if durations:
        tokens, each = log_softmax(row[: blank + 1]), log_softmax(row[blank + 1 :])
        found = [(tokens[blank] + q, None, d) for q, d in zip(each, durations) if d]
        return found + [(tokens[k] + q, k, d) for q, d in zip(each, durations) for k in range(blank)]
    tokens = log_softmax(row)
    found = [(tokens[blank], None, 1), *((tokens[blank - 1 - i], None, d) for i, d in enumerate(big_blanks))]
    return found + [(tokens[k], k, 0) for k in range(LABELS)]


def first_token(row, blank, durations, full):
    """The most probable token, then the most probable duration by itself."""
    tokens, each = log_softmax(row[: blank + 1]), log_softmax(row[blank + 1 :])
    token, best = (blank if full else int(np.argmax(tokens))), int(np.argmax(each))
    reads = durations[best]
    return tokens[token] + each[best], None if token == blank else token, max(reads, 1) if token == blank else reads


def steps_of(model):
    """[{frame, label, duration, score}] of the moves of greedy search."""
    weight, bias = np.array(model["weight"]), np.array(model["bias"])
    frame, last, here, steps = 0, model["start"], 0, []
    while frame < FRAMES:
        hidden = np.tanh(np.array(model["encoder"][frame]) + np.array(model["predictor"][last]))
        row, full = hidden @ weight + bias, here == model["max_symbols"]
        if model["token_first"]:
            score, label, reads = first_token(row, model["blank"], model["durations"], full)
        else:
            every = moves(row, model["blank"], model["big_blanks"], model["durations"])
            score, label, reads = max((x for x in every if x[1] is None or not full), key=lambda x: x[0])
        steps.append(
            dict(frame=frame, label=-1 if label is None else label, duration=reads, score=round(float(score), 10))
        )
        last, here = (last if label is None else label), (here + 1 if label is not None and not reads else 0)
        frame += reads
        if model["token_first"] and here == model["max_symbols"]:  # the last label of a frame leaves it
            frame, here = frame + 1, 0
    return steps


def document():
    return {name: (made := model(**options)) | {"steps": steps_of(made)} for name, options in CASES.items()}


def lines(found):
    """JSON with a line for each row of numbers and each step."""
    fields = lambda case: ",\n".join(f"  {json.dumps(name)}: {value(x)}" for name, x in case.items())
    value = lambda x: "[\n   " + ",\n   ".join(map(json.dumps, x)) + "\n  ]" if nested(x) else json.dumps(x)
    nested = lambda x: isinstance(x, list) and len(x) > 0 and isinstance(x[0], (list, dict))
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {{\n{fields(case)}\n }}" for name, case in found.items()) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(lines(document()))
