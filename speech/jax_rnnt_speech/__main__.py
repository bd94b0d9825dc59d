"""`python -m jax_rnnt_speech` is the command rnnt-speech."""

import os
import signal


def interrupted(*_):
    os.write(2, b"rnnt-speech: interrupted\n")
    os._exit(130)


def main():
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # extensions make an ImportError of Ctrl-C while they are imported
        signal.signal(signal.SIGINT, interrupted)
    from jax_rnnt_speech import cli  # takes seconds

    signal.signal(signal.SIGINT, heard)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # as Ctrl-C: what is written is whole then
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
