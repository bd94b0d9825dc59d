"""The options of a search, and the `Decoding` that they ask a model for.

A Decoding is made once for a command, and again for each language that a request names. Files are read here, and not by
the search: an n-gram and phrases become arrays over the model's classes, so that a search is one compiled program
whatever the files hold, and an option that the model cannot follow is an error before any audio is read.
"""

import dataclasses
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_rnnt import decode
from jax_rnnt_speech.config.options import amount, natural, option
from jax_rnnt_speech.data import lists, rows, texts
from jax_rnnt_speech.recognition import scripts
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.recognition.spellings import Written, cases
from jax_rnnt_speech.recognition.spotter import Spotter
from jax_rnnt_speech.system import UserError, refuse_if, told


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WordBonus:
    """A model of fusion that adds to the score of every word.

    Each word multiplies the probability of an n-gram by a number below 1, so n-grams alone prefer few words.
    """

    separates: jax.Array  # bool [V]: labels that begin with the separator
    spells: jax.Array  # bool [V]: those with other characters

    def initial(self, batch):
        """Whether a word is in progress."""
        return jnp.zeros(batch, bool)

    def step(self, inside, labels):
        """Adds the bonus at the first character of a word, as separators in a row have no words between them."""
        inside = self.spells[labels] | (inside & ~self.separates[labels])
        return (self.spells & (self.separates | ~inside[:, None])).astype(jnp.float32), inside


# Nats for each label of a phrase. Greedy search gets fewer: it cannot go back from a phrase that it has begun to write.
WITH_BEAM, WITH_GREEDY = 1.0, 0.25
WITH_CTC = 1.0  # nats that a label of a phrase may be worse than the head's best class
BAR = re.compile(r"(?<!\S)\|(?!\S)")  # between the spellings of a phrase; another one, or \|, is a character of it
PROBABILITY = "probability"
NGRAM = lambda search: search.ngram, "--ngram"


@dataclasses.dataclass(frozen=True)
class Searching:
    """The options with which a command searches."""

    beam: int = option(0, natural, "number of hypotheses that a beam search keeps; with 0, the search is greedy (0)")
    ngram: Path | None = option(
        None, Path, "file of a word n-gram in ARPA format, for --beam", metavar="FILE",
        needs=(lambda search: search.beam, "--beam"),
    )  # fmt: skip
    ngram_weight: float = option(0.3, amount, "weight of the n-gram", metavar="W", needs=NGRAM)
    word_bonus: float = option(1.5, amount, "nats that each word earns", metavar="W", needs=NGRAM)
    ilm_weight: float = option(
        0.1, amount, "share of the network's own language model that --ngram replaces", metavar="W", needs=NGRAM
    )
    unknown_word: float | None = option(
        None, amount, "nats, before --ngram-weight, that a word costs which the n-gram lacks; 30 is usual (what the "
        "file says)", metavar="W", needs=NGRAM,
    )  # fmt: skip
    phrases: Path | None = option(
        None, Path, "file of texts to prefer, one on each line, or its spellings as in WRITTEN | OTHER | ..., of which "
        "the first takes the place of the others; perhaps with a tab and a weight: nats for each label "
        f"({WITH_BEAM}; greedy: {WITH_GREEDY}; by a head for CTC: {WITH_CTC})", metavar="FILE",
    )  # fmt: skip
    phrases_case: str = option(
        "any", str, "whether a phrase is also preferred in lower case, in capitals, and with a capital for its first "
        "word or each word; or exactly as it is in the file", choices=("any", "exact"),
        needs=(lambda search: search.phrases, "--phrases"),
    )  # fmt: skip
    phrases_by: str = option(
        "search", str, "what prefers phrases: the search; or a head for CTC, which finds them in the audio, instead "
        "of words", choices=("search", "ctc"),
        needs=(lambda search: search.phrases, "--phrases"),
    )  # fmt: skip
    phrase_depth: float = option(
        0.0, amount, "how much more each label of a phrase earns from the second one on; NeMo's depth_scaling less 1",
        metavar="D", needs=(lambda search: search.phrases, "--phrases"),
    )  # fmt: skip
    script: str = option(
        "", str, "write these of Unicode's scripts alone, beside digits and punctuation, as in latin,cyrillic",
        metavar="NAME,...",
    )  # fmt: skip
    only_characters: str = option(
        "", str, "write these characters and spaces alone",
        needs=(lambda search: not search.script, "all scripts, and no --script"),
    )  # fmt: skip
    head: str | None = option(
        None, str, "which head finds the labels, for a model with two (the transducer, if there is one)",
        choices=("transducer", "ctc"),
    )  # fmt: skip
    confidence: str = option(
        PROBABILITY, str, "how confidence in words is measured: by the least probability of their labels, or by an "
        "entropy over all labels, of this kind", choices=(PROBABILITY, "tsallis", "renyi", "gibbs"),
    )  # fmt: skip
    prompt: str = option("", str, "language of the recordings, for a model that takes one", metavar="NAME")

    def checked(self):
        """Returns itself, or raises where a file is missing."""
        for name in ("ngram", "phrases"):
            file = getattr(self, name)
            refuse_if(file and not file.is_file(), f"--{name} {file} is no file")
        return self


