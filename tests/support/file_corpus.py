"""A corpus of small files of every kind, usual and odd ones, with the text of each or why it is refused.

``python tests/support/file_corpus.py`` prints the table of docs/files.md, and with a folder it writes the files there.
"""

import base64
import io
import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """A file: what it is, its bytes, and its text with notes, or the refusal."""

    name: str
    what: str
    data: Callable[[], bytes] | bytes
    text: str = ""
    notes: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def content(self) -> bytes:
        return self.data if isinstance(self.data, bytes) else self.data()


# ---- writers of files ----


def pdf(*pages: str) -> bytes:
    """Return a PDF with the operators of its pages, in Helvetica; an empty string is an empty page."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    kids = []
    for page in pages:
        stream = page.encode("latin-1")
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R /Resources << /Font << /F1 << "
            b"/Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding << /Type /Encoding /BaseEncoding "
            b"/WinAnsiEncoding /Differences [1 /fi] >> >> >> >> >>" % len(objects)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(kids))
    out, places = b"%PDF-1.4\n", []
    for i, one in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (i, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + trailer


def shown(lines: Iterable[str], x: int = 72, y: int = 720) -> str:
    """Return the operators of a PDF that show lines below each other."""
    return "".join(f"BT /F1 11 Tf {x} {y - 14 * i} Td ({line}) Tj ET\n" for i, line in enumerate(lines))


def zipped(parts: dict[str, str | bytes]) -> bytes:
    """Return a zip file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return out.getvalue()


CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)


def epub(chapters: dict[str, str | bytes | None], order: Iterable[str] = (), **more: str) -> bytes:
    """Return an EPUB: chapters by name, None for a missing one, in the order of the spine; ``more`` is in META-INF."""
    items = "".join(f'<item id="{name}" href="text%20of/{name}.xhtml"/>' for name in chapters)
    spine = "".join(f'<itemref idref="{name}"/>' for name in order or chapters)
    opf = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    parts = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER, "OEBPS/book.opf": opf}
    parts |= {f"META-INF/{name}.xml": data for name, data in more.items()}
    for name, body in chapters.items():
        if isinstance(body, str):
            body = f"<html><head><title>T</title><style>p {{}}</style></head><body>{body}</body></html>"
        if body is not None:
            parts[f"OEBPS/text of/{name}.xhtml"] = body
    return zipped(parts)


def encryption(name: str) -> str:
    """Return the list of what is encrypted in an EPUB."""
    return (
        '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><EncryptedData '
        'xmlns="http://www.w3.org/2001/04/xmlenc#"><CipherData><CipherReference '
        f'URI="OEBPS/{name}"/></CipherData></EncryptedData></encryption>'
    )


WORD = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing"'
)


def docx(body: str, prolog: str = "", **parts: str) -> bytes:
    """Return a Word document; ``parts`` are more parts in its folder."""
    found = {"[Content_Types].xml": "<Types/>"}
    found["word/document.xml"] = f"{prolog}<w:document {WORD}><w:body>{body}</w:body></w:document>"
    found |= {f"word/{name}.xml": f"<w:{name} {WORD}>{data}</w:{name}>" for name, data in parts.items()}
    return zipped(found)


def run(text: str, properties: str = "") -> str:
    """Return a run of a Word document."""
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def par(*runs: str) -> str:
    """Return a paragraph of a Word document."""
    return f"<w:p>{''.join(runs)}</w:p>"


OPEN = "".join(
    f' xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in ("office", "text", "table", "draw")
)


def open_document(kind: str, body: str) -> bytes:
    """Return an OpenDocument file."""
    svg = 'xmlns:svg="urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0"'
    content = f"<office:document-content{OPEN} {svg}><office:body>{body}</office:body></office:document-content>"
    return zipped({"mimetype": f"application/vnd.oasis.opendocument.{kind}", "content.xml": content})


# ---- files ----

