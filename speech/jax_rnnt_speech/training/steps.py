"""A step of training: the optimiser, the state, and the program that computes the next state."""

import functools

import jax
import jax.numpy as jnp
import optax

from jax_rnnt_speech.data.buckets import SECONDS, turns_of
from jax_rnnt_speech.model.encoders import contexts
from jax_rnnt_speech.training import objective
from jax_rnnt_speech.training.parts import STATISTICS


def updates_of(options, steps):
    """Returns (updates of a training, those until the highest learning rate)."""
    updates = max(1, steps // options.accumulate)
    return updates, 1 + int(options.warmup * updates)


def make_optimizer(options, steps, factors=None):
    """Returns AdamW with warm-up, clipping and accumulation. It skips and counts a step that is not finite.

    `options` is a `config.Optimiser`. `factors` multiply the learning rate, by the path of a parameter; with None,
    weights are any tree, and all have the same rate.
    """
    updates, warmup = updates_of(options, steps)
    schedule = optax.warmup_cosine_decay_schedule(0, options.learning_rate, warmup, max(updates, warmup) + 1)
    optimizer = optax.adamw(schedule, b2=0.98, weight_decay=options.decay)
    if options.clip:
        optimizer = optax.chain(optax.clip_by_global_norm(options.clip), optimizer)
    if factors:
        scale = optax.stateless(lambda updates, _: {path: factors[path] * x for path, x in updates.items()})
        optimizer = optax.chain(optimizer, scale)
    if options.accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, options.accumulate).gradient_transformation()
    return if_finite(optimizer)


def if_finite(optimizer):
    """Acts as optax.apply_if_finite without its conditional, for which XLA copies the state."""

    def update(updates, state, params):
        finite = jnp.isfinite(optax.tree_utils.tree_norm(updates))
        updates, inner = optimizer.update(updates, state.inner_state, params)
        updates, inner = (
            jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
            for after, before in ((updates, jax.tree.map(jnp.zeros_like, updates)), (inner, state.inner_state))
        )
        row, total = (jnp.where(finite, n, m + 1) for n, m in
                      ((0, state.notfinite_count), (state.total_notfinite, state.total_notfinite)))  # fmt: skip
        return updates, optax.ApplyIfFiniteState(row, finite, total, inner)

    return optax.GradientTransformation(optax.apply_if_finite(optimizer, 0).init, update)


def first_state(options, optimizer, weights):
    """Returns the state of a training: weights by path, the optimiser's state, and the weights' moving average."""
    state = {"weights": weights, "optimizer": optimizer.init(weights)}
    if options.average:
        state |= {"average": jax.tree.map(jnp.copy, weights), "updates": jnp.zeros((), jnp.int32)}
    return state


def used(options):
    """Returns the name in a state of the weights that are tested and used."""
    return "average" if options.average else "weights"


def averaged(options, before, state):
    """Returns the moving average after a step. It follows fast while there were few updates."""
    inner = (x["optimizer"].inner_state for x in (before, state))
    old, new = (x.gradient_step if options.accumulate > 1 else 0 for x in inner)
    updated = new != old if options.accumulate > 1 else state["optimizer"].last_finite
    updates = before["updates"] + updated
    decay = jnp.where(updated, jnp.minimum(options.average, (1 + updates) / (10 + updates)), 1)
    average = jax.tree.map(lambda x, y: decay * x + (1 - decay) * y, before["average"], state["weights"])
    return {"average": average, "updates": updates}


