"""`python -m jax_rnnt_speech` is the command rnnt-speech."""

import gc
import os
import signal
import sys
import threading


def interrupted(*_):
    os.write(2, b"rnnt-speech: interrupted\n")
    os._exit(130)


def ignored(x):
    """Python ignores errors in what its garbage collector calls, such as a function of JAX: Ctrl-C is heard again."""
    if not issubclass(x.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(x)
    number = signal.SIGTERM if hasattr(x.exc_type, "status") else signal.SIGINT
    again = threading.main_thread().ident, number
    later = threading.Timer(0.1, signal.pthread_kill, again)
    later.daemon = True
    later.start()


def main():
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # extensions make an ImportError of Ctrl-C while they are imported
        signal.signal(signal.SIGINT, interrupted)
    gc.disable()
    from jax_rnnt_speech import cli, system  # takes seconds, of which collecting garbage took a tenth

    gc.freeze()  # what is imported stays, so nobody needs to look through it again
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
    gc.collect()  # generators end their processes
    system.leave(status)  # a thread of XLA that still compiles would meet what Python has taken away


if __name__ == "__main__":
    main()
