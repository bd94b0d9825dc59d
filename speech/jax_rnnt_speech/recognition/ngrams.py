"""Word n-grams of the texts of corpora; searches with them, and with lists of phrases.

    rnnt-speech ngram words.arpa FOLDER/train --lower

Witten and Bell's estimate (1991): an n-gram's context h gives the share types(h) / (count(h) + types(h)) to the shorter
context, where types(h) counts the words that follow it. Behind the empty context all words are equally probable, and
<unk> is one of them: a model that gives it more prefers any spelling to words that it knows.
"""

import collections
import dataclasses
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_rnnt import decode
from jax_rnnt_speech import config
from jax_rnnt_speech.config import amount, natural, positive
from jax_rnnt_speech.data import manifests, texts
from jax_rnnt_speech.data.utterances import Report
from jax_rnnt_speech.system import UserError, outputs


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Search:
    """How labels are found. An argument of jitted functions: the n-gram is arrays, the rest decides the program."""

    beam: int = dataclasses.field(default=0, metadata={"static": True})  # hypotheses; 0: greedy
    ilm_weight: float = dataclasses.field(default=0.0, metadata={"static": True})
    fusion: tuple = ()  # of (n-gram or phrases, weight)
    confidence: decode.Entropy | None = dataclasses.field(default=None, metadata={"static": True})
    ctc: bool = dataclasses.field(default=False, metadata={"static": True})  # by that head
    language: int | None = dataclasses.field(default=None, metadata={"static": True})  # prompt; None: the usual one


OPTIONS = "lower", "normalize", "audio_column", "text_column"
MARKS = "<unk>", "<s>", "</s>", "<UNK>", "<S>", "</S>"
PROBABILITY = "probability"
WEIGHTS = {
    "ngram_weight": (0.3, "of the n-gram"),
    "word_bonus": (1.5, "nats for each word"),
    "ilm_weight": (0.1, "share of the network's own language model that --ngram replaces"),
}
# Nats for each label of a phrase. Greedy search cannot go back from a phrase that it has begun to write.
WITH_BEAM, GREEDY = 1.0, 0.25


def add_options(parser):
    parser.add_argument("--beam", type=natural, default=0, metavar="N", help="hypotheses; 0: greedy (%(default)s)")
    parser.add_argument("--ngram", type=Path, metavar="FILE", help="word n-gram for --beam, in ARPA format")
    for name, (default, help) in WEIGHTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=amount, metavar="W", help=f"{help} ({default})")
    help = "nats, before --ngram-weight, that a word costs that the n-gram lacks (what the file says); 30 is usual"
    parser.add_argument("--unknown-word", type=amount, metavar="W", help=help)
    help = f"texts to prefer, a line each; a weight behind a tab: nats for each label ({WITH_BEAM}; greedy: {GREEDY})"
    parser.add_argument("--phrases", type=Path, metavar="FILE", help=help)
    help = "which head of a model with two finds labels (the transducer, if there is one)"
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


def read(path, recogniser, unknown=None):
    """The model of a file, over the classes of a recogniser; `unknown`: the nats that an unknown word costs."""
    tokens = recogniser.tokens
    classes = tokens.labels() + [None] * (recogniser.classes - len(tokens.pieces))
    try:
        return decode.WordNGram.from_arpa(path, classes, separator=tokens.separator, unknown=unknown and -unknown)
    except (OSError, ValueError) as error:
        raise UserError(f"--ngram {path}: {error}") from None


def word_bonus(recogniser):
    separator, none = recogniser.tokens.separator, [False] * (recogniser.classes - len(recogniser.tokens.pieces))
    labels = [label or "" for label in recogniser.tokens.labels()]
    separates = [label.startswith(separator) for label in labels]
    spells = [label not in ("", separator) for label in labels]
    return WordBonus(jnp.array(separates + none), jnp.array(spells + none))


def phrases(path, recogniser, usual):
    """The Phrases of a file, spelled as the vocabulary spells texts; what it cannot spell is named, and left out.

    `usual`: the weight of lines without one.
    """
    normalize = texts.normalizer(recogniser.config.normalize, recogniser.config.lower)
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
        if labels := recogniser.tokens.encode(normalize(text)):
            found.append((labels, weight))
        else:
            print(f"--phrases {path}, line {i}: the model's vocabulary cannot spell {text!r}", file=sys.stderr)
    if not found:
        raise UserError(f"--phrases {path} has no phrase that the model's vocabulary can spell")
    try:
        return decode.Phrases(*map(list, zip(*found)), classes=recogniser.blank + 1)
    except ValueError as error:
        raise UserError(f"--phrases {path}: {error}") from None


