"""Tests a model: error rates with their kinds and interval, by speaker, and what was recognised.

Every utterance with a text and readable audio counts, also one that is too long for a training or has characters
outside the vocabulary. References and hypotheses are normalised alike. Rates are in per cent.
"""

import contextlib
import csv
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

import numpy as np

from jax_rnnt_speech.cli.stream import Live
from jax_rnnt_speech.config import command_line, options_of
from jax_rnnt_speech.config.options import natural, option
from jax_rnnt_speech.data import batches, corpora, lists, sources, texts
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition import errors, latency, recognise
from jax_rnnt_speech.recognition.results import Result
from jax_rnnt_speech.recognition.search_options import Searching, decoding_of
from jax_rnnt_speech.system import UserError, outputs, refuse_if

OPTIONS = options_of("texts")
SPEAKERS = 20  # speakers that are shown on the screen
KINDS = "insertions", "deletions", "substitutions"


class Test:
    """The results of a model on some corpora."""

    def __init__(self, model, paths, settings, decoding, live=None):
        self.latencies = []
        self.corpus, self.results = corpora.tested(paths, settings), []
        self.report, utterances = self.corpus.report, self.corpus.utterances
        normalize, started = texts.normalizer(settings.texts.normalize, settings.texts.lower), time.perf_counter()
        if live:
            heard = self.streamed(live, reference_words(model, self.corpus, paths, settings, decoding.language))
        else:
            heard = recognise.transcribe(model, self.recordings(), decoding)
        for result in outputs.bar(heard, "utterances", len(utterances)):
            x = utterances[result.name]
            if result.error:
                self.report.add(result.error.partition(": ")[2], x.name)
                continue
            seconds = x.seconds or result.duration
            self.results.append(errors.tested(shown(x.name), x.speaker, seconds, x.text, normalize(result.text)))
        self.seconds = time.perf_counter() - started
        self.words = errors.summed([x.words for x in self.results]) if self.results else errors.Counts(0, 0, 0, 0)
        refuse_if(not self.words.length, f"no utterance with words in {', '.join(paths)}{self.report.summary()}")
        self.characters = errors.summed([x.characters for x in self.results])
        self.interval = errors.interval([x.words for x in self.results])

    def recordings(self):
        """Yields (number, samples) of each utterance; those without samples go to the report."""
        for i, x in enumerate(self.corpus.utterances):
            try:
                yield i, self.corpus.samples(i, np.random.default_rng(i))
            except UserError as error:
                self.report.add(getattr(error, "reason", str(error)), x.name)

    def streamed(self, live, words):
        """Yields the Result of each utterance as a stream recognises it. `words` come from `latency.words_of`."""
        for i, samples in self.recordings():
            duration = len(samples) / live.extractor.rate
            try:
                text, found = latency.heard(live, samples)
            except ValueError as error:
                yield Result(i, error=f"{i}: {error}")
                continue
            if (reference := words.get(latency.key(self.corpus.entries[i]))) is not None:
                self.latencies.append(latency.latency(reference, found, duration))
            yield Result(i, text, duration=duration)

    def object(self):
        """Returns the object that --json prints."""
        kinds = {name: getattr(self.words, name) for name in KINDS}
        more = {"utterances": len(self.results), "left_out": dict(self.report.names)}
        rates = {"wer": self.words.rate, "cer": self.characters.rate, "interval": self.interval}
        seconds = {"seconds_of_audio": sum(x.seconds for x in self.results), "seconds": self.seconds}
        late = {"latency": latency.summary(self.latencies)} if self.latencies else {}
        return rates | late | kinds | {"words": self.words.length} | more | seconds

    def lines(self, count):
        x, heard = self.object(), sum(x.seconds for x in self.results)
        between = "" if not self.interval else " (95% interval {:.1f} to {:.1f}%, {} resamples of utterances)".format(
            *self.interval, errors.RESAMPLES)  # fmt: skip
        yield f"WER {x['wer']:.1f}%{between}, CER {x['cer']:.1f}%"
        late = x.get("latency", {})
        if late.get("words"):
            yield "latency {mean:.2f} s on average, {p95:.2f} s or less for 95% of {words} words; the end of a " \
                  "recording made {at_the_end} of them final; LAAL {laal:.2f} s".format(**late)  # fmt: skip
        yield f"{x['words']} words: " + ", ".join(f"{x[name]} {name}" for name in KINDS)
        left = sum(map(len, self.report.names.values()))
        yield f"{x['utterances']} utterances, {left} left out; {heard:.1f} s of audio in {self.seconds:.1f} s"
        groups = errors.by_speaker(self.results)
        for speaker, group in list(groups.items())[:SPEAKERS]:
            words, characters = (errors.summed([getattr(y, name) for y in group]) for name in ("words", "characters"))
            kinds = ", ".join(f"{getattr(words, name)} {name}" for name in KINDS)
            yield f"speaker {shown(speaker) or 'unknown'}: WER {words.rate:.1f}%, CER {characters.rate:.1f}%, " \
                  f"{words.length} words: {kinds}; {len(group)} utterances"  # fmt: skip
        if len(groups) > SPEAKERS:
            yield f"and {len(groups) - SPEAKERS} more speakers, all with a lower WER"
        for (old, new), times in errors.confusions(self.results, count):
            yield f"{times} times: {old or '(nothing)'} -> {new or '(nothing)'}"
        for y in errors.worst(self.results, count):
            yield f"{y.name}: {y.words.errors} errors in {y.words.length} words"
            yield f"  {errors.difference(y.reference, y.hypothesis)}"

    def rows(self):
        """Yields a dictionary for each utterance, for files."""
        for x in self.results:
            row = {"name": x.name, "speaker": x.speaker, "seconds": round(x.seconds, 3), "words": x.words.length}
            row |= {name: getattr(x.words, name) for name in KINDS}
            pair = {"reference": x.reference, "hypothesis": x.hypothesis}
            yield row | pair | {"difference": errors.difference(*pair.values())}

    def write(self, path):
        rows = list(self.rows())
        with (
            outputs.whole(path) as part,
            part.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file,
        ):
            if path.suffix == ".jsonl":
                file.writelines(json.dumps(x, ensure_ascii=False) + "\n" for x in rows)
            else:
                table = csv.DictWriter(file, list(rows[0]), delimiter="\t", lineterminator="\n")
                table.writeheader()
                table.writerows(rows)


