"""CTC (optax) and RNN-T on one encoder: CTC helps it to align early, and is a second, faster recogniser.

python recipes/multitask.py
"""

import jax
import jax.numpy as jnp
import optax
from _shared import Digits, check, error_rate, fit, greedy, parse


def paddings(lengths, size):
    """optax's convention: 1 for padding, of [B] lengths."""
    return (jnp.arange(size) >= lengths[:, None]).astype(jnp.float32)


def main():
    args = parse(__doc__, steps=2000, ctc_weight=0.3)
    digits = Digits(steps=args.steps, seed=args.seed)
    recogniser, blank = digits.recogniser(), digits.blank  # the last class of both losses
    shape = digits.config.width, blank + 1
    kernel = jax.random.normal(jax.random.key(args.seed), shape) / shape[0] ** 0.5
    head = {"kernel": kernel, "bias": jnp.zeros(shape[1])}

    def ctc_logits(params, rows):
        return rows @ params[1]["kernel"] + params[1]["bias"]

    def mean_loss(params, batch, step):
        model = recogniser.model(params[0], step)
        x = recogniser.encoded(model, recogniser.inputs(batch), batch)
        rnnt = recogniser.loss(model.joint.logits(x.frames, x.states), *x[2:])
        lengths = paddings(x.frame_lengths, x.frames.shape[1]), paddings(x.target_lengths, x.targets.shape[1])
        ctc = optax.ctc_loss(ctc_logits(params, x.frames), lengths[0], x.targets, lengths[1], blank_id=blank)
        return jnp.mean((1 - args.ctc_weight) * rnnt + args.ctc_weight * ctc)

    params = fit((recogniser.params, head), mean_loss, digits)

    @jax.jit
    def ctc_search(batch):
        """The best class of each frame, without repetitions and blanks."""
        rows, lengths = recogniser.model(params[0]).encode(recogniser.inputs(batch), batch["lengths"])
        best = ctc_logits(params, rows).argmax(-1)
        new = best != jnp.pad(best, ((0, 0), (1, 0)), constant_values=blank)[:, :-1]
        kept = new & (best != blank) & (jnp.arange(best.shape[1]) < lengths[:, None])
        order = jnp.argsort(~kept, axis=1, stable=True)
        return jnp.take_along_axis(best, order, 1), kept.sum(1)

    check("CER of CTC", error_rate(ctc_search, digits), 8)
    check("CER of RNN-T", error_rate(greedy(recogniser, params[0]), digits), 5)


if __name__ == "__main__":
    main()
