"""The devices of a run."""

import contextlib
import os

import jax

from jax_rnnt_speech.config import UserError


def select(platform, count):
    """`count` devices of each process, or all. A CPU poses as `count` or 2 of them, unless XLA_FLAGS splits it."""
    if platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX runs already
            jax.config.update("jax_num_cpu_devices", count or 2)
    try:
        of = [[x for x in jax.devices() if x.process_index == i] for i in range(jax.process_count())]
        devices = [x for local in of for x in local[:count]]
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform has no plugin
        reason = str(error).splitlines()[0] if str(error) else "JAX has no such backend here"
        raise UserError(f"no device of {jax.config.jax_platforms or 'any platform'}: {reason}") from None
    if count and len(devices) < count * jax.process_count():
        raise UserError(f"--devices {count}: there are {len(jax.local_devices())}")
    return devices
