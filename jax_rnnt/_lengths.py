"""Lengths of sequences from paddings, the convention of Lingvo, axlearn and Optax, and back."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords


@keywords
def lengths_from_paddings(paddings: jax.Array) -> jax.Array:
    """Lengths of sequences whose padding comes last.

    T frames (or labels); `...` is any number of batch dimensions.

    Parameters
    ----------
    paddings : Array, bool, integer or floating [..., T]
        0 or False: a frame; anything else: padding.

    Returns
    -------
    Array, int32 [...]
        Frames of each sequence. -1 where a frame follows padding: no length describes such a sequence, and -1 makes its
        loss NaN.

    Raises
    ------
    TypeError, ValueError
        If `paddings` is not an array of bools or numbers, or has no dimension.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import lengths_from_paddings
    >>> lengths_from_paddings(jnp.array([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])).tolist()
    [2, 0, -1]
    """
    paddings = _checks.array("paddings", paddings)
    if not (jnp.issubdtype(paddings.dtype, jnp.number) or paddings.dtype == jnp.bool_):
        raise _checks.bad_type(f"paddings must be an array of bool, integers or floats, got {paddings.dtype}.")
    if jnp.ndim(paddings) == 0:
        raise _checks.bad_value("paddings must have shape [..., T], got shape ().")
    is_frame = ~jnp.asarray(paddings).astype(jnp.bool_)
    lengths = jnp.sum(is_frame, -1, dtype=jnp.int32)
    in_order = ~jnp.any(is_frame[..., 1:] & ~is_frame[..., :-1], -1)
    return jnp.where(in_order, lengths, jnp.int32(-1))


@keywords
def paddings_from_lengths(lengths: jax.Array, size: int, dtype: DTypeLike = jnp.bool_) -> jax.Array:
    """Paddings of sequences of these lengths, the inverse of `lengths_from_paddings`.

    T frames (or labels); `...` is any number of batch dimensions.

    Parameters
    ----------
    lengths : Array, integer [...]
        Frames of each sequence, from 0 to `size`. A negative length counts as 0, a larger one as `size`.
    size : int
        T, the extent of the padded dimension.
    dtype : dtype, default bool
        Dtype of the result. Optax and Lingvo take floats.

    Returns
    -------
    Array, `dtype` [..., T]
        1 (True) where a sequence is padded, else 0.

    Raises
    ------
    TypeError, ValueError
        If `lengths` is not an array of integers, or `size` is not an integer of 0 or more.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import paddings_from_lengths
    >>> paddings_from_lengths(jnp.array([2, 0]), 3, jnp.float32).tolist()
    [[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    """
    lengths = _checks.array("lengths", lengths)
    lengths = _checks.integers("lengths", lengths, lengths.shape, "[...]")
    frames = _checks.index("size", size)
    if frames < 0:
        raise _checks.bad_value(f"size must be 0 or more, got {frames}.")
    place = lax.broadcasted_iota(jnp.int32, (*(1 for _ in lengths.shape), frames), lengths.ndim)
    return (place >= lengths[..., None]).astype(dtype)
