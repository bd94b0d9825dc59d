"""Inputs of all losses, also of those that do not take the logits of all nodes. Uses NumPy only, since the PyTorch
worker imports it."""

import dataclasses
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
import cases


def make(problem, case, seed):
    """(array or tuple of arrays to differentiate by, other inputs of the loss).

    "logits": [B, T, U1, V]; "wide N": [B, T, U1, V + N], the durations last; "heads": am [B, T, V] and lm [B, U1, V];
    "packed": [N, V], the nodes inside the lengths; "band S": [B, T, S, V] along the diagonal, and its first columns
    [B, T].
    """
    logits, *rest = cases.make_inputs(case, seed=seed)
    kind, _, width = problem.partition(" ")
    if kind == "wide":
        return cases.make_inputs(dataclasses.replace(case, V=case.V + int(width)), seed=seed).logits, rest
    if kind == "heads":
        return (logits[:, :, 0], logits[:, 0]), rest
    if kind == "packed":
        rows = [logits[b, :n, : m + 1].reshape(-1, case.V) for b, (n, m) in enumerate(zip(*case.lengths))]
        return np.concatenate(rows), rest
    if kind == "band":
        first = np.linspace(0, case.U + 1 - int(width), case.T).astype(np.int32)
        columns = first[:, None] + np.arange(int(width))
        band = np.take_along_axis(logits, columns[None, :, :, None], 2)
        return band, [np.tile(first, (case.B, 1)), *rest]
    return logits, rest
