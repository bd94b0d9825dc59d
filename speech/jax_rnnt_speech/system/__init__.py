"""What a program has to do with its machine: processes and devices, files, compiled programs, errors for people."""


class UserError(Exception):
    """A problem with options, files or devices, in one line."""


def reason(error):
    """What an error of a file says to a person: its number says nothing, and its name is known."""
    return getattr(error, "strerror", None) or str(error)