def read(path, model, unknown=None):
    """The n-gram of a file over the classes of a model. `unknown` is what an unknown word costs, in nats.

    Classes without a text, such as the blank, have no label that an n-gram could read.
    """
    tokens = model.tokens
    classes = tokens.labels + [None] * (model.classes - len(tokens.pieces))
    with told(f"--ngram {path}", OSError, ValueError):
        return decode.WordNGram.from_arpa(path, classes, separator=tokens.separator, unknown=unknown and -unknown)


def word_bonus(model):
    separator, none = model.tokens.separator, [False] * (model.classes - len(model.tokens.pieces))
    labels = [label or "" for label in model.tokens.labels]
    separates = [label.startswith(separator) for label in labels]
    spells = [label not in ("", separator) for label in labels]
    return WordBonus(jnp.array(separates + none), jnp.array(spells + none))


def listed(path, usual):
    """[(number, spellings, weight)] of the lines of a file of phrases. Those without a weight have the `usual` one."""
    with told(f"--phrases {path} is not readable", OSError, ValueError):
        lines = [(i, rows.encodable(line, f"line {i}")) for i, line in lists.lines_of(path)]
    phrases = []
    for i, line in lines:
        text, _, weight = line.partition("\t")
        spellings = [" ".join("|" if y == r"\|" else y for y in x.split()) for x in BAR.split(text)]
        try:
            weight = float(weight.strip() or usual)
        except ValueError:
            weight = math.nan
        if not any(spellings) or not math.isfinite(weight):
            raise UserError(f"--phrases {path}, line {i}: expected TEXT, or TEXT, a tab and a number, got {line!r}")
        if not all(spellings):
            raise UserError(f"--phrases {path}, line {i}: expected a spelling on both sides of each |, got {line!r}")
        phrases.append((i, spellings, weight))
    return phrases


def speller(model, exact=False):
    """A function from a text to the labels of each way to write it that the vocabulary has, by `spellings.cases`."""
    normalize = texts.normalizer(model.config.texts.normalize, model.config.texts.lower)

    def spell(text):
        ways = [model.tokens.encode(normalize(x)) for x in ([text] if exact else cases(text))]
        return [list(x) for x in dict.fromkeys(tuple(x) for x in ways if x)]

    return spell


def spelled(path, model, usual, exact=False):
    """[(text, labels, number)] of a file of phrases, spelled as the vocabulary spells texts.

    What the vocabulary cannot spell is named and left out.
    """
    spell, phrases = speller(model, exact), []
    for i, spellings, weight in listed(path, usual):
        for text in spellings:
            ways = spell(text)
            phrases += [(text, labels, weight) for labels in ways]
            if not ways:
                print(f"--phrases {path}, line {i}: the model's vocabulary cannot spell {text!r}", file=sys.stderr)
    refuse_if(not phrases, f"--phrases {path} has no phrase that the model's vocabulary can spell")
    return phrases


