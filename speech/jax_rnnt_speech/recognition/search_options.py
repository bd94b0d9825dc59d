"""The options of a search, and what they ask for: a beam, word n-grams, lists of phrases."""

import dataclasses
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_rnnt import decode
from jax_rnnt_speech.config.options import amount, natural
from jax_rnnt_speech.data import manifests, texts
from jax_rnnt_speech.recognition import scripts
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.system import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WordBonus:
    """A model of fusion that adds to the score of every word, as n-grams alone prefer few words."""

    separates: jax.Array  # bool [V]: labels that begin with the separator
    spells: jax.Array  # bool [V]: those with other characters

    def initial(self, batch):
        """Whether a word is in progress."""
        return jnp.zeros(batch, bool)

    def step(self, inside, labels):
        """A word is paid for with its first character: separators in a row have no words between them."""
        inside = self.spells[labels] | (inside & ~self.separates[labels])
        return (self.spells & (self.separates | ~inside[:, None])).astype(jnp.float32), inside


PROBABILITY = "probability"
WEIGHTS = {
    "ngram_weight": (0.3, "weight of the n-gram"),
    "word_bonus": (1.5, "nats that each word earns"),
    "ilm_weight": (0.1, "share of the network's own language model that --ngram replaces"),
}
# Nats for each label of a phrase. Greedy search cannot go back from a phrase that it has begun to write.
WITH_BEAM, WITH_GREEDY = 1.0, 0.25


def add_options(parser):
    parser.add_argument(
        "--beam",
        type=natural,
        default=0,
        metavar="N",
        help="number of hypotheses that a beam search keeps; with 0, the search is greedy (%(default)s)",
    )
    parser.add_argument("--ngram", type=Path, metavar="FILE", help="file of a word n-gram in ARPA format, for --beam")
    for name, (default, help) in WEIGHTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=amount, metavar="W", help=f"{help} ({default})")
    help = "nats, before --ngram-weight, that a word costs which the n-gram lacks; 30 is usual (what the file says)"
    parser.add_argument("--unknown-word", type=amount, metavar="W", help=help)
    help = (
        "file of texts to prefer, one on each line, perhaps with a tab and a weight: nats for each label "
        f"({WITH_BEAM}; greedy: {WITH_GREEDY})"
    )
    parser.add_argument("--phrases", type=Path, metavar="FILE", help=help)
    help = "write these of Unicode's scripts alone, beside digits and punctuation, as in latin,cyrillic"
    scripts = parser.add_mutually_exclusive_group()
    scripts.add_argument("--script", metavar="NAME,...", help=help)
    scripts.add_argument("--only-characters", metavar="TEXT", help="write these characters and spaces alone")
    help = "which head finds the labels, for a model with two (the transducer, if there is one)"
    parser.add_argument("--head", choices=("transducer", "ctc"), help=help)


def check(args):
    """Raises where options of a search contradict each other, or there is no n-gram."""
    if not args.ngram:
        for name in (*WEIGHTS, "unknown_word"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} needs --ngram")
    elif not args.beam:
        raise UserError("--ngram needs --beam")
    for name in ("ngram", "phrases"):
        file = getattr(args, name)
        if file and not file.is_file():
            raise UserError(f"--{name} {file} is no file")


def read(path, model, unknown=None):
    """The model of a file, over the classes of a model; `unknown`: the nats that an unknown word costs."""
    tokens = model.tokens
    classes = tokens.labels() + [None] * (model.classes - len(tokens.pieces))
    try:
        return decode.WordNGram.from_arpa(path, classes, separator=tokens.separator, unknown=unknown and -unknown)
    except (OSError, ValueError) as error:
        raise UserError(f"--ngram {path}: {error}") from None


def word_bonus(model):
    separator, none = model.tokens.separator, [False] * (model.classes - len(model.tokens.pieces))
    labels = [label or "" for label in model.tokens.labels()]
    separates = [label.startswith(separator) for label in labels]
    spells = [label not in ("", separator) for label in labels]
    return WordBonus(jnp.array(separates + none), jnp.array(spells + none))


def phrases(path, model, usual):
    """The Phrases of a file, spelled as the vocabulary spells texts; what it cannot spell is named, and left out.

    `usual`: the weight of lines without one.
    """
    normalize = texts.normalizer(model.config.texts.normalize, model.config.texts.lower)
    try:
        lines = [(i, manifests.encodable(line, f"line {i}")) for i, line in manifests.lines_of(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"--phrases {path} is not readable: {error}") from None
    found = []
    for i, line in lines:
        text, _, weight = line.partition("\t")
        try:
            weight = float(weight.strip() or usual)
        except ValueError:
            weight = math.nan
        if not text.strip() or not math.isfinite(weight):
            raise UserError(f"--phrases {path}, line {i}: expected TEXT, or TEXT, a tab and a number, got {line!r}")
        if labels := model.tokens.encode(normalize(text)):
            found.append((labels, weight))
        else:
            print(f"--phrases {path}, line {i}: the model's vocabulary cannot spell {text!r}", file=sys.stderr)
    if not found:
        raise UserError(f"--phrases {path} has no phrase that the model's vocabulary can spell")
    try:
        return decode.Phrases(*map(list, zip(*found)), classes=model.blank + 1)
    except ValueError as error:
        raise UserError(f"--phrases {path}: {error}") from None


def decoding_of(args, model):
    """The Decoding that the options ask for."""
    kind, fusion, ilm = getattr(args, "confidence", PROBABILITY), (), 0.0
    if args.ngram:
        chosen = {name: getattr(args, name) for name in WEIGHTS}
        weight, bonus, ilm = (WEIGHTS[name][0] if x is None else x for name, x in chosen.items())
        fusion = (read(args.ngram, model, args.unknown_word), weight), (word_bonus(model), bonus)
    if args.phrases:
        fusion += ((phrases(args.phrases, model, WITH_BEAM if args.beam else WITH_GREEDY), 1.0),)
    alone = model.config.head.loss == "ctc"
    ctc, language = alone if args.head is None else args.head == "ctc", None
    if ctc != alone and (alone or "ctc" not in model.shapes):
        raise UserError(f"--head {args.head}: the model has no such head")
    if ctc and (args.beam or fusion or kind != PROBABILITY):
        raise UserError("a head for CTC has greedy search alone: no --beam, --phrases or --confidence")
    if getattr(args, "prompt", ""):
        language = model.language(args.prompt)
    kind = None if kind == PROBABILITY else decode.Entropy(kind)
    return Decoding(args.beam, ilm, fusion, kind, ctc, language, allowed(model, args.script, args.only_characters))


def allowed(model, names=None, characters=None):
    """The mask of labels of scripts, by their names, or of characters; None: all labels are allowed."""
    tokens, classes = model.tokens, model.blank + 1
    if names:
        found = scripts.mask_of_scripts(tokens, classes, scripts.codes(names))
    elif characters:
        found = scripts.mask_of_characters(tokens, classes, characters)
    return jnp.asarray(found) if (names or characters) and not found.all() else None


def of_language(model, decoding, language):
    """(the Decoding of a language that was asked for, whether that decides anything); None: it is unknown.

    Its script decides the labels, and in a model with prompts it is the prompt.
    """
    found = scripts.of_language(language)
    if found is None:
        return None
    mask = allowed(model, ",".join(found))
    prompt = model.prompt_of(language)
    chosen = {"allowed": decoding.allowed if mask is None else mask}
    if prompt is not None:
        chosen["language"] = prompt
    return dataclasses.replace(decoding, **chosen), mask is not None or prompt is not None
