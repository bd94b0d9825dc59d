"""Runs Grain's threads and processes, whose results are taken in order."""

import atexit
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import threading

from jax_rnnt_speech.system import UserError

SHARED = "/dev/shm"  # Grain puts the results of its workers there
BY_SIGNALS = f" -{signal.SIGINT:d}", f" -{signal.SIGTERM:d}"  # ends of Grain's message about a worker


def items(function, count, threads, workers=0):
    """Yields a function's results for 0 to `count` - 1, by `workers` processes of `threads` threads, or by threads."""
    import grain  # slow to import
    from absl import flags

    if workers and not flags.FLAGS.is_parsed():  # Grain reads some, and nobody else has any
        flags.FLAGS.mark_as_parsed()
    if workers:
        free_at_exit()
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    several = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    dataset = grain.MapDataset.source(range(count)).map(Told(function)).to_iter_dataset(options)
    results = iter(dataset.mp_prefetch(several, worker_init_fn=alone))
    try:
        for x in results:
            if isinstance(x, UserError):
                raise x
            yield x
    except RuntimeError as error:
        if "Worker process" not in str(error):
            raise
        ended = str(error).partition(". ")[0]
        if ended.endswith(BY_SIGNALS):  # the signal came before the worker was `alone`
            raise KeyboardInterrupt from None
        raise UserError(f"--workers {workers}: {ended}{cause(ended)}") from None
    finally:
        if workers:
            results.close()
            # A cycle of Grain's iterators holds the last batch in the memory that workers share, which Python would
            # call a leak at its end.
            x = results = None
            gc.collect()


@functools.cache
def free_at_exit():
    """Makes Python wait at its end for Grain's thread, which frees the memory of batches after they are let go."""
    from grain.multiprocessing import SharedMemoryArray

    def wait():
        if pool := getattr(SharedMemoryArray, "_del_thread_pool", None):
            pool.apply(int)  # after everything that its one thread was given before

    atexit.register(wait)  # it runs before the end of the pool, since that was registered earlier


def cause(ended):
    """Returns why a worker may have ended, by the signal in its exit code."""
    number = next((x for x in (signal.SIGKILL, signal.SIGBUS) if ended.endswith(f" -{x:d}")), None)
    if number == signal.SIGBUS:
        try:
            size = f", which has {shutil.disk_usage(SHARED).total / 1e6:.3g} MB"
        except OSError:
            size = ""
        return (f": a bus error. Batches come through {SHARED}{size}, and it may be full: give the container more "
                "(docker run --shm-size=8g, or --ipc=host), or train with fewer --workers")  # fmt: skip
    return "; it may have needed more memory than there is" * (number == signal.SIGKILL)


class Told:
    """A function that returns errors for people, as Grain's workers would print them with a traceback."""

    def __init__(self, function):
        self.function = function

    def __call__(self, i):
        try:
            return self.function(i)
        except UserError as error:
            return UserError(str(error))  # whatever its kind, this one can be copied


def alone(*_):
    """Prepares a worker: Ctrl-C and SIGTERM are for the first process, and devices are not for workers."""
    for x in (signal.SIGINT, signal.SIGTERM):
        signal.signal(x, signal.SIG_IGN)
    os.environ["JAX_PLATFORMS"] = "cpu"
    threading.Thread(target=orphaned, daemon=True).start()


def orphaned():
    """Ends a worker whose first process was killed, as Grain would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)