RUSSIAN = "Вор спрятал ключ под ковром в библиотеке, а дворецкий всё видел.\n"
JAPANESE = "泥棒は図書館のカーペットの下に鍵を隠した。翌朝、主人は昨夜だれが来たのかと尋ねた。\n"
SIMPLIFIED = "小偷把钥匙藏在图书馆的地毯下面。第二天早上,主人问昨天晚上谁来过。\n"
TRADITIONAL = "小偷把鑰匙藏在圖書館的地毯下面。第二天早上,主人問昨天晚上誰來過。\n"
KOREAN = "도둑은 도서관 카펫 아래에 열쇠를 숨겼다. 다음 날 아침 주인은 누가 왔는지 물었다.\n"
POLISH = (
    "Złodziej schował klucz pod dywanem w bibliotece. Następnego dnia rano pan zapytał, kto ktoś przyszedł, śpiąc.\n"
)
GERMAN = "Die Größe der Straße beträgt sieben Kilometer, sagte der Bürgermeister. „Es ist schön hier“, meinte sie.\n"
FRENCH = "L'élève répondit à sa mère qu'il était déjà fatigué. Le café était fermé dès le début de l'été.\n"
XML = f'<?xml version="1.0" encoding="KOI8-R"?>\n<text>{RUSSIAN}</text>\n'

TEXTS = (
    Case("plain.txt", "UTF-8", RUSSIAN.encode(), RUSSIAN),
    Case("notepad.txt", "UTF-8 with a byte order mark and CRLF", b"\xef\xbb\xbfone\r\ntwo\r\n", "one\ntwo\n"),
    Case(
        "wrong-byte.txt",
        "UTF-8 with a wrong byte",
        RUSSIAN.encode() + b"\xff\n",
        RUSSIAN + "\ufffd\n",
        ("1 place is not UTF-8 and read as U+FFFD",),
    ),
    Case("unicode.txt", "UTF-16 with a byte order mark", GERMAN.encode("utf-16"), GERMAN),
    Case(
        "unmarked.txt",
        "UTF-16 without a byte order mark",
        GERMAN.encode("utf-16-le"),
        GERMAN,
        ("read as UTF-16, although it has no byte order mark",),
    ),
    Case(
        "big-endian.txt",
        "UTF-16, big-endian, Chinese, without a mark",
        SIMPLIFIED.encode("utf-16-be"),
        SIMPLIFIED,
        ("read as UTF-16, although it has no byte order mark",),
    ),
    Case("wide.txt", "UTF-32 with a byte order mark", RUSSIAN.encode("utf-32"), RUSSIAN),
    Case("western.txt", "Windows-1252", GERMAN.encode("cp1252"), GERMAN, ("read as Windows-1252, as it is not UTF-8",)),
    Case(
        "russian.txt", "Windows-1251", RUSSIAN.encode("cp1251"), RUSSIAN, ("read as Windows-1251, as it is not UTF-8",)
    ),
    Case("unix.txt", "KOI8-R", RUSSIAN.encode("koi8-r"), RUSSIAN, ("read as KOI8-R, as it is not UTF-8",)),
    Case(
        "japanese.txt", "Shift-JIS", JAPANESE.encode("shift_jis"), JAPANESE, ("read as Shift-JIS, as it is not UTF-8",)
    ),
    Case("chinese.txt", "GB18030", SIMPLIFIED.encode("gb18030"), SIMPLIFIED, ("read as GB18030, as it is not UTF-8",)),
    Case("taiwan.txt", "Big5", TRADITIONAL.encode("big5"), TRADITIONAL, ("read as Big5, as it is not UTF-8",)),
    Case("korean.txt", "EUC-KR", KOREAN.encode("euc_kr"), KOREAN, ("read as EUC-KR, as it is not UTF-8",)),
    Case("polish.txt", "ISO-8859-2", POLISH.encode("iso-8859-2"), POLISH, ("read as ISO-8859-2, as it is not UTF-8",)),
    Case(
        "old-mac.txt",
        "Mac Roman with CR",
        FRENCH.replace("\n", "\r").encode("mac_roman"),
        FRENCH,
        ("read as Mac Roman, as it is not UTF-8",),
    ),
    Case("feed.xml", "XML that declares KOI8-R, as it is", XML.encode("koi8-r"), XML),
    Case("notes.md", "Markdown, as it is", b"# Title\n\n- *one*\n", "# Title\n\n- *one*\n"),
    Case("code.py", "source code, as it is", b'page = "<html><p>"\n', 'page = "<html><p>"\n'),
    Case(
        "table.csv", "CSV that a spreadsheet writes", "name;age\r\nJosé;21\r\n".encode("utf-16"), "name;age\nJosé;21\n"
    ),
)