@dataclasses.dataclass(frozen=True)
class Shown:
    """The options that decide what is shown of a test, and where."""

    output: Path | None = option(
        None, Path, "write each reference and its hypothesis to this file, .tsv or .jsonl", metavar="FILE"
    )
    json: bool = option(False, bool, "print one JSON object: wer, cer, interval, insertions, ...", action="store_true")
    stream: bool = option(
        False, bool, "hear recordings as stream does, and measure the seconds from the end of a word, by align, until "
        "it is final; computing takes no time on this clock", action="store_true",
    )  # fmt: skip
    worst: int = option(5, natural, "show so many utterances with the most errors")

    def checked(self, sources):
        """Returns itself, or raises an error where something has no place."""
        if self.output and self.output.suffix not in (".tsv", ".jsonl"):
            raise UserError(f"--output {self.output} must end in .tsv or .jsonl")
        if self.output:
            outputs.check(self.output, sources)
        return self


def reference_words(model, corpus, paths, settings, language):
    """Returns the words of the references with their times, as the command `align` computes them."""
    needs = "--stream measures latencies by align, which needs"
    refuse_if(model.loss is None, f"{needs} a transducer")
    refuse_if(not hasattr(corpus, "entries"), f"{needs} recordings: {paths[0]} is a function")
    settings = settings.replace(max_seconds=min(1e9, model.longest))
    corpus = corpora.Recordings(paths, settings, lenient=True)
    data = batches.labelled(corpus, model.tokens, model.subsampling)
    return latency.words_of(model, corpus, data, settings, language)


def test(args):
    live = command_line.taken(args, Live)
    sizes = live.endpoint, live.left, live.chunk, live.right
    refuse_if(not vars(args).get("stream") and any(sizes), "--endpoint, --left, --chunk and --right need --stream")
    searching, to = command_line.taken(args, Searching).checked(), command_line.taken(args, Shown).checked(args.data)
    opening, args.data = command_line.taken(args, Computing), sources.once(args.data)
    with contextlib.suppress(lists.ListError):  # it is left out, with its reason
        sources.unmixed("", sources.listed(args.data))
    model = opening.opened()
    settings = command_line.changed(model.config, args, OPTIONS)
    decoding = decoding_of(searching, model)
    result = Test(model, args.data, settings, decoding, live.stream(model, decoding) if to.stream else None)
    if to.output:
        result.write(to.output)
    if to.json:
        print(json.dumps(result.object()))
    else:
        print(*result.lines(to.worst), sep="\n")
    for line in result.report.lines(named=sys.maxsize):
        print(line, file=sys.stderr)
    return 1 if result.report.names else 0


COMMAND = (
    "test", "measure error rates, with their interval, by kind and by speaker", test, command_line.data, Shown,
    functools.partial(command_line.add_fields, kind=Live, but=["json"]),
    Computing, functools.partial(command_line.add_fields, kind=Searching, but=["confidence"]),
    functools.partial(command_line.add_options, names=OPTIONS, default="as trained"),
)  # fmt: skip
