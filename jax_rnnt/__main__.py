"""`python -m jax_rnnt [info | selftest | bench] [--json]`: about this installation, its kernels, and their speed.

Without a command: info, then selftest.
"""

import argparse
import json
import platform
import sys
from typing import Any

import jax
import jaxlib
import numpy as np

import jax_rnnt
from jax_rnnt import _bench, _checks
from jax_rnnt._xla import loading, proof


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_rnnt", description="About this installation of jax_rnnt.")
    common = argparse.ArgumentParser(add_help=False)
    # A default here would overwrite the option given before the command.
    common.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--version", action="version", version=f"jax_rnnt {jax_rnnt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="{info,selftest,bench}")
    commands.add_parser("info", parents=[common], help="versions, devices, kernels, and why some are missing")
    test = commands.add_parser(
        "selftest", parents=[common], help="every kernel against the reference; status 1 if wrong"
    )
    test.add_argument("--require", metavar="cpu,cuda", help="platforms that must have kernels; empty: none")
    bench = commands.add_parser("bench", parents=[common], help="value and gradient at your shape")
    for name, meaning in (("B", "sequences"), ("T", "frames"), ("U", "labels"), ("V", "classes, blank included")):
        bench.add_argument(name, type=_positive, help=meaning)
    bench.add_argument("--loss", choices=list(_bench.LOSSES), default="rnnt")
    help = "without the reference and plain JAX, which XLA compiles for minutes at some shapes"
    bench.add_argument("--alone", action="store_true", help=help)
    bench.add_argument("--dtype", choices=[t for t in _checks.FLOATS if t != "float64"], default="float32")
    return parser


def _info() -> tuple[dict[str, Any], list[str]]:
    versions = {
        "jax_rnnt": jax_rnnt.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    devices = jax.devices()
    runtime = loading.runtime_api()
    ffi = {"runtime": runtime and ".".join(map(str, runtime))}
    missing = {name: why for name, *_ in loading.PLATFORMS if (why := loading.missing(name))}
    kernels = {name: loading.instruction_set(name) for name in loading.KERNELS}
    for name in loading.KERNELS:
        ffi[name] = ".".join(map(str, loading.module(name).api_version()))
    here = loading.default_platform()
    proven = proof.all_chosen() or all(proof.proven(here, device) for device in proof.devices_of(here).values())
    unproven = [] if proven else proof.unvouched(here)
    report = {
        "versions": versions,
        "device": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
        "host": platform.machine(),
        "kernels": kernels,
        "ffi": ffi,
        "missing": missing,
        "unproven": unproven,
    }
    lines = [", ".join(f"{name} {version}" for name, version in versions.items())]
    lines.append(
        f"device: {devices[0].device_kind} ({len(devices)} x {devices[0].platform}), host: {platform.machine()}"
    )
    lines += [f"kernels for {name}: {which}, XLA FFI {ffi[name]}" for name, which in kernels.items()]
    lines += [f"no kernels for {name}: {why}" for name, why in missing.items()]
    if unproven:
        cure = "`python -m jax_rnnt selftest` finds out"
        lines.append(f"not used, since no device has shown that they are right: {', '.join(unproven)}; {cure}")
    lines.append(f"XLA FFI of jaxlib: {ffi['runtime'] or 'unknown'}")
    return report, lines


def _selftest(require: str | None) -> tuple[dict[str, Any], list[str]]:
    platforms = None if require is None else [name for name in require.split(",") if name]
    try:
        lines = jax_rnnt.selftest(require=platforms)
    except RuntimeError as error:
        return {"ok": False, "error": str(error)}, [str(error)]
    return {"ok": True, "lines": lines}, lines


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and prints its answer; returns the exit status, 1 where kernels are missing or wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        proof.all_chosen()
    except ValueError as error:
        parser.error(str(error))
    report: dict[str, Any] = {}
    lines: list[str] = []
    if options.command in (None, "info"):
        report, lines = _info()
    if options.command in (None, "selftest"):
        try:
            tested, more = _selftest(getattr(options, "require", None))
        except ValueError as error:
            parser.error(str(error))
        report, lines = report | tested, lines + more
    if options.command == "bench":
        shape = options.B, options.T, options.U, options.V
        least = 5 if options.loss == "multiblank" else 2  # multiblank has three big blanks, the blank and a label
        if least > options.V:
            parser.error(f"bench: V must be at least {least} for --loss {options.loss}, got {options.V}")
        report = _bench.bench(*shape, options.loss, options.dtype, options.alone)
        lines = _bench.text(report)
    print(json.dumps(report, indent=2) if options.json else "\n".join(lines))
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
