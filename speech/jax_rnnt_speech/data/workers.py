"""Grain's threads and processes, which make the items of a dataset; they are taken in order."""

import os
import signal

from jax_rnnt_speech.system import UserError


def items(dataset, threads, workers=0):
    """Those of a grain.MapDataset, made by so many processes with so many threads each; 0: by threads alone."""
    import grain  # slow to import
    from absl import flags

    if workers and not flags.FLAGS.is_parsed():  # Grain reads some, and nobody else has any
        flags.FLAGS.mark_as_parsed()
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    several = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    found = iter(dataset.to_iter_dataset(options).mp_prefetch(several, worker_init_fn=alone))
    try:
        yield from found
    except RuntimeError as error:
        if "Worker process" not in str(error):
            raise
        ended = str(error).partition(". ")[0]
        raise UserError(f"--workers {workers}: {ended}; it may have needed more memory than there is") from None
    finally:
        if workers:
            found.close()


def alone(*_):
    """In a worker: Ctrl-C is for the first process, and devices are not for workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["JAX_PLATFORMS"] = "cpu"
