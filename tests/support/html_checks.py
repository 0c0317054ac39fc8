"""What HTML of a model's text may have: a few elements and attributes, and links that lead to other pages only."""

from html.parser import HTMLParser

MATH = "math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd"
TAGS = set(
    f"p em strong del a code pre h2 h3 h4 h5 h6 ul ol li blockquote br hr span figure figcaption div {MATH}".split()
)
TAGS |= set("table thead tbody tr th td mstyle mpadded menclose mphantom".split())
ATTRIBUTES = set(
    "class start tabindex role aria-label href title target rel display mathvariant stretchy fence form accent minsize"
    " maxsize linethickness displaystyle scriptlevel rowspacing columnspacing width height depth lspace"
    " rspace voffset notation linebreak mathcolor mathsize separator".split()
)
EMPTY = {"br", "hr"}


class Checked(HTMLParser):
    """Reads a block: ``text`` and ``links`` of it; AssertionError where something is not known to be harmless."""

    def __init__(self, html):
        super().__init__()
        self.text, self.links, self.open = "", [], []
        self.feed(html)
        self.close()
        assert self.open == [], html

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, tag
        assert {name for name, _ in attributes} <= ATTRIBUTES, attributes
        for name, value in attributes:
            if name == "href":
                assert value.lower().startswith(("http://", "https://", "mailto:")), value
                self.links.append(value)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    handle_decl = handle_pi = unknown_decl = handle_comment
