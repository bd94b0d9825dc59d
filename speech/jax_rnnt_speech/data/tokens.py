"""Labels of texts: characters, subwords of sentencepiece, those of a pretrained model. All can be stored in JSON."""

import base64
import functools
import io
import json
import re

import sentencepiece

from jax_rnnt_speech.system import UserError, as_user_error

ENDS = "<EOU>", "<eou>"  # labels that end an utterance
SILENT = *ENDS, "<EOB>", "<eob>"  # labels that are no part of a word: NeMo marks the ends of interjections too

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a piece that is a byte


@functools.cache
def characters_of_bytes():
    """Returns {character: byte} of byte-level tokenizers (Radford et al. 2019), which keep printable bytes."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [x for x in range(256) if x not in printed]
    return {chr(x): x for x in printed} | {chr(256 + i): x for i, x in enumerate(others)}


def bytes_of(piece):
    """Returns the bytes that a tokenizer's piece writes, in `Vocabulary.texts`: <0xC3>, or a character for each."""
    values, number = characters_of_bytes(), BYTE.fullmatch(piece)
    if not number and not {*piece} <= values.keys():
        return piece
    return (bytes.fromhex(number[1]) if number else bytes(map(values.get, piece))).decode("utf-8", "surrogateescape")


# Control characters and ends of lines become spaces, as no format has them in a text. A byte order mark is dropped.
CONTROLS = dict.fromkeys([*range(32), *range(127, 160), 0x2028, 0x2029], " ") | {0xFEFF: ""}


class Labels(list):
    """The texts of a vocabulary's labels; its `decode` writes several labels."""

    def __init__(self, texts, decode):
        super().__init__(texts)
        self.decode = decode


class Vocabulary:
    """Labels and their names, the `pieces`. `decode` is the one spelling of labels."""

    separator = " "  # between words, in `texts`
    unknown = None  # the label of text that no other spells

    @property
    def texts(self):
        """The characters that each label adds to a text, "" for nothing.

        Bytes that are parts of characters are surrogate escapes, as in `bytes.decode("utf-8", "surrogateescape")`.
        """
        return self.pieces

    @functools.cached_property
    def labels(self):
        """The text of each label, for words and models of words; None for nothing, or for the text of another label."""
        texts, first = [None if i == self.unknown or x in SILENT else x for i, x in enumerate(self.texts)], {}
        for i in sorted(range(len(texts)), key=lambda i: BYTE.fullmatch(self.pieces[i]) is not None):
            first.setdefault(texts[i], i)
        return Labels([x if x and first[x] == i else None for i, x in enumerate(texts)], self.decode)

    @functools.cached_property
    def separates(self):
        """True if there are spaces in texts."""
        return any(map(str.isspace, self.decode(range(len(self.pieces)))))


class Characters(Vocabulary):
    def __init__(self, alphabet):
        self.pieces = list(alphabet)
        self.index = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text):
        """Returns the labels of a text, or None if a character is not in the alphabet."""
        labels = [self.index.get(x) for x in text]
        return None if None in labels else labels

    def decode(self, labels):
        return "".join(self.pieces[i] for i in labels)

    def to_json(self):
        return {"alphabet": "".join(self.pieces)}


class Pieces(Vocabulary):
    """Subwords of a `tokenizer`."""

    separator = "▁"  # the first piece of a word begins with it

    @functools.cached_property
    def silent(self):
        return {i for i, x in enumerate(self.pieces) if x in SILENT}

    def decode(self, labels):
        return self.tokenizer.decode([x for x in map(int, labels) if x not in self.silent]).translate(CONTROLS)

    @functools.cached_property
    def texts(self):
        """The text that each label adds behind another one, as a text begins without a space."""
        first = next(([i] for i in range(len(self.pieces)) if self.decode([i]).isalnum()), [])
        before = self.decode(first)

        def text(i):
            both = self.decode([*first, i])
            added = both.removeprefix(before) if both.startswith(before) else self.decode([i])
            return (bytes_of(self.pieces[i]) if "\ufffd" in added else added).replace(" ", self.separator)

        return [text(i) for i in range(len(self.pieces))]


class Subwords(Pieces):
    def __init__(self, model):
        self.model = model
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.unknown = self.tokenizer.unk_id()
        self.pieces = [self.tokenizer.id_to_piece(i) for i in range(self.tokenizer.get_piece_size())]

    def encode(self, text):
        """Returns the labels of a text, or None if a character is in no subword."""
        labels = self.tokenizer.encode(text)
        return None if self.unknown in labels else labels

    def to_json(self):
        return {"sentencepiece": base64.b64encode(self.model).decode()}


class Pretrained(Pieces):
    """The labels of a tokenizer.json of Hugging Face."""

    def __init__(self, text, count):
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise UserError("the model has a tokenizer.json, which needs: pip install tokenizers") from None
        with as_user_error("tokenizer.json is no tokenizer", Exception):  # tokenizers raises no narrower one
            self.tokenizer = Tokenizer.from_str(text)
        model = json.loads(text)["model"]
        unknown = model.get("unk_id", self.tokenizer.token_to_id(model.get("unk_token") or ""))
        self.text, self.unknown = text, unknown
        self.pieces = [self.tokenizer.id_to_token(i) or "" for i in range(count)]

    def encode(self, text):
        """Returns the labels of a text, or None if the tokenizer does not know a part of it."""
        labels = self.tokenizer.encode(text, add_special_tokens=False).ids
        return None if self.unknown in labels or max(labels, default=0) >= len(self.pieces) else labels

    def to_json(self):
        return {"tokenizer": self.text, "count": len(self.pieces)}


class Numbers(Vocabulary):
    """Labels without a tokenizer: they are their own text, with spaces between them."""

    def __init__(self, count):
        self.pieces = [f" {i}" for i in range(count)]

    def encode(self, text):
        """Returns the labels that a text names, or None if it names anything else."""
        words = text.split()
        valid = all(x.isdecimal() and int(x) < len(self.pieces) for x in words)
        return [int(x) for x in words] if valid else None

    def decode(self, labels):
        return " ".join(str(int(i)) for i in labels)

    def to_json(self):
        return {"count": len(self.pieces)}


def from_json(stored):
    if "alphabet" in stored:
        return Characters(stored["alphabet"])
    if "tokenizer" in stored:
        return Pretrained(stored["tokenizer"], stored["count"])
    if "count" in stored:
        return Numbers(stored["count"])
    return Subwords(base64.b64decode(stored["sentencepiece"]))


def train(options, texts):
    """Makes the vocabulary of a `config.Head`, from the training texts."""
    if options.tokens == "characters":
        return Characters(sorted(set(options.alphabet) or set().union(*texts)))
    model = io.BytesIO()
    usual = dict(model_type="unigram", character_coverage=1.0, bos_id=-1, eos_id=-1, minloglevel=2)
    usual |= dict(normalization_rule_name="identity", num_threads=1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, vocab_size=options.vocabulary, **usual
        )
    except RuntimeError as error:
        limit = re.search(r"set it to a value <= (\d+)", str(error))
        reason = f"they have {limit[1]} subwords at most" if limit else str(error).splitlines()[-1].split(") ", 1)[-1]
        raise UserError(f"--vocabulary {options.vocabulary} does not suit the training texts: {reason}") from None
    return Subwords(model.getvalue())
