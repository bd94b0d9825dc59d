"""Do programs that a release exported still run, and give the values of the definition?

tests/support/exported has a folder for each release and each JAX that wrote it:

    PYTHONPATH=.:tests/support python tests/transforms/test_releases.py

A kernel whose operands, attributes or meaning change gets a new target name, and the old one stays for the programs in
these folders. JAX may refuse a program that a JAX more than six months older has written. Then the test asks JAX to
read the program nevertheless, as the kernels' part of the promise has no end.
"""

import datetime
import warnings

import jax
import numpy as np
import pytest
from jax import export

import batches
import family
import jax_rnnt
import platforms
import project

FOLDER = project.HERE / "exported"
# When the package index got the JAX that wrote a folder, and how long any later JAX reads its programs.
RELEASED = {"0.6.2": datetime.date(2025, 6, 17), "0.10.2": datetime.date(2026, 6, 17)}
WINDOW = datetime.timedelta(days=180)
EXPIRED = "jax_export_deserialize_expired_versions"
# Options that reach other code of the kernels.
PROGRAMS = {
    "rnnt": (family.RNNT, np.float32, {"fastemit_lambda": 0.25, "clamp": 0.125, "delay_penalty": 0.125}),
    "rnnt_bfloat16": (family.RNNT, "bfloat16", {"fused_log_softmax": False}),
    "tdt": (family.TDT, np.float32, {"sigma": 0.05}),
    "multiblank": (family.MULTIBLANK, np.float64, {}),
    "hat": (family.HAT, np.float32, {}),
    "constrained": (family.CONSTRAINED, np.float32, {}),
}


def problem(name):
    loss, dtype, options = PROGRAMS[name]
    return loss, batches.problem(loss=loss, dtype=dtype), options


def write():
    """The programs of this version, for the CPU: a GPU has the same targets."""
    folder = FOLDER / f"{jax_rnnt.__version__}-{jax.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        loss, p, options = problem(name)
        step = jax.jit(jax.value_and_grad(loss.value(**options).__call__))
        made = export.export(step, disabled_checks=jax_rnnt.export_checks())(*p)
        (folder / f"{name}.bin").write_bytes(made.serialize())


def opened(path, released):
    """The program of a file. JAX refuses only what is older than six months, and says so."""
    try:
        return export.deserialize(path.read_bytes())
    except ValueError as error:
        expired = datetime.date.today() - released > WINDOW
        if not expired or "6-month backward-compatibility window" not in str(error):
            raise
    jax.config.update(EXPIRED, True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return export.deserialize(path.read_bytes())
    finally:
        jax.config.update(EXPIRED, False)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.bin")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_program_of_a_release(native_kernel, path):
    pytest.importorskip("flatbuffers")
    loss, p, options = problem(path.stem)
    writer = path.parent.name.partition("-")[2]
    if platforms.platform() != "cpu" or jax.__version_info__ < tuple(map(int, writer.split("."))):
        pytest.skip(f"exported for the CPU by jax {writer}")
    program = opened(path, RELEASED[writer])
    value, gradient = program.call(*p)
    expected, per_logit = loss.expected(p, **options)
    half = np.dtype(p.logits.dtype).itemsize == 2
    np.testing.assert_allclose(value, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64), per_logit / len(expected), rtol=2.0**-8 if half else 0, atol=1e-5
    )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # paths of the machine are no part of a program
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    write()
