"""Forced alignment: the times at which the words of known texts are spoken."""

import dataclasses
import functools
import sys

from jax_rnnt_speech.config import command_line, options_of
from jax_rnnt_speech.config.options import option
from jax_rnnt_speech.data import batches, corpora
from jax_rnnt_speech.models import Opening
from jax_rnnt_speech.recognition import latency, recognise, transcripts
from jax_rnnt_speech.recognition.search_options import Searching
from jax_rnnt_speech.system import as_user_error, outputs, refuse_if

OPTIONS = options_of("texts") - {"speaker_column"} | {"max_seconds", "batch", "batch_seconds"}


@dataclasses.dataclass(frozen=True)
class Words(transcripts.Output):
    format: str = option("ctm", str, "format of what is written",
                         choices=("ctm", *(x for x in transcripts.FORMATS if x not in ("ctm", "text"))))  # fmt: skip


def align(args):
    to, opening = command_line.taken(args, Words), command_line.taken(args, Opening)
    to.checked(args.data, recognise.recordings(args.data, vars(args).get("audio_column", "")))
    model, prompt = opening.opened(), command_line.taken(args, Searching).prompt
    refuse_if(model.loss is None, f"{opening.folder} has a head for CTC alone: alignments need a transducer")
    language = model.language(prompt) if prompt else None
    settings = command_line.changed(model.config, args, OPTIONS)
    settings = settings.replace(max_seconds=min(vars(args).get("max_seconds", 1e9), model.longest))
    corpus = corpora.Recordings(args.data, settings, lenient=True)
    data = batches.labelled(corpus, model.tokens, model.subsampling)
    bar = outputs.bar(total=len(data.labels), unit="utterances")
    entries = [x if i in data.labels else None for i, x in enumerate(corpus.entries)]
    with transcripts.writer(to, entries) as write, bar:
        for i, labels, frames in latency.alignments(model, data, settings, language):
            entry, utterance = corpus.entries[i], corpus.utterances[i]
            bar.update()
            if frames is None:
                corpus.report.add("no path of the model", entry.name)
                write(i, None)
                continue
            with as_user_error(entry.name, ValueError):
                timed = transcripts.words(model, labels, frames, start=entry.start, duration=utterance.seconds)
            space = transcripts.space_of(model.tokens)
            write(i, transcripts.Transcript(utterance.text, utterance.seconds, timed, space=space))
    for line in corpus.report.lines(named=sys.maxsize):
        print(line, file=sys.stderr)
    return 1 if corpus.report.names else 0


COMMAND = (
    "align", "find when the words of known texts are spoken", align, command_line.data, Words, Opening,
    functools.partial(command_line.add_fields, kind=Searching, names=["prompt"]),
    functools.partial(command_line.add_options, names={"max_seconds"}, default="what the model hears"),
    functools.partial(command_line.add_options, names=OPTIONS - {"max_seconds"}, default="as trained"),
)  # fmt: skip