PAGE = """<!DOCTYPE html>
<html><head><title>The  house</title><style>p {color: red}</style><script>if (a < b) alert("x")</script></head>
<body><h1>Rooms</h1><p>Un<b>believ</b>able,<br>10<sup>6</sup> &eacute;t&eacute;s.<!-- no --></p>
<ul><li>hall<li>attic</ul><ol><li>enter<li>leave</ol><p hidden>not shown</p>
<table><tr><th>who<th>where</tr><tr><td></td><td><p>Emma</p></td></tr></table>
<img src="https://example.com/map.png" alt="a map"><![if !vml]>after<![endif]></body></html>"""
PAGE_TEXT = """The house

Rooms

Unbelievable,
10^6 étés.

- hall
- attic

1. enter
2. leave

who\twhere
\tEmma

[picture: a map]after"""
DECLARED = f'<html><head><meta charset="windows-1251"></head><body><p>{RUSSIAN.strip()}</p></body></html>'

PAGES = (
    Case("page.html", "markup, scripts, lists, a table, what is hidden", PAGE.encode(), PAGE_TEXT),
    Case("declared.html", "its own declaration of Windows-1251", DECLARED.encode("cp1251"), RUSSIAN.strip()),
    Case("stale.html", "UTF-8 that declares Windows-1251", DECLARED.encode(), RUSSIAN.strip()),
    Case(
        "wide.html",
        "UTF-16 without a mark that declares UTF-8",
        '<html><meta charset="utf-8"><p>one</p>'.encode("utf-16-be"),
        "one",
        ("read as UTF-16, although it has no byte order mark",),
    ),
    Case("part.htm", "a part of a page, by its name", b"<p>one <i>two</i></p>", "one two"),
    Case("deep.html", "20,000 elements inside each other", b"<html>" + b"<div>" * 20_000 + b"deep", "deep"),
    Case(
        "script.html", "nothing but a script", b"<html><script>go()</script></html>", refusal="has no text (HTML page)"
    ),
)

INLINE = (
    '<p><span class="initial">W</span>hen the <i>thief</i> came<a href="#n1"><sup>1</sup></a>, '
    '<ruby>漢<rt>かん</rt>字<rt>じ</rt></ruby> <img alt="a key"/></p><aside id="n1"><p>At night.</p></aside>'
)
INLINE_TEXT = "When the thief came[1], 漢字(かんじ) [picture: a key]\n\nAt night."
BOMB = b"<html>" + bytes(1 << 28)
DRM = "is protected by DRM (Adobe ADEPT): only the programs of its shop can read it; buy or borrow it without DRM, or "

BOOKS = (
    Case(
        "book.epub",
        "chapters in the order of the spine",
        epub({"b": "<p>two</p>", "a": "<p>one</p>"}, ["a", "b"]),
        "one\n\ntwo",
    ),
    Case("inline.epub", "initials, notes, ruby, alternative texts", epub({"a": INLINE}), INLINE_TEXT),
    Case("encoded.epub", "a chapter in UTF-16", epub({"a": "<html><p>Grüße</p></html>".encode("utf-16")}), "Grüße"),
    Case(
        "gaps.epub",
        "chapters that are missing",
        epub({"a": "<p>one</p>", "b": None}, ["a", "b", "c"]),
        "one",
        ("2 parts of the book are missing: b.xhtml, c",),
    ),
    Case(
        "fonts.epub",
        "fonts alone are encrypted",
        epub({"a": "<p>one</p>"}, encryption=encryption("fonts/a.otf")),
        "one",
    ),
    Case(
        "shop.epub",
        "DRM",
        epub({"a": b"\x81\x92"}, encryption=encryption("text of/a.xhtml"), rights="<rights/>"),
        refusal=DRM + "copy the text out of such a program",
    ),
    Case(
        "bomb.epub",
        "268,435,462 bytes when unpacked",
        lambda: epub({"a": BOMB}),
        refusal="unpacks to more than 268435456 bytes, and no more are read",
    ),
    Case(
        "cut.epub",
        "cut off",
        epub({"a": "<p>one</p>"})[:300],
        refusal="is a damaged zip file (File is not a zip file): copy or download it again",
    ),
)

