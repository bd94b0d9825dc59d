"""Writes the texts of audio files."""

import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import natural, option
from jax_rnnt_speech.data.index import by_header
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition import recognise, segments, transcripts, unheard
from jax_rnnt_speech.recognition.search_options import Searching, decoding_of
from jax_rnnt_speech.system import UserError, outputs, refuse_if

FEW = 1000  # recordings whose headers are read for a bar


@dataclasses.dataclass(frozen=True)
class Writing(transcripts.Output):
    """The options that decide which texts are written, and how."""

    nbest: int = option(0, natural, "list so many hypotheses of --beam in --format json")
    segments: Path | None = option(
        None, Path, "segments of the recordings with their speakers, each of which is transcribed by itself: .rttm, "
        ".ctm, or .json of pyannote", metavar="FILE",
    )  # fmt: skip


def bar_of(entries, to):
    """Returns a bar of the seconds that are done. Their total comes from headers, which are not read of many files."""
    quiet = not sys.stderr.isatty() or (not to.output and sys.stdout.isatty())  # else the bar would be within the texts
    total, shown = None, "{desc}: {n:.0f} s heard [{elapsed}]"
    if not quiet and len(entries) <= FEW:
        lengths = [by_header(x) if getattr(x, "end", None) is None else x.end - x.start for x in entries]
        total = float(np.nansum(np.abs(lengths))) or None
    if total:
        shown = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s heard [{elapsed}<{remaining}]"
    return outputs.bar(desc="recordings", total=total, bar_format=shown, disable=quiet)


def transcribe(args):
    searching, to = command_line.taken(args, Searching).checked(), command_line.taken(args, Writing)
    refuse_if(to.segments and not to.segments.is_file(), f"--segments {to.segments} is no file")
    to.checked(args.files, recognise.recordings(args.files, vars(args).get("audio_column", "")))
    if to.nbest and (not searching.beam or to.format not in ("json", "jsonl")):
        raise UserError("--nbest needs --beam, and --format json or jsonl")
    refuse_if(to.nbest > searching.beam, f"--nbest {to.nbest}: --beam {searching.beam} has fewer hypotheses")
    model = command_line.taken(args, Computing).opened()
    settings = command_line.changed(model.config, args, {"audio_column"})
    entries, load = [*recognise.settled(recognise.listed(args.files, settings.texts.audio_column))], recognise.loaded
    if to.segments:
        entries, load = segments.entries(to.segments, entries), segments.loaded
    bad = 0
    with transcripts.writer(to, entries) as write, bar_of(entries, to) as bar:
        recordings = load(entries, model.config.features.rate)
        results = recognise.transcribe(model, recordings, decoding_of(searching, model), progress=bar.update)
        for i, x in enumerate(results):
            bar.set_description_str(f"{i + 1} of {len(entries)} recordings", refresh=False)
            if x.error:
                tqdm.write(x.error, file=sys.stderr)
                bad += 1
                write(i, None)
                continue
            speaker = entries[i].speaker if to.segments else ""
            found = transcripts.transcript(model, entries[i], x, to.nbest, speaker)
            for line in unheard.lines(x.name, found.unheard, found.invented, searching.drop_invented):
                tqdm.write(line, file=sys.stderr)
            write(i, found)
    return 1 if bad else 0


COMMAND = (
    "transcribe", "write the texts of audio files", transcribe, command_line.files, Writing, Searching, Computing,
    functools.partial(command_line.add_options, names={"audio_column"}, default="as trained, or the usual ones"),
)  # fmt: skip
