r"""Formulas as MathML, made when the site is built: browsers draw it without a script.

arithmatex marks what stands between dollars; here it becomes ``<math>``. An equation
with ``\tag{9}`` gets its number on the right and the anchor ``eq-9``.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
_LETTER = re.compile(r'<mi mathvariant="(double-struck|script)">(\w)</mi>')
_TAG = re.compile(r"\\tag\{(\w+)\}")
# Browsers ignore the variants of MathML, all but "normal": the letters themselves.
_LETTERS = {
    ("double-struck", "E"): "\N{MATHEMATICAL DOUBLE-STRUCK CAPITAL E}",
    ("script", "L"): "\N{SCRIPT CAPITAL L}",
    ("script", "N"): "\N{MATHEMATICAL SCRIPT CAPITAL N}",
}


def on_page_content(content: str, **_: Any) -> str:  # noqa: ANN401 - mkdocs gives more
    """The HTML of a page, with its formulas drawn."""
    return _INLINE.sub(_inline, _DISPLAY.sub(_display, content))


def _inline(found: re.Match[str]) -> str:
    return _drawn(_latex(found[1]), "inline")


def _display(found: re.Match[str]) -> str:
    latex = _latex(found[1])
    numbers = _TAG.findall(latex)
    drawn = _drawn(_TAG.sub("", latex), "block")
    name = f' id="eq-{numbers[0]}"' if numbers else ""
    number = f'<span class="number">({numbers[0]})</span>' if numbers else ""
    return f'<div class="equation"{name}>{drawn}{number}</div>'


def _drawn(latex: str, display: str) -> str:
    return _LETTER.sub(_upright, convert(latex, display=display))


def _upright(found: re.Match[str]) -> str:
    return f'<mi mathvariant="normal">{_LETTERS[found[1], found[2]]}</mi>'


def _latex(text: str) -> str:
    # The converter knows no \lVert and no \texttt with an underscore.
    latex = html.unescape(text)
    latex = latex.replace(r"\lVert", r"\|").replace(r"\rVert", r"\|")
    return latex.replace(r"\texttt", r"\mathrm")