# AES without a password to open it, and with one; compressed, in base 85
OWNER = (
    "c-oCrJBVaO6a_UZ5O*Wf3Y<h&>wD{i&EV`zH!kBc<Mg@)vS59CpUk{BzJAlpY_J%vXkaWXVrC`?2BIJcVyGfUf`aQt#wrMc^}2gL"
    "&<6JFpz74Q_uPB9RcpIjqi5N30<Hb};M*S%!xT6E4Kx@aa^vJMVY2Bux8F<<*>#gN#k>&q(E2(`b?k|JC1B1&WV?z}{2CTLAKyY`"
    "vpK3e%r1nA{|xPg+El0uC2~E*%3W=aOD<YI#W>cMFEZ9$Ax^PeF!$25Ich^Gvd=gwr;7!{a9Z@@ztoo(^j}K#q`Qp`?a!xOo7@4K"
    "eRFB{<y(KF-=Dtw&PPuizdXA4;luCROP`E?`s@4gliT<1U;g9aZ?B&`y1_qv>aoe6U;Xm-XOCQa@XwVW?_YWI{m<Wf`~&^*&tH5!"
    "yL-5OeB*`Z-+iXnU8Y`E04omkRU<M!^4)yfgA9?YZkp!(kQdYbEOk|Ihz#q{#HyZP@@iFY)YIw|xX_}yAaD~y@d&H4W;vAgE|%O%"
    "t2DQ~cvbCpsl{a6xjMQwBC>-AB54-2&74ZFz3@r%;A2)i1je-!5HgKgC;@^8MFT`CE!D;bDYG*kROF63DFQ$O<063P#yjdL@W9zR"
    "BCp_q%|*fp8-oi}s-CQT1{YIuV5~DC>X4(=E>Ul|2kI45jw<J^2vLS;gZGe`DQUA&hUct>49uvcDbS*_Ihqf|xQolx#!+{BIO~Uv"
    "Y&Bu$Fx5TjIwl*#@lA1Nl;F$3DWL}=yhzY*+VjoM5D%Eul1avSEN;rIwTqlPpG3B@SR)k&0pL6&%C$FHm-b6c^bxetN%lsRG)igZ"
    "d7{)vnnG08Dw_;|1)D^12N+0gOKz|-su+?BJ~&6I$Xp9;N}Ao&9+Yd4i%ym~1sk~n1%ZMv8k9^$A@qXhqjKD)j40NKp8c?bQZUZ="
    "3}a<t=O^_!rsN97xLCnBuoX<0RZMDgj&-f8_ES5b-*I&(mGa15)0B5)apkXVm1kj~Y);M??HDhPMlNlz*7%&gD*X$){(mU9<~OQ6"
    "Iqa}HeJ-Y*YrDBIjEeF^t_^oa=wCVcb7="
)
USER = (
    "c-oCqy=xRf6jz(zG&TwmET-@Z3o{=(GrNn&VRE^{kA#Gr#)t$nyE}7Px$MT>y^ts(Scs*FtyownwswL9^bbg(A}Ithg{5F40a0gn"
    "FS&!WaCcee{oe0=&#TN%Hcyi=3sk=DY`q5rVi<cjK(z|crHxeuQC()T6So1Hm2H(mY6x?nRs$*uav~ivD0l!}41*M2gI3OmivZQ*"
    "Zj?bXU~2u-G!K+0LoFkrX%&QWB3?JXuz3Zc&~|C*G0F@vg{)-GsWk2;zDY9o*fiSmKp@{sy8L?a*+Bd$6}7Wv=-^zRW{Hw3VE54W"
    "=<Scs8mC^pd3bPS;p8`X!P@?F^~-^uBkRX+{vK=HUwXH@wKH|>#o-5=&Yjl_AHMHCzW#iZ-8*yk>5)&Lf22pBoLHK8RR1O3j=p4f"
    "^SC|Ny$twJ2lA`|YIVJ=5Oa_KG$B(})Pv5c&YH?XUjo#K{5S}sHbhs#Xgo^8Jz$_jF%V!LGSj2{*DID#$21!<>M~c@)TO3ZVJA}w"
    "M6FClflLB`W?&Tu9(Op`KDVgg!d155E*8Gjf+=RqCG#l`gmPV>1EpPIDc9rJ!P-^Wv1$NahE<Q-#CLF@8F2;ih-Y!^QJ-pCdlpd^"
    "bv(@!S4`R5k&Fn2v5|$=T4I77<E7p#2HMJk-f6s>EjQNk%Yr6je`ZxhIcXZA@kVQ&_6rrg!5h<+CM+G~Lb5OPTehAk4KTC;-hZIr"
    "+~QEfeT<mN6`H7z2{wcgY7JqOlOfD<hB0P4eJo34*ilI_$5wbtne@<H9GiVAum1T-vmR9syJjj<Q7r`Xh>}_hj|rPd-x6Hfwf~_k"
    "7B?%|Sk0i=TbneKNmew*b~vb18Z%As7iY*Xng"
)
LEFT = [f"left line {i} of a text that goes on" for i in range(5)]
RIGHT = [f"right line {i} of another text, which" for i in range(5)]
ROWS = "".join(shown([LEFT[i]], 72, 720 - 14 * i) + shown([RIGHT[i]], 330, 720 - 14 * i) for i in range(5))
LINES = [
    "It is of\\001cial: the thief re-",
    "turned, as the well-known",
    "Mr. Smith saw. A well-",
    "known key of Anna-",
    "Lena",
]


