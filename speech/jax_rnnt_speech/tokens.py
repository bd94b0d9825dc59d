"""Labels of texts: characters, subwords of sentencepiece, those of a pretrained model. All can be stored in JSON."""

import base64
import io
import json
import re

import sentencepiece

from jax_rnnt_speech.config import UserError

ENDS = "<EOU>", "<eou>"  # labels that end an utterance
SILENT = *ENDS, "<EOB>", "<eob>"  # labels that are no part of a word: NeMo marks the ends of interjections too


class Vocabulary:
    """Labels and what each writes, its `pieces`."""

    separator = " "  # between words
    unknown = None  # the label of what no other spells

    def labels(self):
        """What each label writes, for words and models of words."""
        return [None if i == self.unknown or x in SILENT else x for i, x in enumerate(self.pieces)]


class Characters(Vocabulary):
    def __init__(self, alphabet):
        self.pieces = list(alphabet)
        self.index = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text):
        """Labels of a text, or None if a character is not in the alphabet."""
        labels = [self.index.get(x) for x in text]
        return None if None in labels else labels

    def decode(self, labels):
        return "".join(self.pieces[i] for i in labels)

    def to_json(self):
        return {"alphabet": "".join(self.pieces)}


class Pieces(Vocabulary):
    """Subwords of a `tokenizer`."""

    separator = "▁"  # the first piece of a word begins with it

    def decode(self, labels):
        return self.tokenizer.decode(list(map(int, labels)))


class Subwords(Pieces):
    def __init__(self, model):
        self.model = model
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.unknown = self.tokenizer.unk_id()
        self.pieces = [self.tokenizer.id_to_piece(i) for i in range(self.tokenizer.get_piece_size())]

    def encode(self, text):
        """Labels of a text, or None if a character is in no subword."""
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
        try:
            self.tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises no narrower one
            raise UserError(f"tokenizer.json is no tokenizer: {error}") from None
        model = json.loads(text)["model"]
        unknown = model.get("unk_id", self.tokenizer.token_to_id(model.get("unk_token") or ""))
        self.text, self.unknown = text, unknown
        self.pieces = [self.tokenizer.id_to_token(i) or "" for i in range(count)]

    def encode(self, text):
        """Labels of a text, or None if the tokenizer does not know a part of it."""
        labels = self.tokenizer.encode(text, add_special_tokens=False).ids
        return None if self.unknown in labels or max(labels, default=0) >= len(self.pieces) else labels

    def to_json(self):
        return {"tokenizer": self.text, "count": len(self.pieces)}


class Numbers(Vocabulary):
    """Labels without a tokenizer: they are their own text, with spaces between them."""

    def __init__(self, count):
        self.pieces = [f" {i}" for i in range(count)]

    def encode(self, text):
        """The labels that a text names, or None if it names anything else."""
        words = text.split()
        known = all(x.isdecimal() and int(x) < len(self.pieces) for x in words)
        return [int(x) for x in words] if known else None

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


def train(config, texts):
    """The vocabulary of a configuration, from the training texts."""
    if config.tokens == "characters":
        return Characters(sorted(set(config.alphabet) or set().union(*texts)))
    model = io.BytesIO()
    options = dict(model_type="unigram", character_coverage=1.0, bos_id=-1, eos_id=-1, minloglevel=2)
    options |= dict(normalization_rule_name="identity", num_threads=1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, vocab_size=config.vocabulary, **options
        )
    except RuntimeError as error:
        limit = re.search(r"set it to a value <= (\d+)", str(error))
        reason = f"they have {limit[1]} subwords at most" if limit else str(error).splitlines()[-1].split(") ", 1)[-1]
        raise UserError(f"--vocabulary {config.vocabulary} does not suit the training texts: {reason}") from None
    return Subwords(model.getvalue())
