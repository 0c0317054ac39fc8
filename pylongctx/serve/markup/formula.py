"""LaTeX as MathML: what latex2mathml makes of it, without anything that a page could follow or load."""

import re
from functools import lru_cache
from html import escape, unescape
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element

MAX_FORMULA = 2000  # characters; a longer formula is shown as it is written
TAGS = frozenset(
    "math mrow mi mn mo mtext ms mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts"
    " mprescripts none mtable mtr mtd mlabeledtr mstyle mpadded mphantom menclose merror".split()
)
ATTRIBUTES = frozenset(
    "display displaystyle scriptlevel mathvariant mathcolor mathsize stretchy fence form separator accent accentunder"
    " largeop movablelimits symmetric minsize maxsize linethickness rowspacing columnspacing columnlines"
    " rowlines notation width height depth lspace rspace voffset linebreak".split()
)
# latex2mathml takes these for identifiers, which have no space around them
OPERATORS = frozenset("\u00b1\u2022\u29f5~\u27c2\u27fa\u27f9")
VALUE = re.compile(r"[\w.+\-# ]{1,60}")


def as_html(latex: str, is_display: bool, written: str) -> str:
    """Return a formula as HTML; what does not parse is shown as it was written.

    Examples
    --------
    >>> as_html("x", False, "$x$")
    '<math display="inline"><mrow><mi>x</mi></mrow></math>'
    >>> as_html(r"\\frac", False, r"$\\frac$")
    '<code>$\\\\frac$</code>'
    """
    found = _convert(latex, is_display) if len(latex) <= MAX_FORMULA else None
    return f"<code>{escape(written)}</code>" if found is None else found


@lru_cache(4096)
def _convert(latex: str, is_display: bool) -> str | None:
    try:
        element = convert_to_element(latex, display="block" if is_display else "inline")
        return "".join(_written(element))
    except Exception:  # it raises IndexError, KeyError, RecursionError and more than its own
        return None


def _written(element: Element) -> list[str]:
    """Return the pieces of an element as HTML."""
    if element.tag not in TAGS:
        raise ValueError(f"{element.tag} is not known to be harmless")
    tag = "mo" if element.tag == "mi" and unescape(element.text or "") in OPERATORS else element.tag
    known = [(name, value) for name, value in element.items() if name in ATTRIBUTES and VALUE.fullmatch(value)]
    if element.get("columnalign") in ("left", "right"):  # browsers go by styles
        known.append(("class", element.attrib["columnalign"]))
    attributes = "".join(f' {name}="{escape(value)}"' for name, value in known)
    parts = [f"<{tag}{attributes}>", escape(unescape(element.text or ""))]
    for child in element:
        parts += _written(child)
    return [*parts, f"</{tag}>"]
