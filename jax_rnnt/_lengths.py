"""Lengths of sequences from paddings, the convention of Lingvo, axlearn and Optax."""

import jax
import jax.numpy as jnp

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
