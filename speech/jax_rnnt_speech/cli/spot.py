"""Finds phrases in recordings, as they are said, and whatever a transcript would write there."""

import dataclasses
import json
import sys
from pathlib import Path

from tqdm import tqdm

from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import number, option
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition import recognise, search_options, spotting
from jax_rnnt_speech.system import UserError, refuse_if


@dataclasses.dataclass(frozen=True)
class Spotting:
    """What is spotted, and how it is shown."""

    phrases: Path | None = option(
        None, Path, "file of phrases to find, one on each line, perhaps with a tab and the least score that counts",
        metavar="FILE",
    )  # fmt: skip
    threshold: float = option(
        -1.0, number(float, -1000), "least score that counts, the log-probability of the labels: the nearer to 0, the "
        "fewer false alarms", metavar="W",
    )  # fmt: skip
    json: bool = option(False, bool, "print a JSON object for each phrase that is found", action="store_true")

    def checked(self):
        refuse_if(self.phrases is None, "--phrases is missing: a file of phrases to find")
        refuse_if(not self.phrases.is_file(), f"--phrases {self.phrases} is no file")
        return self


def spot(args):
    options = command_line.taken(args, Spotting).checked()
    model = command_line.taken(args, Computing).opened()
    phrases = [spotting.Phrase(*x) for x in search_options.spelled(options.phrases, model, options.threshold)]
    entries, bad = list(recognise.settled(recognise.listed(args.files))), 0
    for entry, (name, samples) in zip(entries, recognise.loaded(entries, model.extractor.rate)):
        try:
            if isinstance(samples, UserError):
                raise samples
            for x in spotting.spot(model, name, samples, phrases):
                show(entry, x, options.json)
        except spotting.LossError:
            raise
        except UserError as error:
            tqdm.write(str(error), file=sys.stderr)
            bad += 1
    refuse_if(entries and bad == len(entries), "no recording could be used")
    return 1 if bad else 0


def show(entry, found, as_json):
    start, end = (round(entry.start + x, 3) for x in (found.start, found.end))
    if as_json:
        x = {"file": str(entry.audio), "phrase": found.text, "start": start, "end": end, "score": round(found.score, 4)}
        print(json.dumps(x, ensure_ascii=False), flush=True)
    else:
        print(f"{shown(entry.audio)}\t{start:.2f}\t{end:.2f}\t{found.score:.2f}\t{shown(found.text)}", flush=True)


COMMAND = (
    "spot", "find phrases in recordings, whatever a transcript would write there", spot, command_line.files, Spotting,
    Computing,
)  # fmt: skip
