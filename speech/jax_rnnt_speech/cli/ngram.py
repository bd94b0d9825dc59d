"""Word n-grams of the texts of corpora.

    rnnt-speech ngram words.arpa FOLDER/train --lower

Witten and Bell's estimate (1991): an n-gram's context h gives the share types(h) / (count(h) + types(h)) to the shorter
context, where types(h) counts the words that follow it. Behind the empty context all words are equally probable, and
<unk> is one of them: a model that gives it more prefers any spelling to words that it knows.
"""

import collections
import math
import sys
from pathlib import Path

from jax_rnnt_speech.config import Config, command_line, options_of
from jax_rnnt_speech.config.options import positive
from jax_rnnt_speech.data import corpora, sources, texts
from jax_rnnt_speech.data.utterances import Report
from jax_rnnt_speech.system import outputs, refuse_if

OPTIONS = options_of("texts") - {"speaker_column"}


def estimate(sentences, order):
    """Returns probabilities of n-grams of each order, tuples of words, and the share that each context gives away."""
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
        by_gram = {}
        for gram, count in grams.items():
            context = gram[:-1]
            shorter = probabilities[n - 1][gram[1:]] if n else unknown
            by_gram[gram] = count / (totals[context] + types[context]) + shares[context] * shorter
        probabilities.append(by_gram)
    probabilities[0]["<unk>",] = shares[()] * unknown
    return probabilities, shares


def write(path, probabilities, shares):
    """Writes n-grams in ARPA format; returns how many there are of each order."""
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
    args.sources = [*map(Path, sources.once(args.sources))]
    sources.unmixed("", sources.listed([*map(str, args.sources)]), held_out=False)
    settings = Config.from_options(**command_line.given(args, OPTIONS))
    normalize, report = texts.normalizer(settings.texts.normalize, settings.texts.lower), Report()
    columns = settings.texts.columns[:2]
    sentences = [words for path in args.sources for words in corpora.sentences_of(path, normalize, report, columns)]
    print(*report.lines(), sep="\n", end="\n" * bool(report.names), file=sys.stderr)
    refuse_if(not sentences, "the sources have no words")
    sizes = write(args.file, *estimate(sentences, args.order))
    print(f"{args.file}: {len(sentences)} sentences, " + ", ".join(f"{x} {n}-grams" for n, x in enumerate(sizes, 1)))
    return 0


def arguments(parser):
    parser.add_argument("file", type=Path, metavar="FILE", help="file that is written, in ARPA format")
    about = "a manifest, a folder as LibriSpeech has them, or a .txt file with a sentence on each line"
    parser.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help=about)
    about = "words of the longest n-grams (%(default)s)"
    parser.add_argument("--order", type=positive, default=3, metavar="N", help=about)
    command_line.add_options(parser, OPTIONS)


COMMAND = "ngram", "make a word n-gram of texts", make, arguments
