"""Lhotse Shar: cuts.*.jsonl.gz next to recording.*.tar."""

import re

from jax_rnnt_speech.data.archives.paired import Paired
from jax_rnnt_speech.data.lists import ListError

KIND = "Lhotse Shar"
NAMES = r"cuts\.(.+?)\.jsonl(\.gz)?"


def tar_of(cuts):
    """Returns the tar of recordings that belongs to a part, or None."""
    match = re.fullmatch(NAMES, cuts.name)
    return match and cuts.with_name(f"recording.{match[1]}.tar")


def takes(path):
    tar = tar_of(path)
    return tar is not None and tar.exists()


def shards(path):
    if not takes(path):
        raise ListError(path, "lacks the tar of its recordings beside it")
    return [Paired(str(tar_of(path)), str(path))]