def compressed(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


PDFS = (
    Case(
        "paper.pdf",
        "two lines",
        pdf(shown(["The butler hid the letter", "behind the clock."])),
        "The butler hid the letter\nbehind the clock.",
    ),
    Case(
        "divided.pdf",
        "ligatures, and words that lines divide",
        pdf(shown(LINES)),
        "It is official: the thief returned, as the well-known\nMr. Smith saw. A well-known key of Anna-Lena",
    ),
    Case("columns.pdf", "two columns that are drawn line by line", pdf(ROWS), "\n".join(LEFT + RIGHT)),
    Case("owner.pdf", "AES, which opens without a password", compressed(OWNER), "The butler hid the letter."),
    Case(
        "secret.pdf",
        "AES with a password",
        compressed(USER),
        refusal="is protected with a password: save it without one, for instance with qpdf --decrypt",
    ),
    Case(
        "scanned.pdf",
        "pages that are pictures",
        pdf(shown(["one"]), "", ""),
        "one",
        ("2 of 3 pages have no text (page 2, 3): they may be pictures, which OCR can read",),
    ),
    Case(
        "picture.pdf",
        "nothing but pictures",
        pdf(""),
        refusal="has no text, only images: run OCR on it first, for instance with ocrmypdf",
    ),
    Case("cut.pdf", "cut off", pdf(shown(["one"]))[:60], refusal="is a damaged PDF: copy or download it again"),
)

LETTER = "".join(
    (
        par(run("Un"), run("believ", "<w:b/>"), run("able"), '<w:r><w:footnoteReference w:id="5"/></w:r>'),
        par("<w:del>", "<w:r><w:delText>old</w:delText></w:r>", "</w:del><w:ins>", run("new"), "</w:ins>"),
        par("<w:pPr><w:tabs><w:tab/></w:tabs><w:numPr><w:numId w:val='1'/></w:numPr></w:pPr>", run("item")),
        par(run("hidden", "<w:vanish/>"), "<m:oMath><m:r><m:t>E=mc</m:t></m:r></m:oMath>"),
        f"<w:tbl><w:tr><w:tc>{par(run('who'))}</w:tc><w:tc>{par(run('where'))}</w:tc></w:tr>"
        f"<w:tr><w:tc>{par()}</w:tc><w:tc>{par(run('hall'))}</w:tc></w:tr></w:tbl>",
        par(
            "<w:r><mc:AlternateContent><mc:Choice><wp:docPr descr='a map'/>",
            par(run("in a box")),
            "</mc:Choice><mc:Fallback>",
            par(run("in a box")),
            "</mc:Fallback></mc:AlternateContent></w:r>",
        ),
        par(
            "<w:r><w:ruby><w:rt>",
            run("かんじ"),
            "</w:rt><w:rubyBase>",
            run("漢字"),
            "</w:rubyBase></w:ruby></w:r>",
            "<w:r><w:commentReference w:id='1'/></w:r>",
        ),
    )
)
FOOTNOTES = "".join(
    f"<w:footnote w:id='{i}'>{par(run(text))}</w:footnote>" for i, text in ((-1, "separator"), (5, "A note."))
)
LETTER_TEXT = """Unbelievable[1]

new

- item

E=mc

who\twhere
\thall

[picture: a map]

in a box

漢字(かんじ)

[1] A note."""
ENTITIES = '<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
REPORT = """<office:text><text:tracked-changes><text:p>old</text:p></text:tracked-changes>
<text:h>Title</text:h><text:p>Un<text:span>believ</text:span>able<text:note
><text:note-citation>*</text:note-citation><text:note-body><text:p>A note.</text:p></text:note-body></text:note
>,<text:s text:c="900000000"/>end</text:p>
<text:list><text:list-item><text:p>one</text:p></text:list-item><text:list-item><text:p>two</text:p></text:list-item>
</text:list><table:table><table:table-row><table:table-cell><text:p>who</text:p></table:table-cell><table:table-cell>
<text:p>where</text:p></table:table-cell></table:table-row></table:table><text:p><draw:frame><svg:desc>a map</svg:desc>
</draw:frame><office:annotation><text:p>hm</text:p></office:annotation></text:p></office:text>"""
REPORT_TEXT = f"""Title

Unbelievable[1],{" " * 64}end

- one
- two

who\twhere

[picture: a map]

[1] A note."""
RTF = (
    rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}Un{\b believ}able \'e9t\'e9 \u-10179?\u-8704?"
    rb"{\footnote Left out.}\par\trowd who\cell where\cell\row}"
)

