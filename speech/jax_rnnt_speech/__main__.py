"""Runs `python -m jax_rnnt_speech`, which is the command rnnt-speech."""

import gc
import os
import signal
import sys
import threading


def interrupted(*_):
    os.write(2, b"rnnt-speech: interrupted\n")
    os._exit(130)


def ignored(x):
    """Sends Ctrl-C again where Python ignores it, as it does in what its garbage collector calls, such as JAX."""
    if not issubclass(x.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(x)
    number = signal.SIGTERM if hasattr(x.exc_type, "status") else signal.SIGINT
    again = threading.main_thread().ident, number
    later = threading.Timer(0.1, signal.pthread_kill, again)
    later.daemon = True
    later.start()


def main():
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # extensions turn Ctrl-C into an ImportError while they are imported
        signal.signal(signal.SIGINT, interrupted)
    gc.disable()
    from jax_rnnt_speech import cli, system  # takes seconds, of which collecting garbage took a tenth

    gc.freeze()  # imported objects stay, so nobody needs to look through them again
    gc.enable()
    signal.signal(signal.SIGINT, heard)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, system.Terminated.hear)
    sys.unraisablehook = ignored
    try:
        cli.main()
    except SystemExit as error:
        if error.code not in (130, system.Terminated.status):
            raise
        status, error.__context__ = error.code, None
    gc.collect()  # this ends the processes of generators
    system.leave(status)  # a thread of XLA that still compiles would use what Python has taken away


if __name__ == "__main__":
    main()
