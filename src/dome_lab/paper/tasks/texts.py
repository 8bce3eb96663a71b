"""Text data sets as word numbers: DBPedia-Classes, and a made one without a download.

Words are runs of letters and digits, in lower case. A text is [CLS], then its first
words, then padding; a word outside the vocabulary is [UNK].
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dome_lab.paper.tasks.hub import Rows, Source, load_splits
from dome_lab.paper.tasks.selection import Selection, Task

PADDING, UNKNOWN, CLS = range(3)  # word numbers before those of the words
NUM_SPECIAL = 3
LENGTH = 64  # word numbers in a text, [CLS] included
PIECE = 32  # in a piece of texts whose next words are to be told

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


# The middle one of its three levels of classes: 70 of them.
DBPEDIA = Source(name="DeveloperOats/DBPedia_Classes", inputs="text", labels="l2")

MADE_TOPICS = (
    "river bridge water boat bank flow stone shore",
    "piano song singer album band stage voice chord",
    "goal team league match coach season player cup",
    "leaf root flower seed forest bloom petal bark",
)
MADE_COMMON = "the a of in and with by is was from near old new first known called"
NUM_MADE_TRAIN, NUM_MADE_TEST = 160, 40


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts with their classes.

    Attributes:
        texts: N texts; None is an empty one.
        labels: Their classes, shape (N,), int64.
    """

    texts: Sequence[str | None]
    labels: Tensor


def load_dbpedia(
    selection: Selection,
    folder: Path | None,
    vocabulary_size: int,
    *,
    next_word: bool = False,
) -> Task:
    """DBPedia-Classes with the 70 classes of its second level, in order of their names.

    Args:
        selection: How much of it.
        folder: The folder of data sets; None takes the Hub.
        vocabulary_size: Most word numbers; decides how many parameters a network has.
        next_word: Not classes are to be told but the next word, everywhere.
    """
    train, test = load_splits(DBPEDIA, folder)
    names = _names(train, DBPEDIA.train)
    classes = {name: number for number, name in enumerate(sorted(set(names)))}
    make = next_word_task if next_word else text_task
    return make(
        "dbpedia_words" if next_word else "dbpedia",
        _texts(train, DBPEDIA.train, names, classes),
        _texts(test, DBPEDIA.test, _names(test, DBPEDIA.test), classes),
        selection,
        vocabulary_size,
    )


def made_text(selection: Selection, *, next_word: bool = False) -> Task:
    """Two hundred short texts of four topics, for tests and trials."""
    rng = torch.Generator().manual_seed(0)
    topics = [topic.split() for topic in MADE_TOPICS]
    common = MADE_COMMON.split()

    def draw(num_texts: int) -> Texts:
        labels = torch.arange(num_texts) % len(topics)
        texts = []
        for label in labels.tolist():
            length = int(torch.randint(6, 15, (), generator=rng))
            choices = common + topics[label]
            picks = torch.randint(len(choices), (length,), generator=rng)
            texts.append(" ".join(choices[pick] for pick in picks.tolist()))
        return Texts(texts, labels)

    train, test = draw(NUM_MADE_TRAIN), draw(NUM_MADE_TEST)
    if next_word:
        return next_word_task("made_words", train, test, selection, 100)
    return text_task("made_text", train, test, selection, vocabulary_size=100)


def text_task(
    name: str, train: Texts, test: Texts, selection: Selection, vocabulary_size: int
) -> Task:
    """The selected texts as word numbers; the vocabulary is that of the training ones.

    Args:
        name: Of the task.
        train: All training texts.
        test: All test texts.
        selection: How much of them.
        vocabulary_size: Most word numbers.
    """
    num_classes = int(train.labels.max()) + 1
    if selection.validation:
        test = train
    train_places, test_places, num_classes = selection.choose(
        name, train.labels, test.labels, num_classes
    )
    train_words = [split_words(train.texts[i]) for i in train_places.tolist()]
    test_words = [split_words(test.texts[i]) for i in test_places.tolist()]
    vocabulary = build_vocabulary(train_words, vocabulary_size)
    return Task(
        name,
        encode(train_words, vocabulary),
        train.labels[train_places],
        encode(test_words, vocabulary),
        test.labels[test_places],
        num_classes,
        vocabulary_size=NUM_SPECIAL + len(vocabulary),
    )


def next_word_task(
    name: str, train: Texts, test: Texts, selection: Selection, vocabulary_size: int
) -> Task:
    """The words of the selected texts one after the other, in pieces of equal length.

    Each text begins with [CLS]. Inputs are the words of a piece, (N, ``PIECE``), and
    targets those one place further on; words without a place in a piece are left out.
    """
    texts = text_task(name, train, test, selection, vocabulary_size)
    pieces = [_pieces(x) for x in (texts.train_x, texts.test_x)]
    (train_x, train_y), (test_x, test_y) = pieces
    size = int(texts.vocabulary_size or 0)
    return Task(name, train_x, train_y, test_x, test_y, size, vocabulary_size=size)


def _pieces(texts: Tensor) -> tuple[Tensor, Tensor]:
    words = texts[texts != PADDING]
    num = (len(words) - 1) // PIECE
    x, y = (words[first : first + num * PIECE] for first in (0, 1))
    return x.view(num, PIECE), y.view(num, PIECE)


def _names(rows: Rows, split: str) -> list[str]:
    names = list(rows[DBPEDIA.labels])
    for row, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"{DBPEDIA.name}, split {split!r}: {DBPEDIA.labels!r} of row {row} is "
                f"{name!r}: every text needs a class"
            )
    return names


def _texts(rows: Rows, split: str, names: list[str], classes: dict[str, int]) -> Texts:
    unknown = sorted(set(names) - classes.keys())
    if unknown:
        raise ValueError(
            f"{DBPEDIA.name}, split {split!r}: class {unknown[0]!r} is not in the "
            "training split: give both splits the same classes"
        )
    texts = list(rows[DBPEDIA.inputs])
    for row, text in enumerate(texts):
        if not isinstance(text, str | None):
            raise ValueError(
                f"{DBPEDIA.name}, split {split!r}: {DBPEDIA.inputs!r} of row {row} is "
                f"{text!r}, not a text"
            )
    return Texts(texts, torch.tensor([classes[name] for name in names]))