def search_of(args, recogniser):
    """The Search that the options ask for."""
    kind, fusion, ilm = getattr(args, "confidence", PROBABILITY), (), 0.0
    if args.ngram:
        chosen = {name: getattr(args, name) for name in WEIGHTS}
        weight, bonus, ilm = (WEIGHTS[name][0] if x is None else x for name, x in chosen.items())
        fusion = (read(args.ngram, recogniser, args.unknown_word), weight), (word_bonus(recogniser), bonus)
    if args.phrases:
        fusion += ((phrases(args.phrases, recogniser, WITH_BEAM if args.beam else GREEDY), 1.0),)
    alone = recogniser.config.loss == "ctc"
    ctc, language = alone if args.head is None else args.head == "ctc", None
    if ctc != alone and (alone or "ctc" not in recogniser.shapes):
        raise UserError(f"--head {args.head}: the model has no such head")
    if ctc and (args.beam or fusion or kind != PROBABILITY):
        raise UserError("a head for CTC has greedy search alone: no --beam, --phrases or --confidence")
    if getattr(args, "prompt", ""):
        language = recogniser.language(args.prompt)
    return Search(args.beam, ilm, fusion, None if kind == PROBABILITY else decode.Entropy(kind), ctc, language)


def sentences_of(path, normalize, report, columns=()):
    """Words, without marks of a model, of sentences of a corpus or lines of a text; the report names what has none."""
    for x in manifests.sentences(path) if path.suffix == ".txt" else manifests.read(path, *columns):
        if isinstance(x, manifests.Fault):
            report.add(*x)
        elif words := [word for word in normalize(x.text).split() if word not in MARKS]:
            yield words
        else:
            report.add("no words", x.name)


def estimate(sentences, order):
    """Probabilities of n-grams of each order, tuples of words, and the share that each context gives away."""
    counts = [collections.Counter() for _ in range(order)]
    for words in sentences:
        words = "<s>", *words, "</s>"
        for end in range(1, len(words)):
            for n in range(min(order, end + 1)):
                counts[n][words[end - n : end + 1]] += 1
    probabilities, shares = [], {}
    unknown = 1 / (len(counts[0]) + 1)
    for n, grams in enumerate(counts):
        totals, types = collections.Counter(), collections.Counter()
        for gram, count in grams.items():
            totals[gram[:-1]] += count
            types[gram[:-1]] += 1
        shares |= {context: types[context] / (totals[context] + types[context]) for context in totals}
        of_grams = {}
        for gram, count in grams.items():
            context = gram[:-1]
            shorter = probabilities[n - 1][gram[1:]] if n else unknown
            of_grams[gram] = count / (totals[context] + types[context]) + shares[context] * shorter
        probabilities.append(of_grams)
    probabilities[0]["<unk>",] = shares[()] * unknown
    return probabilities, shares


def write(path, probabilities, shares):
    first = {("<s>",): 0.0} | probabilities[0]
    with outputs.whole(path) as part, part.open("w", encoding="utf-8") as file:
        sections = [first, *probabilities[1:]]
        file.write("\\data\\\n" + "".join(f"ngram {n}={len(x)}\n" for n, x in enumerate(sections, 1)))
        for n, grams in enumerate(sections, 1):
            file.write(f"\n\\{n}-grams:\n")
            for gram, p in sorted(grams.items()):
                backoff = f"\t{math.log10(shares[gram]):.6f}" if gram in shares else ""
                file.write(f"{math.log10(p) if p else -99:.6f}\t{' '.join(gram)}{backoff}\n")
        file.write("\n\\end\\\n")
    return [len(x) for x in sections]


def make(args):
    outputs.check(args.file, args.sources, option="")
    settings = config.Config(**{name: x for name, x in vars(args).items() if name in OPTIONS})
    normalize, report = texts.normalizer(settings.normalize, settings.lower), Report()
    columns = settings.audio_column, settings.text_column
    sentences = [words for path in args.sources for words in sentences_of(path, normalize, report, columns)]
    print(*report.lines(), sep="\n", end="\n" * bool(report.names), file=sys.stderr)
    if not sentences:
        raise UserError("the sources have no words")
    sizes = write(args.file, *estimate(sentences, args.order))
    print(f"{args.file}: {len(sentences)} sentences, " + ", ".join(f"{x} {n}-grams" for n, x in enumerate(sizes, 1)))
    return 0


def add_command(commands):
    parser = commands.add_parser("ngram", help="make a word n-gram of texts")
    parser.add_argument("file", type=Path, metavar="FILE", help="to write, in ARPA format")
    help = "manifest, LibriSpeech-like folder, or .txt with a sentence a line"
    parser.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help=help)
    parser.add_argument("--order", type=positive, default=3, metavar="N", help="(%(default)s)")
    config.add_options(parser, OPTIONS)
    parser.set_defaults(run=make)
