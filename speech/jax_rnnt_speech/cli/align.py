"""Forced alignment: when the words of known texts are spoken."""

import dataclasses
import functools
import sys

import jax
import numpy as np

from jax_rnnt_speech.config import command_line, options_of
from jax_rnnt_speech.config.options import option
from jax_rnnt_speech.data import batches, corpora
from jax_rnnt_speech.models import Opening
from jax_rnnt_speech.recognition import recognise, transcripts
from jax_rnnt_speech.recognition.search_options import Searching
from jax_rnnt_speech.system import as_user_error, outputs, programs, refuse_if

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

    @programs.announced("alignments", place=1)
    @jax.jit
    def frames_of(params, batch):
        """The frame of each label on the best path, [B, U]; -1 where there is no path."""
        network = model.network(params)
        x = model.encoded(network, model.inputs(batch), batch, language=language)
        return model.loss.align(network.joint.logits(x.frames, x.states), *x[2:])[1]

    bar = outputs.bar(total=len(data.labels), unit="utterances")
    entries = [x if i in data.labels else None for i, x in enumerate(corpus.entries)]
    with transcripts.writer(to, entries) as write, bar:
        for batch in batches.testing(data, settings.data, batches.make_buckets(data, settings, 1), (0, 1)):
            index = batch.pop("index")
            for i, frames in zip(index, np.asarray(frames_of(model.params, batch))):
                if i < 0:  # its audio is not readable
                    continue
                entry, utterance, labels = corpus.entries[i], corpus.utterances[i], data.labels[i].tolist()
                frames = frames[: len(labels)]
                if (frames < 0).any():
                    corpus.report.add("no path of the model", entry.name)
                    write(i, None)
                    continue
                with as_user_error(entry.name, ValueError):
                    timed = transcripts.words(model, labels, frames, start=entry.start, duration=utterance.seconds)
                space = transcripts.space_of(model.tokens)
                write(i, transcripts.Transcript(utterance.text, utterance.seconds, timed, space=space))
            bar.update(int(batch["valid"].sum()))
    for line in corpus.report.lines(named=sys.maxsize):
        print(line, file=sys.stderr)
    return 1 if corpus.report.names else 0


COMMAND = (
    "align", "find when the words of known texts are spoken", align, command_line.data, Words, Opening,
    functools.partial(command_line.add_fields, kind=Searching, names=["prompt"]),
    functools.partial(command_line.add_options, names={"max_seconds"}, default="what the model hears"),
    functools.partial(command_line.add_options, names=OPTIONS - {"max_seconds"}, default="as trained"),
)  # fmt: skip