def written(path, model, exact=False):
    """What is written for the phrases of a file that have several spellings."""
    several = [spellings for _, spellings, _ in listed(path, 0) if len(spellings) > 1]
    normalize = texts.normalizer(model.config.texts.normalize, model.config.texts.lower)
    return Written(several, normalize, model.tokens.separates, exact)


def phrases(path, model, usual, depth=0.0, exact=False):
    """The Phrases of a file, with the numbers of its lines as weights."""
    _, labels, weights = map(list, zip(*spelled(path, model, usual, exact)))
    with told(f"--phrases {path}", ValueError):
        return decode.Phrases(labels, weights, classes=model.blank + 1, depth=depth)


def decoding_of(options, model):
    """The Decoding that a Searching asks for; raises where the model has no head, prompt or label for it.

    Phrases that the search writes are a model of fusion. A head for CTC finds phrases after the search, by a `Spotter`.
    """
    fusion, ilm, kind = (), 0.0, options.confidence
    if options.ngram:
        ngram, bonus = read(options.ngram, model, options.unknown_word), word_bonus(model)
        fusion, ilm = ((ngram, options.ngram_weight), (bonus, options.word_bonus)), options.ilm_weight
    spotter, exact, put = None, options.phrases_case == "exact", Written()
    if options.phrases:
        put = written(options.phrases, model, exact)
    if options.phrases and options.phrases_by == "ctc":
        if model.chunk or "ctc" not in model.shapes:
            raise UserError("--phrases-by ctc needs a model with a head for CTC that sees whole utterances")
        _, labels, weights = zip(*spelled(options.phrases, model, WITH_CTC, exact))
        spotter = Spotter(tuple(map(tuple, labels)), weights, options.phrase_depth)
    elif options.phrases:
        usual = WITH_BEAM if options.beam else WITH_GREEDY
        fusion += ((phrases(options.phrases, model, usual, options.phrase_depth, exact), 1.0),)
    alone = model.config.head.loss == "ctc"
    ctc = alone if options.head is None else options.head == "ctc"
    if ctc != alone and (alone or "ctc" not in model.shapes):
        raise UserError(f"--head {options.head}: the model has no such head")
    if ctc and (options.beam or fusion or kind != PROBABILITY):
        raise UserError("a head for CTC has greedy search alone: no --beam, --phrases or --confidence")
    language = model.language(options.prompt) if options.prompt else None
    kind = None if kind == PROBABILITY else decode.Entropy(kind)
    mask = allowed(model, options.script, options.only_characters)
    return Decoding(options.beam, ilm, fusion, kind, ctc, language, mask, spotter, put)


def allowed(model, names="", characters=""):
    """The mask of the labels that scripts, by their names, or characters leave; None where all labels are allowed.

    None keeps the program of a search without a mask, which other searches have compiled already.
    """
    if not names and not characters:
        return None
    tokens, classes = model.tokens, model.blank + 1
    if names:
        mask = scripts.mask_of_scripts(tokens, classes, scripts.codes(names))
    else:
        mask = scripts.mask_of_characters(tokens, classes, characters)
    return None if mask.all() else jnp.asarray(mask)


def decoding_for(model, decoding, language):
    """(the Decoding for a language, whether the language decides anything), or None where nobody knows the language.

    The script of the language decides which labels are allowed. In a model with prompts, the language is the prompt.
    """
    names = scripts.scripts_of_language(language)
    if names is None:
        return None
    mask, prompt = allowed(model, ",".join(names)), model.prompt_of(language)
    chosen = {"allowed": decoding.allowed if mask is None else mask}
    if prompt is not None:
        chosen["language"] = prompt
    return dataclasses.replace(decoding, **chosen), mask is not None or prompt is not None
