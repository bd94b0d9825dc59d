"""What `blank_threshold` costs in errors and saves in work, on lines of handwritten digits: a table.

    .venv-speech/bin/python lab/benchmarks/blank_first.py

A HAT and an RNN-T are trained (`recipes/_shared.py`). Then held-out lines are searched one by one with each threshold:
`products` are the products of the joint network for labels that run, `read` the labels that the predictor reads, both
as a share of those with a threshold of 1. Nothing is timed.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
sys.path.insert(0, str(Path(__file__).parents[2] / "speech"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from _shared import Digits, fit, mean_loss, parse

from jax_rnnt import decode
from jax_rnnt.decode.search import _problem
from jax_rnnt.metrics import label_errors

THRESHOLDS = 1 - 1e-7, 0.999, 0.99, 0.9, 0.7, 0.5
counted = {"products": 0, "read": 0}


def count(name, number):
    """Adds a number when the program runs."""

    def add(number):
        counted[name] += int(number)

    jax.debug.callback(add, jnp.int32(number))


def counting(name, function):
    """The function, which counts its calls."""

    def call(*arguments):
        count(name, 1)
        return function(*arguments)

    return call


def searched(model, params, verb):
    """A function of (batch, threshold): labels and their numbers."""

    @functools.partial(jax.jit, static_argnums=1)
    def search(batch, threshold):
        network = model.network(params)
        rows, lengths = network.encode(model.inputs(batch), batch["lengths"])
        joint, predictor, encoder_out = network.joint.decoder_inputs(network.predictor, rows)

        def step(state, labels):
            count("read", labels.shape[0])
            return predictor.step(state, labels)

        reading = decode.Predictor(predictor.initial, step, predictor.start, predictor.symbols)
        value = decode.Search(model.loss, joint, reading, 20, max_symbols=3, blank_threshold=threshold)
        found = value.greedy(encoder_out, lengths) if verb == "greedy" else value.beam(encoder_out, lengths, 4)
        best = (found.labels, found.counts) if verb == "greedy" else (found.labels[:, 0], found.counts[:, 0])
        return best

    return search


def measured(search, lines, threshold):
    """(label errors in per cent, products for labels, labels read)"""
    counted.update(dict.fromkeys(counted, 0))
    errors = total = 0
    for batch in lines:
        labels, counts = jax.device_get(search(batch, threshold))
        errors += int(label_errors(labels, counts, batch["targets"], batch["target_lengths"]).total.sum())
        total += int(batch["target_lengths"].sum())
    jax.effects_barrier()
    return 100 * errors / total, counted["products"], counted["read"]


def one_by_one(digits, number):
    """Batches of single lines."""
    found = []
    for batch in digits.tests():
        valid = np.flatnonzero(batch.pop("valid"))
        batch.pop("index")
        found += [{name: np.asarray(x)[i : i + 1] for name, x in batch.items()} for i in valid]
    return found[:number]


def main():
    args = parse(__doc__, steps=450, lines=200)
    digits = Digits(steps=args.steps, seed=args.seed)
    lines = one_by_one(digits, args.lines)
    _problem.product = counting("products", _problem.product)
    print("| loss | search | threshold | CER | products | read |\n|---|---|--:|--:|--:|--:|")
    for loss in ("hat", "rnnt"):
        model = digits.model(loss=loss)
        params = fit(model.params, mean_loss(model), digits)
        for verb in ("greedy", "beam"):
            search, whole = searched(model, params, verb), None
            for threshold in THRESHOLDS:
                rate, products, read = measured(search, lines, threshold)
                whole = whole or (products, read)
                row = [f"{rate:.2f}", *(f"{100 * x / y:.0f}%" if y else "" for x, y in zip((products, read), whole))]
                print(f"| {loss} | {verb} | {threshold:g} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
