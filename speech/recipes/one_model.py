"""One model for whole lines and for live ones, beside a model for each.

    python speech/recipes/one_model.py

The first model sees whole lines alone. The second one draws for each batch what frames see, a chunk with some frames
before and behind it; the third one sees everything in half of the batches. Each is tested on 1,000 whole lines, and
live: by windows, of which the chunk's rows are kept, at two latencies. Rates are means over the seeds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from _shared import Digits, check, error_rate, fit, greedy, parse
from corpora import digits as corpus

from jax_rnnt_speech.model.encoders import contexts
from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.training import objective

LIVE = {"chunk": (2, 4, 8), "past": 16, "ahead": (0, 2, 4)}  # encoder frames; a digit has about six
MODELS = {"whole lines": {}, "live": LIVE, "both": LIVE | {"whole": 0.5}}
LATENCIES = (2, 2), (4, 4)  # frames of a chunk, and behind it
SHAPE = {"encoder": "conformer", "width": 64, "blocks": 3, "heads": 4, "convolution": 7, "learning_rate": 0.002}


def loss_of(model):
    """A function of (params, batch, step): the loss in the context that the step draws."""

    def loss(params, batch, step):
        context = contexts.drawn(model.config.encoder, model.config.run.seed, step)
        return objective.mean_loss(model, params, batch, step, context=context)

    return loss


@functools.partial(jax.jit, static_argnums=(0, 3))
def live(model, params, batch, sizes):
    """Labels [B, N] and their numbers [B] of lines that are heard window by window."""
    network, (chunk, right), past = model.network(params), sizes, LIVE["past"]
    x, rate, lengths = model.inputs(batch), model.subsampling, batch["lengths"]
    frames, size = -(-x.shape[1] // rate), past + chunk + right
    x = jnp.pad(x, ((0, 0), (0, (size + chunk) * rate), (0, 0)))

    def window(start):
        begin = jnp.maximum(start - past, 0)
        heard = jnp.minimum(lengths - begin * rate, (start - begin + chunk + right) * rate)
        part = jax.lax.dynamic_slice_in_dim(x, begin * rate, size * rate, 1)
        context = contexts.Context(past, chunk, right, (begin - start) % chunk) if model.config.encoder.draws else None
        rows, _ = network.encode(part, jnp.maximum(heard, 0), context)
        return jax.lax.dynamic_slice_in_dim(rows, start - begin, chunk, 1)

    rows = jax.lax.map(window, jnp.arange(0, frames, chunk))
    rows = jnp.moveaxis(rows, 0, 1).reshape(len(lengths), -1, rows.shape[-1])
    found = search(model, network, rows, -(-lengths // rate))
    return found.labels, found.counts


def rates(name, seed, steps):
    """Error rates of a new model: of whole lines, and live at each latency."""
    digits = Digits(steps=steps, seed=seed, **SHAPE, **MODELS[name])
    model = digits.model()
    params = fit(model.params, loss_of(model), digits)
    searches = [greedy(model, params)]
    searches += [functools.partial(lambda sizes, batch: live(model, params, batch, sizes), x) for x in LATENCIES]
    return [error_rate(x, digits) for x in searches]


def main():
    args = parse(__doc__, steps=2500, seeds=3)
    corpus.LINES = corpus.LINES | {"valid": 2 * corpus.LINES["valid"]}
    found = {name: np.array([rates(name, args.seed + i, args.steps) for i in range(args.seeds)]) for name in MODELS}
    heads = [f"live, chunk {a} and {b} ahead" for a, b in LATENCIES]
    print(f"| CER, % | whole lines | {' | '.join(heads)} |\n|---|{'--:|' * (1 + len(heads))}")
    for name, x in found.items():
        error = x.std(0, ddof=args.seeds > 1) / args.seeds**0.5
        print(f"| {name} | {' | '.join(f'{a:.2f} ± {b:.2f}' for a, b in zip(x.mean(0), error))} |", flush=True)
    whole, alone, both = (x.mean(0) for x in found.values())
    best = np.array([whole[0], *alone[1:]])
    check("CER of both, times that of the model for the same use, at worst", (both / np.maximum(best, 1e-9)).max(), 1.3)


if __name__ == "__main__":
    main()
