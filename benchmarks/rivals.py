"""The loss in pure JAX: as a user would write it, and with care. The last class is the blank."""

import jax
import jax.numpy as jnp

NEG = -1e30  # log 0; finite, so that autodiff meets no inf - inf


def skew(x):
    """[B, T, U1] -> [T + U1 - 1, B, U1]: entry [n, b, u] is node (n - u, u)."""
    B, T, U1 = x.shape
    x = jnp.pad(x.transpose(2, 0, 1), ((0, 0), (0, 0), (0, U1)), constant_values=NEG)  # [U1, B, T + U1]
    x = x.transpose(1, 0, 2).reshape(B, -1)[:, : U1 * (T + U1 - 1)]
    return x.reshape(B, U1, T + U1 - 1).transpose(2, 0, 1)


def unskew(x, T):
    """The inverse of skew."""
    N, B, U1 = x.shape
    x = x.transpose(1, 2, 0).reshape(B, -1)
    x = jnp.pad(x, ((0, 0), (0, U1))).reshape(B, U1, N + 1)
    return x[:, :, :T].transpose(0, 2, 1)


def shift(x, by):
    """Moves [B, U1] along u by 1 or -1."""
    pad, cut = ((1, 0), slice(None, -1)) if by > 0 else ((0, 1), slice(1, None))
    return jnp.pad(x, ((0, 0), pad), constant_values=NEG)[:, cut]


def plain(logits, targets, logit_lengths, target_lengths):
    """Uses log_softmax, a gather, a scan over the anti-diagonals, and automatic differentiation."""
    B, _, U1, _ = logits.shape
    log_probs = jax.nn.log_softmax(logits)
    log_blank = log_probs[..., -1]
    labels = jnp.pad(targets, ((0, 0), (0, 1)))[:, None, :, None]
    log_label = jnp.take_along_axis(log_probs, labels, -1)[..., 0]

    def step(alpha, diagonal):
        blank, label = diagonal
        return jnp.logaddexp(alpha + blank, shift(alpha + label, 1)), alpha

    start = jnp.full((B, U1), NEG).at[:, 0].set(0.0)
    _, alphas = jax.lax.scan(step, start, (skew(log_blank), skew(log_label)))
    b, t, u = jnp.arange(B), logit_lengths - 1, target_lengths
    return -(alphas[t + u, b, u] + log_blank[b, t, u]).mean()


@jax.custom_vjp
def emission(logits, labels):
    """Log-probabilities [B, T, U1] of the blank and label arcs; its backward pass may write over donated logits."""
    return emission_fwd(logits, labels)[0]


def emission_fwd(logits, labels):
    # Exact unless an exp leaves the range of float32, so logsumexp, which finds the largest logit first, is rare.
    total = jnp.sum(jnp.exp(logits), -1)
    in_range = jnp.all((total > 1e-30) & (total < 1e30))
    lse = jax.lax.cond(in_range, lambda: jnp.log(total), lambda: jax.nn.logsumexp(logits, -1))
    label = jnp.take_along_axis(logits, labels[:, None, :, None], -1)[..., 0]
    return (logits[..., -1] - lse, label - lse), (logits, labels, lse)


def emission_bwd(residuals, cotangents):
    logits, labels, lse = residuals
    blank, label = (x[..., None] for x in cotangents)
    classes = jnp.arange(logits.shape[-1])
    gradient = jnp.where(classes == labels[:, None, :, None], label, 0.0)
    gradient += jnp.where(classes == logits.shape[-1] - 1, blank, 0.0)
    return gradient - jnp.exp(logits - lse[..., None]) * (blank + label), None


emission.defvjp(emission_fwd, emission_bwd)


@jax.custom_vjp
def lattice(log_blank, log_label, logit_lengths, target_lengths):
    """Loss [B] of arcs [B, T, U1]; the gradient is minus the posteriors, computed with the loss."""
    return lattice_fwd(log_blank, log_label, logit_lengths, target_lengths)[0]


def lattice_fwd(log_blank, log_label, logit_lengths, target_lengths):
    B, T, U1 = log_blank.shape
    t, u = jnp.arange(T)[:, None], jnp.arange(U1)
    last_t, last_u = logit_lengths[:, None, None] - 1, target_lengths[:, None, None]
    blank = jnp.where((t < last_t) & (u <= last_u) | (t == last_t) & (u == last_u), log_blank, NEG)
    label = jnp.where((t <= last_t) & (u < last_u), log_label, NEG)

    def forward(alpha, diagonal):
        blank, label = diagonal
        by_blank, by_label = alpha + blank, shift(alpha + label, 1)
        ratio = jnp.exp(-jnp.abs(by_blank - by_label))
        alpha = jnp.maximum(by_blank, by_label) + jnp.log1p(ratio)
        return alpha, (alpha, jnp.where(by_label > by_blank, 1.0, ratio) / (1.0 + ratio))

    start = jnp.full((B, U1), NEG).at[:, 0].set(0.0)
    _, (alphas, entered_by_label) = jax.lax.scan(forward, start, (skew(blank), skew(label)))
    last, at_end = logit_lengths + target_lengths - 1, u == target_lengths[:, None]

    def backward(occupancy, diagonal):
        n, entered_by_label = diagonal
        occupancy = jnp.where((n == last)[:, None] & at_end, 1.0, occupancy)
        label = entered_by_label * occupancy
        blank, label = occupancy - label, jnp.pad(label[:, 1:], ((0, 0), (0, 1)))
        return blank + label, (blank, label)

    diagonals = jnp.arange(T + U1 - 1), entered_by_label
    _, posteriors = jax.lax.scan(backward, jnp.zeros((B, U1)), diagonals, reverse=True)
    return -alphas[last, jnp.arange(B), target_lengths], [unskew(x, T) for x in posteriors]


def lattice_bwd(posteriors, cotangent):
    return *(-cotangent[:, None, None] * x for x in posteriors), None, None


lattice.defvjp(lattice_fwd, lattice_bwd)


def two_stage(logits, targets, logit_lengths, target_lengths):
    """Emission and lattice with hand-written gradients: no tensor of log-probabilities, in place on donated logits."""
    arcs = emission(logits, jnp.pad(targets, ((0, 0), (0, 1))))
    return lattice(*arcs, logit_lengths, target_lengths).mean()