OFFICE = (
    Case(
        "letter.docx",
        "notes, changes, tables, boxes, ruby, a comment",
        docx(LETTER, footnotes=FOOTNOTES),
        LETTER_TEXT,
        ("1 comment is left out",),
    ),
    Case(
        "entities.docx",
        "XML that expands",
        docx(par(run("&b;")), ENTITIES),
        refusal="declares the XML entity 'a', which no document needs: save it again with another program",
    ),
    Case(
        "deep.docx",
        "10,000 elements inside each other",
        docx("<w:p>" * 10_000 + run("deep") + "</w:p>" * 10_000),
        "deep",
    ),
    Case(
        "password.docx",
        "a password",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "EncryptedPackage".encode("utf-16-le"),
        refusal="is protected with a password: save it without one",
    ),
    Case(
        "old.doc",
        "an old Office program",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500),
        refusal="is a file of an old Office program: save it as DOCX, or as PDF",
    ),
    Case(
        "report.odt",
        "notes, lists, tables, a comment, 900,000,000 spaces",
        open_document("text", REPORT),
        REPORT_TEXT,
        ("1 comment is left out",),
    ),
    Case(
        "sheet.ods",
        "a spreadsheet",
        open_document("spreadsheet", ""),
        refusal="is a spreadsheet: export it as CSV first",
    ),
    Case(
        "sheet.xlsx",
        "a spreadsheet",
        zipped({"[Content_Types].xml": "", "xl/workbook.xml": ""}),
        refusal="is a spreadsheet: export it as CSV first",
    ),
    Case(
        "note.rtf",
        "code pages, Unicode, a table, a note",
        RTF,
        "Unbelievable été \U0001f600\nwho|where|\n",
        ("1 note left out",),
    ),
)

MAIL = (
    b"From: =?utf-8?q?Jos=C3=A9?= <jose@example.com>\r\nTo: ann@example.com\r\nSubject: The key\r\n"
    b"MIME-Version: 1.0\r\n"
    b"Content-Type: multipart/mixed; boundary=B\r\n\r\n--B\r\nContent-Type: text/plain; charset=windows-1252\r\n"
    b"Content-Transfer-Encoding: quoted-printable\r\n\r\nUnder the caf=E9=\r\n table.\r\n--B\r\n"
    b"Content-Type: application/pdf\r\nContent-Disposition: attachment; filename=map.pdf\r\n\r\nx\r\n--B--\r\n"
)
MBOX = (
    b"From ann@example.com Mon Jan  1 10:00:00 2024\nFrom: Ann\nSubject: One\n\nfirst\n>From here\n\n"
    b"From bob@example.com Mon Jan  1 11:00:00 2024\nFrom: Bob\nSubject: Two\n"
    b"Content-Type: text/html\n\n<p>sec<b>ond</b></p>\n"
)
SRT = (
    "1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>Who is</i>\r\nthere?\r\n\r\n"
    "2\r\n00:01:05,000 --> 00:01:06,000\r\n{\\an8}Anna.\r\n"
)
VTT = (
    "WEBVTT\n\nNOTE by Ann\n\nSTYLE\n::cue {color: red}\n\n00:01.000 --> 00:02.000 align:start\n"
    "<v Emma>Who &amp; why?\n\n"
    "intro\n00:03.000 --> 00:04.000\n<v Emma>Who &amp; why?\n<c.red>Anna.</c>\n"
)
CELLS = [
    {"cell_type": "markdown", "source": ["# Title\n", "text"]},
    {
        "cell_type": "code",
        "source": "1 + 1",
        "outputs": [
            {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
            {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}},
        ],
    },
]
NOTEBOOK = json.dumps({"cells": CELLS, "metadata": {"kernelspec": {"language": "python"}}, "nbformat": 4})

