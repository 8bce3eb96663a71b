"""Pages that the contents name and that are not written yet are left out.

A misspelt name is noticed all the same: its page is then missing in the contents, which
a strict build refuses.
"""

from pathlib import Path
from typing import Any


def on_config(config: Any, **_: Any) -> Any:  # noqa: ANN401 - mkdocs' own mapping
    """The settings, with contents that exist."""
    config["nav"] = _written(config["nav"], Path(config["docs_dir"]))
    return config


def _written(entries: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    kept = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _written(target, folder)})
        elif (folder / target).exists():
            kept.append(entry)
    return kept
