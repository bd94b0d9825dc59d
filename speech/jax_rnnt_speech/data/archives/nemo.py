"""NeMo's tarred sets: audio_*.tar with a manifest for each, or one for all whose lines name a tar in `shard_id`."""

import functools
import gzip
import re

import numpy as np

from jax_rnnt_speech.data.archives import tars
from jax_rnnt_speech.data.archives.paired import Paired, lines_in, packed, unpacked
from jax_rnnt_speech.data.lists import ListError, once, say
from jax_rnnt_speech.data.names import is_hidden

KIND = "NeMo's tar"
NAMES, COMMON = tars.NAMES, "tarred_audio_manifest"
FORMS = ".json", ".jsonl", ".json.gz", ".jsonl.gz"  # suffixes of a manifest, which tools write next to each other


def number_of(path):
    """Returns the number at the end of a name, before its suffixes."""
    digits = re.search(r"(\d+)\.(?:tar|jsonl?(?:\.gz)?)$", path.name)
    return digits and digits[1]


def own(tar):
    """Returns the manifests for a tar alone: next to it, or in the folder that NeMo makes for them."""
    number = number_of(tar)
    numbers = dict.fromkeys((number, str(int(number)))) if number else ()
    places = tar.parent, tar.parent / "sharded_manifests"
    names = [f"manifest_{x}{form}" for x in numbers for form in FORMS]
    return [file for folder in places for x in names if (file := folder / x).exists()]


def manifest_of(tar):
    """Returns the manifest of a tar, its own or that of its folder; or None. Those of two places must be the same."""
    common = [file for form in FORMS if (file := tar.parent / f"{COMMON}{form}").exists()]
    if alone := own(tar):
        if common:
            say(f"{tar.parent}: the manifest of each tar is read, such as {alone[0].name}, and not {common[0].name}")
        return once(alone, same=True)[0]
    return once(common, same=True)[0] if common else None


def tars_of(manifest):
    """Returns {number: tar} for those next to a manifest, if its lines name these, or if it is that of one."""
    if not manifest.name.endswith(FORMS) or not manifest.is_file():
        return {}
    folders = manifest.parent.parent, manifest.parent
    tars = {int(number): x for folder in folders for x in sorted(folder.glob("*.tar"), reverse=True)
             if not is_hidden(x.name) and (number := number_of(x))}  # fmt: skip
    if tars and b'"shard_id"' in first_line(manifest):
        return tars
    number = number_of(manifest)
    tar = tars.get(int(number)) if number else None
    return {int(number): tar} if tar and manifest in own(tar) else {}


def first_line(path):
    try:
        with gzip.open(path) if packed(path) else open(path, "rb") as file:
            return file.readline(2**16)
    except (EOFError, gzip.BadGzipFile, gzip.zlib.error):
        return b""  # whoever reads it raises the error


@functools.lru_cache(4)
def by_shard(manifest, _changed):
    """Returns {number of a tar: (starts, sizes) of its lines} for a manifest; lines without a number are under None."""
    text, places = unpacked(manifest), {}
    for begin, size in lines_in(text):
        shard = re.search(rb'"shard_id"\s*:\s*(\d+)', text[begin : begin + size])
        places.setdefault(int(shard[1]) if shard else None, []).append((begin, size))
    return {key: tuple(np.array(x).T) for key, x in places.items()}


def takes(path):
    return bool(manifest_of(path) if path.suffix == ".tar" else tars_of(path))


def shards(path):
    if path.suffix == ".tar":
        manifest, places = manifest_of(path), None
        if manifest.name.startswith(COMMON):
            lines, number = by_shard(str(manifest), manifest.stat().st_mtime_ns), number_of(path)
            places = lines.get(number and int(number))
            places = places if places is not None else lines.get(None, ((), ()))
        return [Paired(str(path), str(manifest), places)]
    lines, tars = by_shard(str(path), path.stat().st_mtime_ns), tars_of(path)
    if [*lines] == [None]:  # it is the manifest of one tar
        return [Paired(str(tar), str(path)) for tar in tars.values()]
    if missing := sorted({*lines} - {*tars} - {None}):
        raise ListError(path, f"names {len(missing)} tars that are not beside it: number {missing[0]}")
    return [Paired(str(tars[i]), str(path), lines[i]) for i in sorted({*lines} & {*tars})]
