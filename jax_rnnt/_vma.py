"""Manual mesh axes of `jax.shard_map`: every operand of one operation must vary over the same axes."""

import jax


def _varying(aval) -> frozenset:
    axes = getattr(aval, "mat", None)  # jax >= 0.10
    return frozenset(axes.varying if axes is not None else getattr(aval, "vma", None) or ())


def vary_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each marked as varying over the union of the manual mesh axes over which any of them varies."""
    avals = [jax.typeof(x) for x in arrays]
    union = frozenset().union(*map(_varying, avals))

    def vary(x, missing):
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # jax < 0.8

    return tuple(vary(x, tuple(sorted(union - _varying(a)))) for x, a in zip(arrays, avals))