def part_of(batch, devices, turns, turn):
    """Returns one of so many equal parts of a batch. Each device has rows of every part, so that none move."""

    def part(x):
        size, *inner = x.shape
        each = x.reshape(devices, turns, size // (devices * turns), *inner)
        return jnp.swapaxes(each, 0, 1).reshape(turns, size // turns, *inner)[turn]

    return jax.tree.map(part, batch)


def make_train_step(model, parts, optimizer, layers=None, places=None, cpus=0, usual=None, warmup=1):
    """Returns a function (state, batch, frozen, step) -> (state, numbers), which is jitted unless there are `cpus`.

    `layers`: batches hold rows after so many. `cpus`: the devices are so many CPUs, which gain nothing from large
    batches, and take a batch in turns. `usual` is the mean number of utterances in a batch; with it, all utterances
    weigh alike in gradients, however many their batch has; with None, all batches weigh alike. `warmup` is the number
    of steps in which the weight of CR-CTC rises to its option's, as its divergence may be large before the CTC loss has
    learned anything.
    """
    options, features, copies = model.config.optimiser, model.config.features, model.config.masks[0]
    cpus *= layers is None and model.config.network.batch_norm == "frozen"  # else statistics are those of a batch

    def loss_of(weights, part, frozen, step, seed, valid):
        context = contexts.drawn(model.config.encoder, model.config.run.seed, step)
        ramp = jnp.minimum(step / warmup, 1) if copies > 1 else 1.0
        return objective.mean_loss(model, parts.whole(weights, frozen), part, seed, layers, valid, ramp, context)

    def updated(state, valid, value, gradient):
        """Returns the state after a step, and its numbers."""
        statistics = {name: x for name, x in gradient.items() if name.endswith(STATISTICS)}  # those after this batch
        if usual is not None:
            gradient = jax.tree.map(lambda x: x * (valid.sum() / usual), gradient)
        gradient |= jax.tree.map(jnp.zeros_like, statistics)
        least = min(gradient, key=lambda name: gradient[name].size)  # one is enough: a step is skipped for its norm
        gradient[least] = jnp.where(jnp.isfinite(value), gradient[least], jnp.nan)
        norm = optax.tree_utils.tree_norm(gradient)  # the norm that clipping computes, too: XLA computes it once
        updates, optimizer_state = optimizer.update(gradient, state["optimizer"], state["weights"])
        weights = optax.apply_updates(state["weights"], updates)
        weights |= {name: jnp.where(jnp.isfinite(norm), x, weights[name]) for name, x in statistics.items()}
        after = {"weights": weights, "optimizer": optimizer_state}
        if options.average:
            after |= averaged(options, state, after)
        numbers = {"loss": value, "norm": norm, "skipped": optimizer_state.total_notfinite}
        return after, numbers | {"row": optimizer_state.notfinite_count}

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=places and (places, None))
    def train_step(state, batch, frozen, step):
        found = jax.value_and_grad(loss_of)(state["weights"], batch, frozen, step, step, None)
        return updated(state, batch["valid"], *found)

    end = jax.jit(updated, donate_argnums=0, out_shardings=places and (places, None))
    total_places = places and (places["optimizer"].total_notfinite, places["weights"])

    @functools.partial(jax.jit, out_shardings=total_places)
    def nothing(weights):
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="turns", out_shardings=total_places)
    def add(total, weights, batch, frozen, step, turn, turns):
        """Adds the loss of a part and its gradient to a total."""
        part, seed = part_of(batch, cpus, turns, turn), step * turns + turn
        found = jax.value_and_grad(loss_of)(weights, part, frozen, step, seed, batch["valid"])
        return jax.tree.map(jnp.add, total, found)

    def in_turns(state, batch, frozen, step):
        """Computes the loss and its gradient by parts, so that memory holds the activations of one alone.

        Each part is a program: in a loop, XLA leaves convolutions as they are, and they take far longer on CPUs.
        """
        rows, frames = batch["features"].shape[:2]
        turns = turns_of(rows // cpus, copies * frames * features.hop / 1000, SECONDS)
        if turns == 1:
            return train_step(state, batch, frozen, step)
        total = nothing(state["weights"])
        for turn in range(turns):
            total = add(total, state["weights"], batch, frozen, step, turn, turns=turns)
        return end(state, batch["valid"], *total)

    in_turns.add = add
    return in_turns if cpus else train_step
