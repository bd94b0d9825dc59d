"""Phrases that are written in several ways: in other cases, or by spellings of which one is put in the text.

A search prefers every spelling, as the labels of each are a phrase. `Written` then puts the wanted one in place of the
others: in texts, and in words, whose times it keeps or joins.
"""

import re

# Punctuation around a word that is no part of it.
AROUND = r"[^\w\s]*"


def cases(text):
    """Returns the text as is, in lower case, in capitals, with a capital for each word, and with one for the first."""
    words = " ".join(x[:1].upper() + x[1:].lower() for x in text.split())
    return [*dict.fromkeys((text, text.lower(), text.upper(), words, text[:1].upper() + text[1:]))]


class Written:
    """The text to write for each spelling. All are equal: they do not change the programs that a `Decoding` decides.

    Parameters
    ----------
    phrases
        The spellings of each phrase, the one to write first.
    normalize
        Turns a spelling into the text that the model writes.
    separates
        Whether there are spaces between words; a spelling is then replaced where it is whole words.
    exact
        Whether upper and lower case are distinguished.
    """

    def __init__(self, phrases=(), normalize=str, separates=True, exact=False):
        self.space, self.exact, self.table = " " * separates, exact, {}
        for spellings in phrases:
            for x in spellings:
                for y in (x, normalize(x)):
                    self.table.setdefault(self.key(y), spellings[0])
        self.table.pop("", None)
        self.begun = {x[:n] for x in self.table for n in range(1, len(x))}
        self.most = max(map(len, map(str.split, self.table) if separates else self.table), default=0)  # words
        gap = r"\s+" if separates else r"\s*"
        found = "|".join(gap.join(map(re.escape, x.split())) for x in sorted(self.table, key=len, reverse=True))
        pattern = rf"(?<!\S)({AROUND})({found})({AROUND})(?!\S)" if separates else f"()({found})()"
        self.pattern = re.compile(pattern, 0 if exact else re.IGNORECASE)

    def __eq__(self, other):
        return isinstance(other, Written)

    def __hash__(self):
        return 0

    def __bool__(self):
        return bool(self.table)

    def key(self, text):
        text = self.space.join(text.split())
        return text if self.exact else text.lower()

    def put(self, match):
        """Returns the text of a match of the pattern, with the text to write."""
        return match[1] + self.table.get(self.key(match[2]), match[2]) + match[3]

    def text(self, text):
        return self.pattern.sub(self.put, text) if self else text

    def spans(self, texts):
        """Yields (first word, the one behind the last, text to write) of each spelling among the texts of words."""
        begins, ends, place = {}, {}, 0  # words that begin and end at places of the joined text
        for i, x in enumerate(texts):
            begins[place], ends[place + len(x)] = i, i + 1
            place += len(x + self.space)
        for match in self.pattern.finditer(self.space.join(texts)) if self else ():
            first, last = begins.get(match.start()), ends.get(match.end())
            if first is not None and last is not None:
                yield first, last, self.put(match)

    def words(self, words):
        """Returns words as `timing.Interval`. As many words as before keep their times; others are joined to one."""
        done, result = 0, []
        for first, last, text in self.spans([x.text for x in words]):
            parts, some = text.split() if self.space else [text], words[first:last]
            result += words[done:first]
            if len(parts) == len(some):
                result += [x._replace(text=part) for x, part in zip(some, parts)]
            else:
                sure = [x.confidence for x in some]
                result.append(
                    some[0]._replace(end=some[-1].end, text=text, confidence=None if None in sure else min(sure))
                )
            done = last
        return result + words[done:]

    def held(self, texts):
        """Returns the words before which no text may end: they are within a spelling, or later words may show it."""
        inside = {i for first, last, _ in self.spans(texts) for i in range(first + 1, last)}
        for i in range(max(0, len(texts) - self.most), len(texts)):
            if self.key(self.space.join(texts[i:])).lstrip(",.;:!?¿¡\"'([") in self.begun:
                inside |= {*range(i + 1, len(texts) + 1)}
        return inside

    def settled(self, text):
        """Returns the text as it is written, up to the last word that later ones can change."""
        if not self:
            return text
        words = text.split() if self.space else list(text)
        held = self.held(words)
        last = next((i for i in reversed(range(len(words))) if i not in held), 0)
        return self.text(self.space.join(words[:last]))
