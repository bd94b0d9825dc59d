"""NeMo's tarred sets: audio_*.tar with a manifest for each, or one for all whose lines name a tar in `shard_id`."""

import functools
import re

import numpy as np

from jax_rnnt_speech.data import manifests
from jax_rnnt_speech.data.archives import tars
from jax_rnnt_speech.data.archives.paired import Paired, lines_in, packed, unpacked
from jax_rnnt_speech.data.manifests import ListError

NAMES, COMMON = tars.NAMES, "tarred_audio_manifest.json"


def number_of(tar):
    found = re.search(r"\d+$", tar.stem)
    return int(found[0]) if found else None


def manifest_of(tar):
    """The manifest of a tar, for it alone or for all beside it; or None."""
    number = re.search(r"\d+$", tar.stem)
    places = tar.parent, tar.parent / "sharded_manifests"
    own = [folder / f"manifest_{number[0]}.json" for folder in places if number]
    return next((x for x in (*own, tar.parent / COMMON) if x.exists()), None)


def tars_of(manifest):
    """The tars beside a manifest, by their numbers, if its lines name these."""
    if manifests.suffix_of(manifest) not in (".json", ".jsonl") or packed(manifest) or not manifest.is_file():
        return {}
    with open(manifest, "rb") as file:
        if b'"shard_id"' not in file.readline(2**16):
            return {}
    folders = manifest.parent.parent, manifest.parent
    return {number_of(x): x for folder in folders for x in sorted(folder.glob("*.tar"), reverse=True)
            if number_of(x) is not None}  # fmt: skip


@functools.lru_cache(4)
def by_shard(manifest, _changed):
    """{number of a tar: (starts, sizes) of its lines} of a manifest; None: those without a number."""
    text, places = unpacked(manifest), {}
    for begin, size in lines_in(text):
        found = re.search(rb'"shard_id"\s*:\s*(\d+)', text[begin : begin + size])
        places.setdefault(int(found[1]) if found else None, []).append((begin, size))
    return {key: tuple(np.array(x).T) for key, x in places.items()}


def takes(path):
    return bool(manifest_of(path) if path.suffix == ".tar" else tars_of(path))


def shards(path):
    if path.suffix == ".tar":
        manifest, places = manifest_of(path), None
        if manifest.name == COMMON:
            known = by_shard(str(manifest), manifest.stat().st_mtime_ns)
            places = known.get(number_of(path))
            places = places if places is not None else known.get(None, ((), ()))
        return [Paired(str(path), str(manifest), places)]
    known, found = by_shard(str(path), path.stat().st_mtime_ns), tars_of(path)
    if missing := sorted({*known} - {*found} - {None}):
        raise ListError(path, f"names {len(missing)} tars that are not beside it: number {missing[0]}")
    return [Paired(str(found[i]), str(path), known[i]) for i in sorted({*known} & {*found})]
