"""Options of one start of a training, which no checkpoint keeps: where it runs, and the fate of an earlier run."""

import dataclasses
from pathlib import Path

from jax_rnnt_speech.config.options import amount, natural, option, positive


@dataclasses.dataclass(frozen=True)
class Start:
    """The place where a training runs, and the fate of an earlier one."""

    workdir: Path | None = option(None, Path, "folder of this training; default: runs/NAME-LOSS", metavar="FOLDER")
    resume: bool = option(
        False, bool, "go on from the last checkpoint of the folder, if there is one", action="store_true"
    )
    overwrite: bool = option(False, bool, "replace an earlier training in the folder", action="store_true")
    change: bool = option(
        False, bool, "with --resume, allow options that differ from before", action="store_true",
        needs=(lambda start: start.resume, "--resume"),
    )  # fmt: skip
    platform: str | None = option(
        None, str, "platform to train on; default: the one that JAX finds", choices=("cpu", "gpu", "tpu")
    )
    devices: int | None = option(
        None, positive, "number of devices to train on; default: all, or a CPU that is split into 2"
    )
    cache: Path | None = option(
        None, Path, "folder in which features are kept, or none to compute them at each use; default: cache in the "
        "workdir", metavar="FOLDER",
    )  # fmt: skip
    workers: int = option(0, natural, "processes that load batches; the result is the same")
    hook: str | None = option(
        None, str, "call this function with (step, {name: number}) at each log and each test", metavar="FILE:FUNCTION"
    )
    expect_cer: float | None = option(
        None, amount, "end with status 1 if the last error rate of characters is higher", metavar="PERCENT"
    )


@dataclasses.dataclass(frozen=True)
class Processes:
    """Several processes that train together."""

    coordinator: str | None = option(
        None, str, "address at which process 0 listens, as HOST:PORT; with auto, Slurm, Open MPI or the TPU's runtime "
        "say it, and the two below", metavar="ADDRESS",
    )  # fmt: skip
    processes: int | None = option(None, positive, "how many processes train together")
    heartbeat: int = option(
        60, positive, "a process without a sign of life for so many seconds counts as dead", metavar="SECONDS"
    )
    process: int | None = option(None, natural, "the number of this process, from 0 on", metavar="I")
