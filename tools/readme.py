"""Build hook: the README that an index page shows.

An index page has no files next to it, so links to files of the repository lead nowhere
there. With ``Source`` in ``[project.urls]`` they become absolute. Without it a picture
is left out, and a link becomes its text with the file's name.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)\n*")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """What hatchling calls before it writes the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description of the distribution."""
        source = metadata.get("urls", {}).get("Source")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_index(text, source),
        }


def for_index(text: str, source: str | None) -> str:
    """README.md with no relative links.

    Args:
        text: README.md.
        source: Address of the repository, if it has a public one.
    """

    def picture(found: re.Match[str]) -> str:
        words, target = found.groups()
        if _absolute(target):
            return found[0]
        return f"![{words}]({source}/raw/main/{target})\n\n" if source else ""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        if _absolute(target):
            return found[0]
        if source:
            return f"[{words}]({source}/blob/main/{target})"
        return f"{words} (`{target.partition('#')[0]}`)"

    return _LINK.sub(link, _PICTURE.sub(picture, text))


def _absolute(target: str) -> bool:
    return target.startswith(("https://", "mailto:"))
