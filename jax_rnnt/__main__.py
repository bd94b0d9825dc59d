"""`python -m jax_rnnt`: versions, device, instruction set and the self-test of the kernels."""

import platform
import sys

import jax

import jax_rnnt
from jax_rnnt._xla import loading


def main() -> int:
    """Prints a line for each; the exit status is 1 where kernels are missing or wrong."""
    device = jax.devices()[0]
    print(f"jax_rnnt {jax_rnnt.__version__}, jax {jax.__version__}, Python {platform.python_version()}")
    print(f"device: {device.device_kind} ({len(jax.devices())} x {device.platform}), host: {platform.machine()}")
    for name in loading.KERNELS:
        print(f"kernels for {name}: {loading.instruction_set(name)}")
    try:
        jax_rnnt.selftest()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
