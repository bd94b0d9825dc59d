"""`python -m jax_rnnt_speech` is the command rnnt-speech."""

import os
import signal
import sys
import threading


def interrupted(*_):
    os.write(2, b"rnnt-speech: interrupted\n")
    os._exit(130)


def ignored(x):
    """Python ignores errors in what its garbage collector calls, such as a function of JAX: Ctrl-C is heard again."""
    if x.exc_type is not KeyboardInterrupt:
        return sys.__unraisablehook__(x)
    ends = signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    again = threading.main_thread().ident, signal.SIGTERM if ends else signal.SIGINT
    later = threading.Timer(0.1, signal.pthread_kill, again)
    later.daemon = True
    later.start()


def main():
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # extensions make an ImportError of Ctrl-C while they are imported
        signal.signal(signal.SIGINT, interrupted)
    from jax_rnnt_speech import cli  # takes seconds

    signal.signal(signal.SIGINT, heard)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # as Ctrl-C: what is written is whole then
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = ignored
    cli.main()


if __name__ == "__main__":
    main()
