"""The command line. Options are checked before anything runs; an error is one line, with the exit status 2."""

import argparse
import sys

from jax_rnnt_speech.cli import align, check, convert, export, ngram, serve, stream, testing, train, transcribe
from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.system import UserError, outputs

COMMANDS = check, train, testing, transcribe, stream, convert, align, ngram, export, serve


class Parser(argparse.ArgumentParser):
    """A parser for programs whose `run` returns the exit status. An error is one line, as the usage has a hundred."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists all options)\n")

    def perform(self, arguments=None):
        """Ends the process with the status of the command that the arguments ask for."""
        if sys.stderr is None:  # closed before the start, as by some services
            sys.stderr = outputs.Nowhere()
        if hasattr(sys.stdout, "reconfigure"):  # programs read UTF-8, and bytes of names are escapes of JSON
            sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="backslashreplace")
        args = self.parse_args(arguments)
        try:
            status = args.run(args)
            if sys.stdout is not None:
                sys.stdout.flush()
        except (UserError, OSError) as error:
            if any(isinstance(x, BrokenPipeError) for x in (error, error.__context__)) and outputs.unread():
                raise SystemExit(outputs.BROKEN_PIPE) from None
            self.exit(2, f"{self.prog}: {error}\n")
        except KeyboardInterrupt as error:
            going_on = "; --resume goes on from the last checkpoint" if args.run is train.train else ""
            message = error if error.args else f"interrupted{going_on}"
            self.exit(getattr(error, "status", 130), f"{self.prog}: {message}\n")
        raise SystemExit(status)


def main(arguments=None):
    parser = Parser(prog="rnnt-speech", description="Speech recognition on any corpus.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        command_line.command(commands, *module.COMMAND)
    parser.perform(arguments)
