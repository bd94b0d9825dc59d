"""A step of a loop as one kernel for CUDA: what XLA would split into kernels that are longer to launch than to run.

Steps look at all utterances at once, so their kernels run where no partitioner splits the program. Elsewhere, and under
`jax.vmap`, the plain function is the program.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.interpreters import mlir

from jax_rnnt._xla import loading
from jax_rnnt._xla.avals import aval_like, plain_aval, vary_together
from jax_rnnt._xla.over_devices import unpartitioned
from jax_rnnt._xla.primitive import new_primitive


class Step:
    """Calls the kernel `target` for CUDA, or `function`, which is its definition.

    Parameters
    ----------
    target : str
        Name in XLA's registry.
    function : callable
        ``function(*operands, **attributes) -> results`` in plain JAX; attributes are integers or tuples of them.
    aliases : dict of int to int
        Which operand a result may overwrite.
    """

    def __init__(self, target: str, function: Callable[..., Sequence[jax.Array]], aliases: dict[int, int]):
        self.target, self.function, self.aliases = target, function, aliases
        self.primitive = new_primitive(target, self.abstract_eval, self.lower_plain, batch=self.batch)
        for platform, kind in loading.KERNELS.items():
            if kind == "cuda":
                rule = functools.partial(self.lower, platform=platform)
                mlir.register_lowering(self.primitive, rule, platform=platform)

    def __call__(self, *operands, **attributes):
        return self.primitive.bind(*vary_together(*operands), **attributes)

    def abstract_eval(self, *avals, **attributes):
        results = jax.eval_shape(functools.partial(self.function, **attributes), *map(plain_aval, avals))
        return [aval_like(avals[0], x.shape, x.dtype, ()) for x in results]

    def lower_plain(self, ctx, *operands, **attributes):
        function = functools.partial(self.function, **attributes)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

    def lower(self, ctx, *operands, platform, **attributes):
        if loading.missing(platform) or not unpartitioned(ctx):
            return self.lower_plain(ctx, *operands, **attributes)
        encoded = {k: np.array(x, np.int64) if isinstance(x, tuple) else np.int64(x) for k, x in attributes.items()}
        return jax.ffi.ffi_lowering(self.target, operand_output_aliases=self.aliases)(ctx, *operands, **encoded)

    def batch(self, primitive, operands, axes, **attributes):
        results = jax.vmap(functools.partial(self.function, **attributes), axes)(*operands)
        return results, [0] * len(results)


def where_steps(with_kernels, plain, *arguments):
    """``with_kernels(*arguments)`` in programs for platforms that have such kernels, else ``plain(*arguments)``."""
    platforms = {name: with_kernels for name, kind in loading.KERNELS.items() if kind == "cuda"}
    return jax.lax.platform_dependent(*arguments, **platforms, default=plain) if platforms else plain(*arguments)
