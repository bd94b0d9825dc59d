"""Losses whose classes or frames lie on several devices: checks, the emission of one device, the way into the mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt.emissions._frames import SplitFrames, own_frames
from jax_rnnt.emissions._vocabulary import SplitVocabulary
from jax_rnnt.layouts import _layout
from jax_rnnt.losses._reductions import reduce


def parts(loss) -> tuple[int, int]:
    """Devices over which frames and classes are split where this function runs; 1 where they are whole."""
    frames, vocabulary = (
        1 if axis is None else _xla.axis_size(axis) or 1 for axis in (loss.frame_axis, loss.vocab_axis)
    )
    return frames, vocabulary


def emission(function, loss, layout, full, rows, others):
    """(emission, its logits) on one of the devices. `full` is the loss's own emission, for rows of all classes.

    `rows` are the targets and both lengths; `others` lie as these do.
    """
    _, vocabulary = parts(loss)
    targets, logit_lengths, target_lengths = rows
    _check(function, loss, layout, (rows, others))
    if loss.frame_axis is not None:
        rows = targets, own_frames(logit_lengths, layout.frames, loss.frame_axis), target_lengths
    head = full
    if loss.vocab_axis is not None:
        head = SplitVocabulary.own_head(function, full, vocabulary, layout.classes * vocabulary)
    made, logits = layout.emission(function, loss, head, *rows)
    if loss.vocab_axis is not None:
        made = SplitVocabulary(made, head, full, loss.vocab_axis, vocabulary, layout.classes)
    if loss.frame_axis is not None:
        made = SplitFrames(made, loss.frame_axis, jnp.shape(logit_lengths))
    return made, logits


def _check(function, loss, layout, whole):
    """Raises where types say that the arrays do not lie as the loss says."""
    for name, axis, letter in (("vocab_axis", loss.vocab_axis, "V"), ("frame_axis", loss.frame_axis, "T")):
        if axis is None:
            continue
        split = layout.split_arrays(function, name)
        if not _xla.is_typed(axis):
            continue
        for array, x in split.items():
            if not _xla.varies(x, axis):
                expected = f"{array} must be split over {letter} inside of shard_map over {name}={axis!r}"
                raise ValueError(f"{function}: {expected}, got the same {array} on all its devices.")
        if any(_xla.varies(x, axis) for x in jax.tree.leaves((whole, loss))):
            expected = f"targets, lengths, windows and options must be alike on all devices of {name}={axis!r}"
            raise ValueError(f"{function}: {expected}, got one that varies over them.")


def switched_off(loss):
    """Sets options that a number of Python or NumPy switches off to None, which is no leaf and costs no operation."""
    off = [
        f.name
        for f in dataclasses.fields(loss)
        if "off" in f.metadata and _checks.is_number(x := getattr(loss, f.name)) and f.metadata["off"](x)
    ]
    return _pytree.replace(loss, **dict.fromkeys(off))


def run(method, function, problem, loss, logits, *rest):
    """``method(*problem(function, loss, logits, *rest))``, by the devices of the loss's axes together.

    Where the program is not yet one for each of them, it enters `jax.shard_map`.
    """
    axes = {"frame_axis": loss.frame_axis, "vocab_axis": loss.vocab_axis}
    axes = {name: axis for name, axis in axes.items() if axis is not None and _xla.axis_size(axis) is None}
    if not axes:
        return method(*problem(function, loss, logits, *rest))
    layout = logits if isinstance(logits, _layout.Layout) else _layout.of(function, logits)
    mesh = _xla.mesh_with(axes.values(), jax.tree.leaves((logits, rest)))
    if mesh is None:
        name, axis = next(iter(axes.items()))
        known = jax.sharding.get_abstract_mesh().axis_names
        way = f"call jax.set_mesh(mesh) with such a mesh, or run the loss inside jax.shard_map over {axis!r}"
        raise ValueError(f"{function}: {name} must name an axis of the mesh, one of {known}, got {axis!r}: {way}.")
    for name, axis in axes.items():
        letter, size = ("V", layout.classes) if name == "vocab_axis" else ("T", layout.frames)
        if size % mesh.shape[axis]:
            expected = f"{letter} must be a multiple of the {mesh.shape[axis]} devices of {name}={axis!r}"
            raise ValueError(f"{function}: {expected}, got {letter} = {size}.")
    batch = _batch(layout)
    frame_axis = axes.get("frame_axis")
    specs = layout.specs(function, batch, frame_axis, axes.get("vocab_axis"))
    of_nodes = getattr(method, "of_nodes", False)
    out_specs = P(*batch, frame_axis) if of_nodes else P(*batch)
    place = mesh, tuple(axes.values()), tuple(jax.tree.leaves(specs)), P(*batch), out_specs
    # Options that are off stay known, and cost nothing.
    kept = switched_off(loss)
    off = tuple((f.name, getattr(loss, f.name)) for f in dataclasses.fields(loss) if getattr(kept, f.name) is None)
    kept = _pytree.replace(kept, reduction="none")
    made = _over_mesh(method, function, problem, place, off, kept, layout, rest)
    return reduce(made, jnp.asarray(rest[2]), loss.reduction) if getattr(method, "reduces", False) else made


def _batch(layout):
    """Over which explicit mesh axes the batch of the logits is split."""
    nb = layout.ndim - 3
    given = [_xla.spec_of(jax.typeof(x))[:nb] for x in jax.tree.leaves(layout) if jnp.ndim(x) >= nb + 2]
    return [next((axes for axes in each if axes is not None), None) for each in zip(*given)]


@functools.partial(jax.jit, static_argnums=range(5))
def _over_mesh(method, function, problem, place, off, loss, layout, rest):
    mesh, axes, specs, batch, out_specs = place
    *batched, key = rest
    rest_specs = [*jax.tree.map(lambda _: batch, batched), jax.tree.map(lambda _: P(), key)]
    specs = jax.tree.unflatten(jax.tree.structure(layout), specs), jax.tree.map(lambda _: P(), loss), rest_specs

    def each(layout, loss, rest):
        return method(*problem(function, _pytree.replace(loss, **dict(off)), layout, *rest))

    return _xla.over_mesh(each, mesh, axes, specs, out_specs)(layout, loss, [*rest])
