r"""Markdown extension that draws formulas as MathML while the site is built.

Browsers draw MathML without a script. ``pymdownx.arithmatex`` marks what stands between
dollars; here it becomes ``<math>``. An equation with ``\tag{9}`` gets its number on the
right and the anchor ``eq-9``.
"""

import html
import re

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_LETTER = re.compile(r'<mi mathvariant="(double-struck|script)">(\w)</mi>')
_TAG = re.compile(r"\\tag\{(\w+)\}")
# Browsers ignore the variants of MathML, all but "normal": the letters themselves.
_LETTERS = {
    ("double-struck", "E"): "\N{MATHEMATICAL DOUBLE-STRUCK CAPITAL E}",
    ("script", "L"): "\N{SCRIPT CAPITAL L}",
    ("script", "N"): "\N{MATHEMATICAL SCRIPT CAPITAL N}",
}


class MathsExtension(Extension):
    """Runs after arithmatex has put its marks into the page."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (Markdown's name)
        """Register the postprocessor behind all others."""
        md.postprocessors.register(_Drawn(md), "maths", -10)


class _Drawn(Postprocessor):
    """The HTML of a page with its formulas drawn."""

    def run(self, text: str) -> str:
        """Replace every marked formula."""
        return _INLINE.sub(_inline, _DISPLAY.sub(_display, text))


def makeExtension(**_: object) -> MathsExtension:  # noqa: N802 (Markdown's name)
    """What Markdown calls to load this module."""
    return MathsExtension()


def _inline(found: re.Match[str]) -> str:
    return _mathml(_latex(found[1]), "inline")


def _display(found: re.Match[str]) -> str:
    latex = _latex(found[1])
    numbers = _TAG.findall(latex)
    drawn = _mathml(_TAG.sub("", latex), "block")
    name = f' id="eq-{numbers[0]}"' if numbers else ""
    number = f'<span class="number">({numbers[0]})</span>' if numbers else ""
    return f'<div class="equation"{name}>{drawn}{number}</div>'


def _mathml(latex: str, display: str) -> str:
    return _LETTER.sub(_letter, convert(latex, display=display))


def _letter(found: re.Match[str]) -> str:
    return f'<mi mathvariant="normal">{_LETTERS[found[1], found[2]]}</mi>'


def _latex(text: str) -> str:
    # The converter knows no \lVert and no \texttt with an underscore.
    latex = html.unescape(text)
    latex = latex.replace(r"\lVert", r"\|").replace(r"\rVert", r"\|")
    return latex.replace(r"\texttt", r"\mathrm")
