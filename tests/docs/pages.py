import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page):
    return str(page.relative_to(ROOT))


def links(text):
    """The targets of all links and pictures of a page, code left out."""
    text = _FENCED.sub("", text)
    return _LINK.findall(_CODE.sub("code", text))


def anchors(text):
    """The anchors that the headings of a page get, on the site and on GitHub."""
    return {_slug(heading) for heading in _HEADING.findall(_FENCED.sub("", text))}


def blocks(text):
    """The Python of a page, in order."""
    return _BLOCK.findall(text)


def _slug(heading):
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[\s]+", "-", plain)