OTHERS = (
    Case(
        "mail.eml",
        "encoded headers, quoted-printable, an attachment",
        MAIL,
        "From: José <jose@example.com>\nTo: ann@example.com\nSubject: The key\n\nUnder the café table.",
        ("1 attachment left out: map.pdf",),
    ),
    Case(
        "archive.mbox",
        "two messages, one of them in HTML",
        MBOX,
        "From: Ann\nSubject: One\n\nfirst\nFrom here\n\nFrom: Bob\nSubject: Two\n\nsecond",
    ),
    Case("film.srt", "subtitles with styles", SRT.encode(), "[00:00:00] Who is\nthere?\n\n[00:01:00] Anna."),
    Case("talk.vtt", "speakers, notes, styles, repeated lines", VTT.encode(), "[00:00:00] Emma: Who & why?\nAnna."),
    Case(
        "work.ipynb",
        "a notebook with a picture",
        NOTEBOOK.encode(),
        "# Title\n\ntext\n\n```python\n1 + 1\n```\n\nOutput:\n2".replace("# Title\n\n", "# Title\n"),
        ("1 picture in outputs left out",),
    ),
    Case(
        "cut.ipynb",
        "a notebook that is cut off",
        NOTEBOOK[:-2].encode(),
        refusal="is a damaged notebook: save it again",
    ),
    Case(
        "photo.png",
        "a picture",
        b"\x89PNG\r\n\x1a\n" + bytes(9),
        refusal="is a picture: read its letters with OCR first, for instance with Tesseract",
    ),
    Case(
        "talk.mp3",
        "a recording",
        b"ID3\x04" + bytes(9),
        refusal="is a recording or a film: write down what is said first, for instance with Whisper",
    ),
    Case("notes.zip", "an archive", zipped({"a.txt": "a"}), refusal="is a compressed archive: unpack it first"),
    Case("notes.txt.gz", "an archive", b"\x1f\x8b\x08\x00", refusal="is a compressed archive: unpack it first"),
    Case(
        "book.mobi",
        "a Kindle book",
        bytes(60) + b"BOOKMOBI",
        refusal="is a Kindle book: convert it to EPUB first, for instance with Calibre",
    ),
    Case(
        "data.bin",
        "anything else that is binary",
        bytes(range(256)),
        refusal="is not a text file: it contains NUL bytes, so it is binary",
    ),
)

GROUPS = {
    "Text": TEXTS,
    "HTML": PAGES,
    "EPUB": BOOKS,
    "PDF": PDFS,
    "Word, OpenDocument, RTF": OFFICE,
    "E-mail, subtitles, notebooks, other": OTHERS,
}
CASES = [case for cases in GROUPS.values() for case in cases]


def table() -> str:
    """Return what becomes of every file, as a table in Markdown; tests/core/test_files.py reads them."""
    lines = ["| kind | file | what it has | result |", "|---|---|---|---|"]
    for kind, cases in GROUPS.items():
        lines += [f"| {kind} | `{case.name}` | {case.what} | {_result(case)} |" for case in cases]
    return "\n".join(lines) + "\n"


def _result(case: Case) -> str:
    return f"refused: {case.refusal}" if case.refusal else "; ".join(("read", *case.notes))


def main(folder: str = "") -> None:
    """Print the table, or write the files into a folder."""
    if not folder:
        print(table(), end="")
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for case in CASES:
        (Path(folder) / case.name).write_bytes(case.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
