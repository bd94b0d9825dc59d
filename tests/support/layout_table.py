"""Layouts of logits under test, each with the array that it stands for, and joint networks in tiles and as a whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import batches
import family
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, LinearJoint, PackedLogits, prune_inputs, prune_ranges

NAMES = "array", "JointLogits", "PackedLogits", "BandLogits", "AdditiveLogits"
OF_LOGITS = NAMES[1:4]  # made of the array's own logits
WIDTH = 4  # columns of a band


def problem(loss=family.RNNT, name="array"):
    """A problem, and the arrays that a layout of it is made of and differentiated by."""
    p = batches.problem(loss=loss, scale=1.0)
    return p, arrays(p, name)


def arrays(p, name):
    if name != "AdditiveLogits":
        return (p.logits,)
    B, T, U1, V = p.logits.shape
    rng = np.random.default_rng(1)
    return rng.normal(size=(B, T, V)), rng.normal(size=(B, U1, V))


def first_columns(p):
    """A band that starts in column 0, ends in the last one, and leaves out nodes."""
    last = np.maximum(p.target_lengths - WIDTH + 1, 0)[:, None]
    steps = np.arange(p.logits.shape[1]) - p.logit_lengths[:, None] + 1 + last
    return np.clip(steps, 0, last).astype(np.int32)


def in_band(p):
    """Mask of its nodes [B, T, U1]."""
    place = np.arange(p.logits.shape[2]) - first_columns(p)[..., None]
    return (place >= 0) & (place < WIDTH)


def layout(p, name):
    """The function that makes the layout of its arrays."""
    _, T, U1, _ = p.logits.shape
    first = first_columns(p)
    kept = np.clip(first[..., None] + np.arange(WIDTH), 0, U1 - 1)[..., None]
    return {
        "array": lambda x: x,
        "JointLogits": lambda x: family.in_tiles(x, 64),
        "PackedLogits": lambda x: PackedLogits(x[np.nonzero(batches.inside(p))], T),
        "BandLogits": lambda x: BandLogits(jnp.take_along_axis(x, kept, 2), first),
        "AdditiveLogits": AdditiveLogits,
    }[name]


def dense(p, name):
    """The function that makes the array for which the layout stands."""
    return {
        "BandLogits": lambda x: jnp.where(in_band(p)[..., None], x, -jnp.inf),
        "AdditiveLogits": lambda am, lm: am[:, :, None] + lm[:, None],
    }.get(name, lambda x: x)


def ranges(lengths, width, planes, **options):
    """`prune_ranges` for (T_b, U_b) and posteriors (of blanks, of labels)."""
    names = "logit_lengths", "target_lengths", "blank_posteriors", "label_posteriors"
    return prune_ranges(**dict(zip(names, (*lengths, *planes))), width=width, **options)


def pruned_step(am, lm, *batch):
    """Both losses of pruned training and its band, with a joint between them."""
    loss = family.RNNT.value(reduction="none")
    simple = AdditiveLogits(am, lm)
    first = ranges(batch[1:], 3, loss.posteriors(simple, *batch))
    a, b = prune_inputs(am, lm, first, 3)
    return loss(simple, *batch), loss(BandLogits(jnp.tanh(a + b), first), *batch), first


B, T, U, V, H = 4, 23, 9, 9, 6
CHUNK = 64  # rows: several tiles


class Network:
    """Parameters (weight, bias), encoder and predictor rows, and the rest of a problem."""

    def __init__(self, loss=family.RNNT, batch=B, dtype=np.float64, seed=0):
        self.problem = batches.problem(batch, T, U, V, loss=loss, dtype=dtype, seed=seed)
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(size=shape).astype(jnp.dtype(dtype))
        self.parameters = draw(H, V + loss.extra_classes), draw(V + loss.extra_classes)
        self.rows = draw(batch, T, H), draw(batch, U + 1, H)
        self.batch = self.problem[1:]

    @property
    def arguments(self):
        return self.parameters, self.rows, self.batch

    def take(self, index):
        """Keeps these sequences."""
        self.rows, self.batch = (jax.tree.map(lambda x: x[index], x) for x in (self.rows, self.batch))
        return self

    def widened(self):
        """The same network in float64."""
        other = Network(batch=len(self.rows[0]))
        other.parameters, other.rows = jax.tree.map(lambda x: x.astype(np.float64), (self.parameters, self.rows))
        return other


def linear(weight, bias):
    return LinearJoint(weight, bias)


def closure(weight, bias):
    return lambda encoder, predictor: jnp.tanh(encoder + predictor) @ weight + bias[None]


def function(parameters, encoder, predictor):
    """The same with parameters of its own: `JointLogits(function, ..., parameters=(weight, bias))`."""
    return closure(*parameters)(encoder, predictor)


def tiles(parameters, rows, batch, *, joint=linear, loss=family.RNNT, chunk=CHUNK, **options):
    logits = (function, *rows, chunk, parameters) if joint is function else (joint(*parameters), *rows, chunk)
    return loss.value(**options)(JointLogits(*logits), *batch)


def materialized(parameters, rows, batch, *, loss=family.RNNT, **options):
    weight, bias = parameters
    hidden = jnp.tanh(rows[0][..., :, None, :] + rows[1][..., None, :, :])
    logits = (hidden.reshape(-1, H) @ weight + bias[None]).reshape(*hidden.shape[:-1], len(bias))
    return loss.value(**options)(logits, *batch)


def gradients_anew(function, **options):
    """Compiled (losses, gradients of their weighted sum with respect to parameters and rows) of a network."""

    def total(parameters, rows, batch, weights):
        values = function(parameters, rows, batch, reduction="none", **options)
        return jnp.sum(values * weights.astype(values.dtype)), values

    run = jax.jit(jax.grad(total, (0, 1), has_aux=True))

    def call(network, weights=1.0):
        gradient, values = run(*network.arguments, np.broadcast_to(np.asarray(weights), network.batch[1].shape))
        return values, gradient

    return call


gradients = functools.cache(gradients_anew)  # not where a test patches the library


@functools.cache
def step_of_logits(batch, dtype=np.float32):
    """(loss, gradients of parameters and rows) of all logits at once."""
    return jax.jit(jax.value_and_grad(materialized, (0, 1)))(*Network(batch=batch, dtype=dtype).arguments)
