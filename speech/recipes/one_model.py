"""One model for whole lines and for live ones, beside a model for each.

    python speech/recipes/one_model.py

The first model trains on whole lines alone. The second one draws for each batch what frames see: a chunk, with some
frames before and after it. The third one sees everything in half of its batches. Each is tested on 1,000 lines, whole
and live: by windows, of which the rows of the chunk are kept, at two latencies. Rates are means over the seeds.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from _shared import Digits, check, error_rate, fit, parse
from corpora import digits as corpus

from jax_rnnt_speech.model.encoders import contexts
from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.training import objective

CONTEXTS = {"chunk": (2, 4, 8), "past": 16, "ahead": (0, 2, 4)}  # encoder frames; a digit has about six
MODELS = {"whole lines": 1.0, "live": 0.0, "both": 0.5}  # the share of batches that see everything
LATENCIES = (2, 2), (4, 4)  # frames of a chunk, and after it
SHAPE = {"encoder": "conformer", "width": 48, "expansion": 2, "blocks": 2, "channels": 8, "convolution": 7,
         "strides": ((2, 2),), "learning_rate": 3e-3}  # fmt: skip


def fitted(model, params, digits, share):
    """Parameters after a training. Contexts come with the batches, so that one program serves all models."""
    options = model.config.replace(whole=share).encoder
    draw = jax.jit(lambda step: contexts.drawn(options, digits.config.run.seed, step))

    def loss(params, batch, step):
        batch = {**batch}
        return objective.mean_loss(model, params, batch, step, context=contexts.Context(*batch.pop("context")))

    return fit(params, loss, digits, lambda params, batch, step: batch | {"context": tuple(draw(step))})


@functools.partial(jax.jit, static_argnums=0)
def whole(model, params, context, batch):
    """Labels [B, N] and their numbers [B] of lines that are there as a whole."""
    network = model.network(params)
    found = search(model, network, *network.encode(model.inputs(batch), batch["lengths"], context))
    return found.labels, found.counts


@functools.partial(jax.jit, static_argnums=(0, 2))
def live(model, params, sizes, everything, batch):
    """Labels [B, N] and their numbers [B] of lines that are heard window by window.

    `everything`: frames see all of their window, as those of a model that knows no contexts.
    """
    network, (chunk, right), past = model.network(params), sizes, CONTEXTS["past"]
    x, rate, lengths = model.inputs(batch), model.subsampling, batch["lengths"]
    frames, size = -(-x.shape[1] // rate), past + chunk + right
    x = jnp.pad(x, ((0, 0), (0, (size + chunk) * rate), (0, 0)))

    def window(start):
        begin = jnp.maximum(start - past, 0)
        there = jnp.clip(lengths - begin * rate, 0, (start - begin + chunk + right) * rate)
        part = jax.lax.dynamic_slice_in_dim(x, begin * rate, size * rate, 1)
        context = contexts.Context(past, chunk, right, (begin - start) % chunk)
        context = contexts.Context(*(jnp.where(everything, x, y) for x, y in zip(contexts.WHOLE, context)))
        rows, _ = network.encode(part, there, context)
        return jax.lax.dynamic_slice_in_dim(rows, start - begin, chunk, 1)

    rows = jax.lax.map(window, jnp.arange(0, frames, chunk))
    rows = jnp.moveaxis(rows, 0, 1).reshape(len(lengths), -1, rows.shape[-1])
    found = search(model, network, rows, -(-lengths // rate))
    return found.labels, found.counts


def rates(model, digits, share):
    """Error rates of a new model: of whole lines, in the largest context that it knows, and live at each latency."""
    params = fitted(model, digits.model().params, digits, share)
    usual = contexts.usual(model.config.replace(whole=share).encoder) or contexts.WHOLE
    searches = [functools.partial(whole, model, params, usual)]
    searches += [functools.partial(live, model, params, sizes, share == 1) for sizes in LATENCIES]
    return [error_rate(x, digits) for x in searches]


def kept(file, key, make):
    """What `make` returns. A file of JSON keeps it, so that a run that was cut off loses little."""
    found = json.loads(file.read_text()) if file.is_file() else {}
    if key not in found:
        found[key] = make()
        if file.name:
            file.write_text(json.dumps(found, indent=1))
    return found[key]


def main():
    args = parse(__doc__, steps=1000, seeds=3, keep="")
    corpus.LINES = corpus.LINES | {"valid": 2 * corpus.LINES["valid"]}
    found, model = {name: [] for name in MODELS}, None
    for seed in range(args.seed, args.seed + args.seeds):
        digits = Digits(steps=args.steps, seed=seed, **SHAPE, **CONTEXTS, whole=0.5)
        model = model or digits.model()
        for name, share in MODELS.items():
            key = f"{name}, seed {seed}, {args.steps} steps"
            make = functools.partial(rates, model, digits, share)
            found[name].append(kept(Path(args.keep), key, make))
            print(f"{key}: {', '.join(f'{x:.2f}' for x in found[name][-1])}", flush=True)
    means = {name: np.mean(x, 0) for name, x in found.items()}
    errors = {name: np.std(x, 0, ddof=args.seeds > 1) / args.seeds**0.5 for name, x in found.items()}
    heads = [f"live, chunk {a} and {b} ahead" for a, b in LATENCIES]
    print(f"| CER, % | whole lines | {' | '.join(heads)} |\n|---|{'--:|' * (1 + len(heads))}")
    for name in MODELS:
        print(f"| {name} | {' | '.join(f'{a:.2f} ± {b:.2f}' for a, b in zip(means[name], errors[name]))} |")
    worst = 0
    for i, name in enumerate(["whole lines", *["live"] * len(LATENCIES)]):
        allowed = max(0.1 * means[name][i], 2 * np.hypot(errors["both"][i], errors[name][i]), 1e-9)
        worst = max(worst, (means["both"][i] - means[name][i]) / allowed)
    check("what one model costs, as a part of the larger of 10% and two standard errors", worst, 1)


if __name__ == "__main__":
    main()
