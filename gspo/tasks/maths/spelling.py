"""One spelling for what is written in many: LaTeX, Markdown and Unicode become the few notations that ``reading`` knows.

Words of \\text{...} come out in quotation marks, so that the unit in ``5 \\text{ m}`` is told from the variable in ``5m``.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_CHARACTERS: Final = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **dict.fromkeys("\u00b7\u22c5\u2219", "\\cdot "),
    **dict.fromkeys("\u201c\u201d", '"'),
    "\u00d7": "\\times ", "\u00f7": "/", "\u2215": "/", "\u221a": "\\sqrt ", "\u221e": "\\infty ", "\u2264": "\\le ",
    "\u2265": "\\ge ", "\u2260": "\\ne ", "\u2248": "\\approx ", "\u00b0": "^\\circ ", "\u00b1": "\\pm ",
    "\u2213": "\\mp ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ",
    "\u2216": "\\setminus ", "\u211d": "\\mathbb{R}", "\u2124": "\\mathbb{Z}", "\u2115": "\\mathbb{N}",
    "\u2102": "\\mathbb{C}", "\u211a": "\\mathbb{Q}", "\u2220": "\\angle ", "\u2192": "\\to ", "\u2026": "...",
"\u221b": "\\sqrt[3]", "\u221c": "\\sqrt[4]", "\u27e8": "\\langle ", "\u27e9": "\\rangle ", "\uff05": "\\%",
    "\u00bc": "\\frac{1}{4}", "\u00bd": "\\frac{1}{2}",
    "\u00be": "\\frac{3}{4}", "\u2153": "\\frac{1}{3}", "\u2154": "\\frac{2}{3}",
}  # fmt: skip
_RAISED: Final = dict(
    zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f", "0123456789+-n", strict=True)
)
_LOWERED: Final = dict(zip("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789", strict=True))
_GREEK: Final = {
    unicodedata.lookup(f"GREEK {size} LETTER {('LAMDA' if name == 'lambda' else name).upper()}"): "\\"
    + (name if size == "SMALL" else name.capitalize()) + " "
    for size in ("SMALL", "CAPITAL")
    for name in (
        "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
        "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
    )
}  # fmt: skip
_SAME: Final = {
    "dfrac": "frac", "sfrac": "frac",
    "nicefrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le",
    "geq": "ge", "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "varnothing": "emptyset", "degree": "circ",
    "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|",
    "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta", "div": "/", "ast": "*", "star": "*",
    "backslash": "setminus",
    "exponentialE": "e", "simeq": "approx", "thickapprox": "approx", "colon": ":", "dots": "...", "ldots": "...",
    "cdots": "...", "land": "and", "lor": "or", "wedge": "and", "vee": "or", "lparen": "(", "rparen": ")",
    "dollar": "$", "percent": "%", "slash": "/", "arctg": "arctan", "tg": "tan", "ctg": "cot",
}  # fmt: skip
_MARKS: Final = ("<", ">", "[", "]", "|", "/", "*", ":", "...", "(", ")", "e")
_INVISIBLE: Final = (
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|strut|hfill|noindent"
    r"|rm|bf|it|sf|tt|large|Large|normalsize)(?![A-Za-z])\.?"
)
_WORDS: Final = re.compile(
    r"\\(text|textrm|textbf|textit|textsf|texttt|textnormal|textsc|mbox|hbox|mathrm|operatorname|mathbf|mathit|mathsf|mathtt"
    r"|mathnormal|boldsymbol|bm|underline|emph|boxed|fbox|ensuremath|mathop|mathord)\*?\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_ROMAN: Final = ("mathrm", "operatorname")
_FUNCTIONS: Final = (
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "ln", "log",
    "exp", "sqrt",
)  # fmt: skip
_SAYING: Final = re.compile(
    r"^(?P<quote>\")?\s*(?:(?:the|my|final|correct)\s+)*(?:answer|solution|result)(?:\s+is\b|\s*[:=])\s*:?\s*"
    r"(?(quote)\"\s*)",
    re.IGNORECASE,
)
_LABEL: Final = re.compile(
    r"^(?:\\(?:therefore|Rightarrow|implies|to|Longrightarrow|rightarrow)(?![A-Za-z])|=>|\"[A-Za-z ]+:\")\s*"
)
_ROW_END: Final = "\x01"
_THOUSANDS: Final = re.compile(r"(?<=\d)(?:\\[,;: ]|~|\{\s*[,~ ]\s*\}|\{\s*\\,\s*\})\s*(?=\d{3}(?!\d))")


def spelled(text: str) -> str:
    """``text`` in the one spelling; "" when nothing is said in it."""
    text = _characters(text)
    text = _without_markdown(text)
    # A row of a matrix ends with two backslashes; before a word they are one that was escaped.
    text = (text if "\\begin" in text else re.sub(r"\\\\(?=[A-Za-z{}%$])", r"\\", text)).replace("\\\\", _ROW_END)
    text = re.sub(_ROW_END + r"\s*\[[\d. ]*(?:pt|em|ex|cm|mm)\]", _ROW_END, text)
    text = _without_dollars(text)
    text = re.sub(r",\\!\s*(?=\d)", ",", text)
    text = re.sub(r"\\!\s*", "", text)
    text = _THOUSANDS.sub("", text).replace("{,}", ",")
    text = re.sub(_INVISIBLE, " ", text)
    text = re.sub(r"\\(?:color|textcolor)\s*\{[^{}]*\}", "", text)
    text = re.sub(
        r"\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|hspace\s*\{[^{}]*\}|phantom\s*\{[^{}]*\}|\n)|~", " ", text
    )
    for _ in range(4):
        text, found = _WORDS.subn(_words, text)
        if not found:
            break
    text = re.sub(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: _command(found[1]), text)
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}", r"^\\circ ", text)
    text = re.sub(r"(?<![A-Za-z\\])sqrt(?=[\s({\d])", r"\\sqrt", text)
    text = re.sub(r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"<=", r"\\le ", text)
    text = re.sub(r">=", r"\\ge ", text)
    text = re.sub(r"!=(?!=)", r"\\ne ", text)
    return _trimmed(text).replace(_ROW_END, "\\\\")


def squeezed(text: str) -> str:
    """A spelling without blanks and needless braces: two that are equal need no mathematics."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"\{([A-Za-z0-9])\}(?![A-Za-z0-9{])", r"\1", text)
    return text.replace('"', "")


def words_of(text: str) -> str:
    """What a text says, without its case, marks and blanks."""
    return re.sub(r"[\W_]+", " ", text.lower()).strip()


def _characters(text: str) -> str:
    found: list[str] = []
    for character in text:
        if character in _RAISED:
            found.append(f"^{{{_RAISED[character]}}}")
        elif character in _LOWERED:
            found.append(f"_{{{_LOWERED[character]}}}")
        elif character in _CHARACTERS:
            found.append(_CHARACTERS[character])
        elif character in _GREEK:
            found.append(_GREEK[character])
        elif not character.isascii() and (digit := unicodedata.decimal(character, None)) is not None:
            found.append(str(digit))
        else:
            found.append(character if character.isascii() else unicodedata.normalize("NFKC", character))
    joined = "".join(found)
    return joined.replace("}^{", "") if any(each in _RAISED for each in text) and "}^{" in joined else joined


def _without_markdown(text: str) -> str:
    text = text.strip()
    for mark in ("**", "__", "`", "*"):
        while len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    return re.sub(r"(?<=[\w)}])\s*\*\*\s*(?=[\w({\\-])", "^", text).replace("**", "").replace("`", "")


def _without_dollars(text: str) -> str:
    """Without the marks of mathematics. A lone dollar before a number is money."""
    text = re.sub(r"\\\$", "\\\\dollar ", text)
    text = re.sub(r"\\[()\[\]]", " ", text)
    text = text.replace("\\%", "%")
    if text.count("$") % 2:
        text = re.sub(r"^(\s*-?\s*)\$(?=\s*[\d.])", r"\1\\dollar ", text)
    return text.replace("$", " ").replace("\\dollar ", "\\$")


def _words(found: re.Match[str]) -> str:
    command, content = found[1], found[2]
    said = content.strip()
    if command in _ROMAN and said in _FUNCTIONS:
        return f"\\{said} "
    if said in ("and", "or", ",", ";"):
        return f" {said} "
    if not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", said)) or command in (
        "boxed",
        "fbox",
        "ensuremath",
        "underline",
    ):
        return f" {content} "
    if re.match(r"(and|or)\s", said) or re.search(r"\s(and|or)$", said):
        return f" {said} "
    if command not in ("text", "textrm", "textnormal", "mbox", "hbox", *_ROMAN) and len(said) == 1:
        return f"{said}"
    if command == "mathrm" and said in ("e", "i", "d"):
        return said
    plain = said.replace("\\$", "").replace("\\%", "%")
    return f' "{plain}" ' if "\\" not in plain and not re.search(r"\d", plain) else f" {said} "


def _command(name: str) -> str:
    same = _SAME.get(name, name)
    if same in _MARKS or same in ("$", "%"):
        return same
    if same in ("{", "}"):
        return f"\\{same}"
    return f" {same} " if same in ("and", "or") else f"\\{same}"


def _trimmed(text: str) -> str:
    text = " ".join(text.split())
    while True:
        before = text
        text = re.sub(_LABEL, "", re.sub(_SAYING, "", text.strip())).lstrip(":=").strip()
        if not text.endswith("..."):
            text = text.rstrip(".,;:").strip()
        text = text.rstrip("\\" + _ROW_END)
        if text.startswith("{") and text.endswith("}") and not text.endswith("\\}") and _is_one_group(text):
            text = text[1:-1]
        for box in ("\\boxed", "\\fbox"):
            if text.startswith(box + "{") and text.endswith("}") and _is_one_group(text.removeprefix(box)):
                text = text[len(box) + 1 : -1]
        if text == before:
            return text


def _is_one_group(text: str) -> bool:
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return place == len(text) - 1
    return False
