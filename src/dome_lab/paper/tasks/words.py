"""Texts as word numbers, with a vocabulary of our own.

Words are runs of letters and digits, in lower case. A text is [CLS], then its first
words, then padding; a word outside the vocabulary is [UNK].
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

PADDING, UNKNOWN, CLS = range(3)  # word numbers before those of the words
NUM_SPECIAL = 3
LENGTH = 64  # word numbers in a text, [CLS] included

_WORD = re.compile(r"\w+")


def split_words(text: str | None) -> list[str]:
    """The words of a text that a network gets to see; none of an absent text."""
    return _WORD.findall((text or "").lower())[: LENGTH - 1]


def build_vocabulary(
    texts: Iterable[Sequence[str]], size: int, min_count: int = 2
) -> dict[str, int]:
    """Numbers of the most frequent words, from ``NUM_SPECIAL`` on.

    Args:
        texts: The words of each training text.
        size: Most numbers to give away, special ones included.
        min_count: Words that are rarer than this are left out.

    Returns:
        Words to numbers, the most frequent first, equals in alphabetical order.
    """
    counts = Counter(word for words in texts for word in words)
    frequent = [word for word, count in counts.items() if count >= min_count]
    frequent.sort(key=lambda word: (-counts[word], word))
    kept = frequent[: size - NUM_SPECIAL]
    return {word: NUM_SPECIAL + place for place, word in enumerate(kept)}


def encode(texts: Sequence[Sequence[str]], vocabulary: Mapping[str, int]) -> Tensor:
    """Word numbers of texts given as words, shape (N, ``LENGTH``), int64."""
    rows = []
    for words in texts:
        known = [CLS, *(vocabulary.get(word, UNKNOWN) for word in words)]
        rows.append(known + [PADDING] * (LENGTH - len(known)))
    return torch.tensor(rows)
