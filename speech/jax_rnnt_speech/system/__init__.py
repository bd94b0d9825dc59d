"""Deals with the machine: processes and devices, files, compiled programs, errors for people."""

import contextlib
import functools
import os
import sys

from tqdm import tqdm


class Terminated(KeyboardInterrupt):
    """SIGTERM, for which services and schedulers expect another status than for Ctrl-C."""

    status = 143

    @classmethod
    def hear(cls, *_):
        """Handles the signal: as after Ctrl-C, files are whole then."""
        raise cls


class UserError(Exception):
    """A problem with options, files or devices, in one line."""


def reason(error):
    """Describes an error of a file to a person: its number says nothing, and its name is known."""
    return getattr(error, "strerror", None) or str(error)


def leave(status):
    """Ends the process at once: threads that compute, and those that would wait for them, are left as they are."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


@functools.lru_cache(4096)
def say_once(line):
    """Writes to the standard error; above a bar, if there is one."""
    tqdm.write(line, file=sys.stderr)


def refuse_if(wrong, message):
    """Raises a UserError, with a message for a person, if something is wrong."""
    if wrong:
        raise UserError(message)


@contextlib.contextmanager
def as_user_error(what, *kinds):
    """Turns errors of these kinds into one line for a person, which begins with `what`."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{what}: {reason(error)}") from None
