"""Times the RNN-T loss of logits and its gradient, by shape: this library, its rivals, and a copy.

All contestants of a case take turns in one run; every repetition works on a fresh copy of the logits, made outside the
timed region. See README.md beside this file.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

import cases
import jax_rnnt as rnnt
import measure
import problems
from jax_rnnt import _bench

NEG = -1e30  # log 0; finite, so that autodiff meets no inf - inf


def skew(x):
    """[B, T, U1] -> [T + U1 - 1, B, U1]: entry [n, b, u] is node (n - u, u)."""
    B, T, U1 = x.shape
    x = jnp.pad(x.transpose(2, 0, 1), ((0, 0), (0, 0), (0, U1)), constant_values=NEG)  # [U1, B, T + U1]
    x = x.transpose(1, 0, 2).reshape(B, -1)[:, : U1 * (T + U1 - 1)]
    return x.reshape(B, U1, T + U1 - 1).transpose(2, 0, 1)


def plain(logits, targets, logit_lengths, target_lengths):
    """The loss as a user would write it: log_softmax, a gather, a scan over the anti-diagonals, and autodiff."""
    B, _, U1, _ = logits.shape
    log_probs = jax.nn.log_softmax(logits)
    log_blank = log_probs[..., -1]
    labels = jnp.pad(targets, ((0, 0), (0, 1)))[:, None, :, None]
    log_label = jnp.take_along_axis(log_probs, labels, -1)[..., 0]

    def step(alpha, diagonal):
        blank, label = diagonal
        moved = jnp.pad((alpha + label)[:, :-1], ((0, 0), (1, 0)), constant_values=NEG)
        return jnp.logaddexp(alpha + blank, moved), alpha

    start = jnp.full((B, U1), NEG).at[:, 0].set(0.0)
    _, alphas = jax.lax.scan(step, start, (skew(log_blank), skew(log_label)))
    b, t, u = jnp.arange(B), logit_lengths - 1, target_lengths
    return -(alphas[t + u, b, u] + log_blank[b, t, u]).mean()


def contestants(case, args, worker):
    """The RNN-T loss. All compute the same mean loss; the last class is the blank."""

    def start(name, loss, case=case, **options):
        sources, batch = problems.logits(case, args.seed)
        return measure.program(name, loss, (*sources, *batch), **options)

    measured = [
        start("ours, reference", rnnt.RNNTLoss(implementation="reference"), donate=True),
        start("ours", rnnt.RNNTLoss(), donate=True),
        start("ours, not in place", rnnt.RNNTLoss(inplace=False)),
        start("plain JAX", plain),
        start("plain JAX, donated", plain, donate=True),
    ]
    for peer in ("torchaudio", "warp-transducer"):
        if worker and peer in worker.names:
            measured.append(worker.contestant(peer, "logits", case.name, args.seed))
    # Gradients from float32 logs of up to T + U nats are off by up to 1e-3.
    measure.agree(measured[0], measured[1:], gradient=2e-3 / case.B)
    if case.valid < 1:  # the same logits with full lengths, measured in the same turns, to judge the padding
        measured.append(start("ours, all valid", rnnt.RNNTLoss(), dataclasses.replace(case, shortest=1.0), donate=True))
    measured.append(start("ours, the loss alone", rnnt.RNNTLoss(), gradient=None))
    return measured


def aims(case):
    limits = [("ours, reference", "ours", ">= 1")]
    if case == "subwords":
        limits += [("torchaudio", "ours", ">= 50"), ("plain JAX", "ours", ">= 6"), ("warp-transducer", "ours", ">= 4")]
    return limits + [("ours", "ours, all valid", "<= 0.55")] * (case == "subwords_ragged")


def case_of(case, args, worker):
    """With a copy of as many bytes as value and gradient must move: each valid logit is read twice and its gradient is
    written once."""
    measured, size = contestants(case, args, worker), 4 * math.prod(case.shape) * case.valid
    copy = measure.Contestant("copy", None, seconds=[3 * size / _bench.copy_speed(int(size))])
    title = f"{case.name}: B={case.B} T={case.T} U={case.U} V={case.V}, {case.valid:.0%} of the nodes valid"
    speed = {"GB/s": lambda c: f"{3 * size / c.median / 1e9:.1f}"}
    return measure.Case(title, [copy, *measured], ("copy", "ours"), aims(case.name), speed)


def main(argv=None, peers=None):
    """`peers` starts a worker with so many threads, whose contestants join in."""
    args = measure.options(__doc__, [case.name for case in cases.LARGE]).parse_args(argv)
    measure.settle(args)
    worker = peers(args.threads) if peers else None
    makers = {name: functools.partial(case_of, cases.CASES[name], args, worker) for name in args.only}
    measure.run(args, "", makers, versions=worker.versions if worker else {})


if __name__ == "__main__":
    main()
