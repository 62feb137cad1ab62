"""Makes text from others fit to be shown: no control characters, no line breaks, no endless length.

Peers, engines, model outputs and damaged files fill these texts. On a terminal an escape sequence could clear the screen or
forge a line, and a bidirectional override could turn one round.
"""

import re
import unicodedata
from typing import Final

MOST_CHARACTERS: Final = 4000
INDENT: Final = "    "
# Control, format (bidirectional overrides, invisible), surrogates, private, unassigned, and two kinds of line ends.
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


_USER: Final = re.compile(r"(?<=://)[^/\s?#@]*@")
_PARAMETER: Final = re.compile(r"([?&](?:[\w-]*[_-])?(?:key|token|secret|password|signature)=)[^&#\s]+", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """Return ``text`` without users and passwords of addresses in it, and without values of parameters such as a key."""
    return _PARAMETER.sub(r"\1hidden", _USER.sub("", text)) if "://" in text else text


def one_line(value: object, most: int = MOST_CHARACTERS) -> str:
    """Return ``value`` as one printable line of at most ``most`` characters and a remark on how many there were.

    Characters that do not show themselves are written as Python writes them: ``\\x1b``, ``\\n``, ``\\u202e``.
    """
    text = str(value)
    if len(text) > most:
        text = f"{text[:most]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def indented_lines(value: object, most: int = MOST_CHARACTERS) -> str:
    """``value`` in its own lines, each made printable. Those after the first are indented: none passes for ours."""
    first, *others = str(value).split("\n")
    return "\n".join([one_line(first, most), *(INDENT + one_line(line.removeprefix(INDENT), most) for line in others)])


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")
