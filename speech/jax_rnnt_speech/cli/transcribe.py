"""Writes the texts of audio files."""

import sys
from pathlib import Path

from tqdm import tqdm

from jax_rnnt_speech import models
from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import natural
from jax_rnnt_speech.recognition import recognise, search_options, segments, transcripts, unheard
from jax_rnnt_speech.system import UserError, outputs


def transcribe(args):
    search_options.check(args)
    if args.segments and not args.segments.is_file():
        raise UserError(f"--segments {args.segments} is no file")
    transcripts.check(args, args.files, recognise.recordings(args.files, vars(args).get("audio_column", "")))
    model = models.opened(args)
    settings = command_line.changed(model.config, args, {"audio_column"})
    entries, load = list(recognise.listed(args.files, settings.texts.audio_column)), recognise.loaded
    if args.segments:
        entries, load = segments.entries(args.segments, entries), segments.loaded
    quiet = True if not args.output and sys.stdout.isatty() else None  # a bar would be within the texts
    bad = 0
    with transcripts.writer(args, entries) as write:
        recordings = load(entries, model.config.features.rate)
        results = recognise.transcribe(model, recordings, search_options.decoding_of(args, model))
        for i, x in enumerate(outputs.bar(results, "recordings", len(entries), disable=quiet)):
            if x.error:
                tqdm.write(x.error, file=sys.stderr)
                bad += 1
            elif x.unheard:
                tqdm.write(unheard.line(x.name, [(entries[i].start + a, entries[i].start + b) for a, b in x.unheard]), file=sys.stderr)
            speaker = entries[i].speaker if args.segments and not x.error else ""
            write(i, None if x.error else transcripts.transcript(model, entries[i], x, args.nbest, speaker))
    return 1 if bad else 0


def add_command(commands):
    parser = commands.add_parser("transcribe", help="write the texts of audio files")
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="files of audio in any format, manifests, or folders"
    )
    transcripts.add_options(parser)
    help = "segments of the recordings with their speakers, to transcribe one by one: .rttm, .ctm, or .json of pyannote"
    parser.add_argument("--segments", type=Path, metavar="FILE", help=help)
    parser.add_argument(
        "--nbest", type=natural, default=0, metavar="N", help="list so many hypotheses of --beam in --format json"
    )
    kinds = search_options.PROBABILITY, "tsallis", "renyi", "gibbs"
    help = (
        "how confidence in words is measured: by the least probability of their labels (the default), or by "
        "an entropy over all labels, of this kind"
    )
    parser.add_argument("--confidence", choices=kinds, default=search_options.PROBABILITY, help=help)
    search_options.add_options(parser)
    command_line.add_options(parser, {"audio_column"}, "as trained, or the usual ones")
    parser.set_defaults(run=transcribe)
    models.add_options(parser)
    models.add_dtype(parser)
