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
_TAG = re.compile(r"\\tag\{(\w+)\}")


def on_page_content(content: str, **_: Any) -> str:  # noqa: ANN401 - mkdocs gives more
    """The HTML of a page, with its formulas drawn."""
    return _INLINE.sub(_inline, _DISPLAY.sub(_display, content))


def _inline(found: re.Match[str]) -> str:
    return convert(_latex(found[1]))


def _display(found: re.Match[str]) -> str:
    latex = _latex(found[1])
    numbers = _TAG.findall(latex)
    drawn = convert(_TAG.sub("", latex), display="block")
    name = f' id="eq-{numbers[0]}"' if numbers else ""
    number = f'<span class="number">({numbers[0]})</span>' if numbers else ""
    return f'<div class="equation"{name}>{drawn}{number}</div>'


def _latex(text: str) -> str:
    # The converter knows no \lVert and no \texttt with an underscore.
    latex = html.unescape(text)
    latex = latex.replace(r"\lVert", r"\|").replace(r"\rVert", r"\|")
    return latex.replace(r"\texttt", r"\mathrm")
