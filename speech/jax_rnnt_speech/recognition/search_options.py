"""The options of a search, and the `Decoding` that follows from them for a model.

A Decoding is made once for a command, and again for each language that a request names. Files are read here, and not by
the search: an n-gram and phrases become arrays over the model's classes, so that a search is one compiled program
whatever the files contain, and an option that the model cannot follow is an error before any audio is read.
"""

import dataclasses
import functools
import math
import re
import sys
import unicodedata
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
from jax_rnnt_speech.system import UserError, as_user_error, refuse_if


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WordBonus:
    """A model of fusion that adds to the score of every word.

    Each word multiplies the probability of an n-gram by a number below 1, so n-grams alone prefer few words.
    """

    separates: jax.Array  # bool [V]: labels that begin with the separator
    spells: jax.Array  # bool [V]: labels with other characters

    def initial(self, batch):
        """Returns False for each row: no word is in progress."""
        return jnp.zeros(batch, bool)

    def step(self, inside, labels):
        """Adds the bonus at the first character of a word, as separators in a row have no words between them."""
        inside = self.spells[labels] | (inside & ~self.separates[labels])
        return (self.spells & (self.separates | ~inside[:, None])).astype(jnp.float32), inside


# Nats for each label of a phrase: the most that the guard of each search lets a label earn.
WITH_BEAM, WITH_GREEDY = 1.0, 2.5
LARGE = 10.0  # nats of a label up to which the guard was measured, as jax_rnnt/decode/_guard.py says
WITH_CTC = 1.0  # nats that a label of a phrase may be worse than the head's best class
LONGEST = 100  # characters of a phrase of a request, and labels of a recording's own room for each of them
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
    phrase_guard: str = option(
        "on", str, "whether phrases count only where the model itself holds their labels possible",
        choices=("on", "off"),
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
    drop_invented: bool = option(
        False, bool, "leave out words where nobody speaks, which are named otherwise", action="store_true"
    )

    def checked(self):
        """Returns itself, or raises an error where a file is missing."""
        for name in ("ngram", "phrases"):
            file = getattr(self, name)
            refuse_if(file and not file.is_file(), f"--{name} {file} is no file")
        return self


def read(path, model, unknown=None):
    """Reads the n-gram of a file over the classes of a model. `unknown` is the cost of an unknown word, in nats.

    Classes without a text, such as the blank, have no label that an n-gram could read.
    """
    tokens = model.tokens
    classes = tokens.labels + [None] * (model.classes - len(tokens.pieces))
    with as_user_error(f"--ngram {path}", OSError, ValueError):
        return decode.WordNGram.from_arpa(path, classes, separator=tokens.separator, unknown=unknown and -unknown)


def word_bonus(model):
    separator, none = model.tokens.separator, [False] * (model.classes - len(model.tokens.pieces))
    labels = [label or "" for label in model.tokens.labels]
    separates = [label.startswith(separator) for label in labels]
    spells = [label not in ("", separator) for label in labels]
    return WordBonus(jnp.array(separates + none), jnp.array(spells + none))


def listed(path, usual):
    """Returns [(number, spellings, weight)] of a file of phrases. Lines without a weight have the `usual` one."""
    with as_user_error(f"--phrases {path} is not readable", OSError, ValueError):
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
    """Returns a function from a text to the labels of each of its `spellings.cases` that the vocabulary can write."""
    normalize = texts.normalizer(model.config.texts.normalize, model.config.texts.lower)

    def spell(text):
        ways = [model.tokens.encode(normalize(x)) for x in ([text] if exact else cases(text))]
        return [list(x) for x in dict.fromkeys(tuple(x) for x in ways if x)]

    return spell


def spelled(path, model, usual, exact=False):
    """Returns [(text, labels, number)] of a file of phrases, spelled as the vocabulary spells texts.

    Texts that the vocabulary cannot spell are named and left out.
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


def guarded(phrases, options):
    """Returns True if the guard watches phrases [(labels, weight)]. A line reports weights beyond it."""
    largest = max((weight for _, weight in phrases), default=0.0) * (1 + options.phrase_depth)
    if largest > LARGE:
        print(f"--phrases: a label earns {largest:g} nats; phrases that nobody says may be written above {LARGE:g}",
              file=sys.stderr)  # fmt: skip
    return options.phrase_guard == "on"


def written(path, model, exact=False):
    """Returns the texts to write for the phrases of a file that have several spellings."""
    several = [spellings for _, spellings, _ in listed(path, 0) if len(spellings) > 1]
    normalize = texts.normalizer(model.config.texts.normalize, model.config.texts.lower)
    return Written(several, normalize, model.tokens.separates, exact)


UNSPACED = re.compile("CJK|HIRAGANA|KATAKANA|BOPOMOFO|THAI|LAO|KHMER|MYANMAR|TIBETAN")  # scripts without spaces


def space_of(tokens):
    """Returns the label that comes before each word, where it stands alone; None if words begin elsewhere, too."""
    labels = [x or "" for x in tokens.labels]
    begin = [i for i, x in enumerate(labels) if x.startswith(tokens.separator)]
    unspaced = any(UNSPACED.match(unicodedata.name(y, "")) for x in labels for y in x)
    alone = len(begin) == 1 and labels[begin[0]] == tokens.separator
    return begin[0] if alone and not unspaced else None


def phrases(model, lists, depth=0.0, size=None):
    """Returns the model of fusion that prefers phrases: a list [(labels, weight)] for all, or one for each.

    They begin where a word does.
    """
    labels, weights = ([[x[i] for x in some] for some in lists] for i in (0, 1))
    if len(lists) == 1 and size is None:
        (labels,), (weights,) = labels, weights
    space = space_of(model.tokens)
    return decode.Phrases(labels, weights, classes=model.blank + 1, size=size, depth=depth, before=space)


@dataclasses.dataclass(frozen=True, eq=False)
class Own:
    """The phrases of one recording."""

    phrases: list  # of (labels, weight)


class Room:
    """Room for `most` phrases of each recording, next to those of --phrases, `fixed` as [(labels, weight)].

    Its size is fixed, so that lists change from one recording to the next without compiling, and the recordings of a
    batch have different ones. A recording with phrases of its own has those of --phrases, too. Each is preferred as it
    is, and in other cases as far as there is room for them.
    """

    def __init__(self, model, fixed, most, usual, depth, exact=False):
        self.model, self.fixed, self.most, self.usual, self.depth = model, fixed, most, usual, depth
        self.spell = speller(model, exact)
        self.size = 1 + sum(len(labels) for labels, _ in fixed) + most * LONGEST  # 1 for the space before them
        self.model_of = functools.lru_cache(maxsize=8)(self.made)

    def own(self, texts):
        """Returns (Own of a recording or None, texts that it lacks: they have no spelling, or no room)."""
        ways = ((rank, i, x) for i, text in enumerate(texts) for rank, x in enumerate(self.spell(text)))
        found, kept, left = [], set(), self.most * LONGEST
        for _, i, labels in sorted(ways):
            if len(labels) <= left:
                found.append((labels, self.usual))
                kept.add(i)
                left -= len(labels)
        lacking = [text for i, text in enumerate(texts) if i not in kept]
        return Own(found) if found else None, lacking

    def made(self, owns):
        """Returns the model of fusion of a batch whose recordings have these Own phrases, or None."""
        lists = [[*self.fixed, *(own.phrases if own else ())] for own in owns]
        with jax.ensure_compile_time_eval():  # it is kept, and may be made while a program is traced
            return phrases(self.model, lists, self.depth, self.size)

    @property
    def bytes(self):
        """The bytes of memory that each recording of a batch takes."""
        return sum(x.nbytes for x in jax.tree.leaves(self.made((None,))))


def decoding_of(options, model, most=0):
    """Returns the Decoding of a Searching; raises an error where the model has no head, prompt or label for it.

    Phrases that the search writes are a model of fusion. A head for CTC finds phrases after the search, by a `Spotter`.
    With `most`, a recording may have so many phrases of its own, if the search is one that can prefer them.
    """
    fusion, ilm, kind = (), 0.0, options.confidence
    if options.ngram:
        ngram, bonus = read(options.ngram, model, options.unknown_word), word_bonus(model)
        fusion, ilm = ((ngram, options.ngram_weight), (bonus, options.word_bonus)), options.ilm_weight
    spotter, room, fixed = None, None, []
    exact, put = options.phrases_case == "exact", Written()
    if options.phrases:
        put = written(options.phrases, model, exact)
    if options.phrases and options.phrases_by == "ctc":
        if model.chunk or "ctc" not in model.shapes:
            raise UserError("--phrases-by ctc needs a model with a head for CTC that sees whole utterances")
        _, labels, weights = zip(*spelled(options.phrases, model, WITH_CTC, exact))
        spotter = Spotter(tuple(map(tuple, labels)), weights, options.phrase_depth)
    usual = WITH_BEAM if options.beam else WITH_GREEDY
    if options.phrases and not spotter:
        fixed = [x[1:] for x in spelled(options.phrases, model, usual, exact)]
    alone = model.config.head.loss == "ctc"
    ctc = alone if options.head is None else options.head == "ctc"
    if ctc != alone and (alone or "ctc" not in model.shapes):
        raise UserError(f"--head {options.head}: the model has no such head")
    if ctc and (options.beam or fusion or fixed or kind != PROBABILITY):
        raise UserError("a head for CTC has greedy search alone: no --beam, --phrases or --confidence")
    if fixed:
        with as_user_error(f"--phrases {options.phrases}", ValueError):
            fusion += ((phrases(model, [fixed], options.phrase_depth), 1.0),)
    if most and not ctc and not spotter:
        room = Room(model, fixed, most, usual, options.phrase_depth, exact)
        fusion = fusion[: len(fusion) - bool(fixed)]  # a recording's own list has them
    language = model.language(options.prompt) if options.prompt else None
    kind = None if kind == PROBABILITY else decode.Entropy(kind)
    mask = allowed(model, options.script, options.only_characters)
    more = {
        "guarded": guarded(fixed, options),
        "room": room,
        "drop_invented": options.drop_invented,
        "written": put,
    }
    return Decoding(options.beam, ilm, fusion, kind, ctc, language, mask, spotter, **more)


def allowed(model, names="", characters=""):
    """Returns the mask of labels that scripts, by their names, or characters leave; None where all are allowed.

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
    """Returns (the Decoding for a language, whether the language decides anything), or None for an unknown language.

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
