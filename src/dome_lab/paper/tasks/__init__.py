"""The data of the experiments: ``load_task`` and the table of tasks."""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from dome_lab.paper.tasks.hub import data_folder
from dome_lab.paper.tasks.images import IMAGE_SETS, digits, load_images
from dome_lab.paper.tasks.selection import Selection, Task
from dome_lab.paper.tasks.texts import load_dbpedia, made_text

__all__ = ["TASKS", "Task", "load_task"]

# A table of 8,000 words of width 64 keeps the gradients of 512 samples at 1.4 GB.
DBPEDIA_VOCABULARY = 8_000
WORDS_VOCABULARY = 1_000  # where each of them is an output at each place

TASKS: dict[str, Callable[[Selection, Path | None], Task]] = {
    "digits": lambda selection, _: digits(selection=selection),
    **{name: partial(load_images, name) for name in IMAGE_SETS},
    "dbpedia": partial(load_dbpedia, vocabulary_size=DBPEDIA_VOCABULARY),
    "dbpedia_words": partial(
        load_dbpedia, vocabulary_size=WORDS_VOCABULARY, next_word=True
    ),
    "made_text": lambda selection, _: made_text(selection),
    "made_words": lambda selection, _: made_text(selection, next_word=True),
}


def load_task(
    name: str,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    num_classes: int | None = None,
    validation: bool = False,
    data_dir: Path | None = None,
) -> Task:
    """A task by name; the last two are kept in memory, so do not change their tensors.

    Subsets have as many samples of each class as there are, and are the same ones for
    every caller.

    Args:
        name: Key of ``TASKS``.
        num_train: Training samples; None takes all.
        num_test: Test samples; None takes all.
        num_classes: Only the first so many classes; None takes all.
        validation: Test on training samples that are not among ``num_train``.
        data_dir: Folder of data sets as on the Hub; None takes that of the environment
            variable ``DOME_DATA``, and without one the Hub.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r}: choose from {', '.join(TASKS)}")
    selection = Selection(num_train, num_test, num_classes, validation)
    return _load(name, selection, data_folder(data_dir))


# Two: runs of two data sets often alternate. A large one takes gigabytes.
@lru_cache(maxsize=2)
def _load(name: str, selection: Selection, folder: Path | None) -> Task:
    return TASKS[name](selection, folder)
