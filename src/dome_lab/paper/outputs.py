"""Files that a command may replace: those that it wrote itself, and no others."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

PAGE = b"Page written by dome"  # at the end of every report
_DRAWN_BY = b"atplotlib"  # in every PNG and PDF of ours


def check_own(
    path: Path, is_own: Callable[[bytes], bool], *, way_out: str = ""
) -> None:
    """Refuse to replace a file that a command did not write.

    Args:
        path: What is about to be written.
        is_own: Tells by the content of a file.
        way_out: What else the user may do, in words.
    """
    if path.exists() and not is_own(path.read_bytes()):
        raise ValueError(
            f"{path} was not written by dome: move it away, or name another place"
            f"{way_out}"
        )


def check_apart(path: Path, sources: Iterable[Path]) -> None:
    """Refuse to replace what is read, by whatever name."""
    for source in sources:
        if path.exists() and source.exists() and path.samefile(source):
            raise ValueError(
                f"--out {path} is what the page is made of: name another file"
            )


def is_page(content: bytes) -> bool:
    """Whether a file is a report."""
    return PAGE in content


def is_picture(content: bytes) -> bool:
    """Whether a file is a figure that was drawn."""
    return _DRAWN_BY in content


def is_noted(content: bytes) -> bool:
    """Whether a file is what is noted beside rows; a damaged one may be replaced."""
    try:
        facts = json.loads(content)
    except ValueError:
        return True
    return isinstance(facts, dict) and isinstance(facts.get("made_with"), list)


def is_claims(content: bytes) -> bool:
    """Whether a file is a list of verdicts."""
    try:
        claims = json.loads(content)
    except ValueError:
        return False
    return isinstance(claims, list) and all(
        isinstance(claim, dict) and "verdict" in claim for claim in claims
    )


def is_answer(content: bytes) -> bool:
    """Whether a file has the numbers of ``dome bench``."""
    try:
        facts = json.loads(content)
    except ValueError:
        return False
    return isinstance(facts, dict) and {"question", "machine", "rows"} <= facts.keys()
