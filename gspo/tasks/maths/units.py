"""The unit of an answer, and words beside its number: ``5.4 \\text{ cents}``, ``864 inches^2``, ``\\$36``, ``73 people``."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gspo.tasks.maths.spelling import words_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MEASURES: Final = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram gm", "kg": "kilogram", "t": "ton tonne", "lb": "pound lbs", "oz": "ounce",
    "ms": "millisecond", "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "week": "wk", "month": "",
    "year": "yr", "decade": "", "century": "centuries",
    "ml": "milliliter millilitre mL", "l": "liter litre L", "gal": "gallon", "cup": "", "acre": "", "ha": "hectare",
    "mph": "", "kmh": "kph kmph", "hz": "hertz", "n": "newton", "j": "joule", "w": "watt", "kw": "kilowatt", "v": "volt",
    "a": "ampere amp", "pa": "pascal", "k": "kelvin", "mol": "mole", "ohm": "",
    "dollar": "usd buck", "cent": "penny pennies", "euro": "eur", "rupee": "rs", "yuan": "rmb", "yen": "",
    "degree": "deg", "radian": "rad", "am": "", "pm": "", "unit": "",
}  # fmt: skip
_CANONICAL: Final = {alias: name for name, others in _MEASURES.items() for alias in (name, *others.split())}
_CURRENCIES: Final = {"\\$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling", "\u00a5": "yen", "\u20b9": "rupee"}
_SCALES: Final = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NOT_WORDS: Final = _words(
    "or and not no nor but is are be isn than then if when where half quarter third quarters thirds halves dozen "
    "dozens score squared cubed factorial plus minus times over by divided mod modulo base point to from least "
    "most more fewer less approximately about around roughly almost nearly between either any all none other infinity "
    "infinite undefined nothing power root sqrt sin cos tan log ln exp pi log negative positive remainder even odd "
    "wrong incorrect maybe perhaps mathrm text frac hundred thousand million billion trillion"
)
"""Words that say something about the number, so that without them it would be another."""
_ONE_LETTER: Final = _words("m g s h t l n j w v a k")
MOST_WORDS: Final = 6
_QUOTED: Final = re.compile(r"(.*?[^\s\"])(\s*)(\"[^\"]*\"(?:\s*(?:/|\\cdot|\*)?\s*(?:\"[^\"]*\"|\^\s*\{?-?\d\}?))*)")
_BARE: Final = re.compile(r"(.*?[\d)}|!])(\s*)([A-Za-z][A-Za-z./^' -]*(?:\^\s*\{?-?\d\}?)?)")


class TakenOff(NamedTuple):
    """A text without its unit."""

    rest: str
    unit: str
    """The unit in its canonical name with its power, "%", "a word" for words that are none; "" for nothing."""
    zeros: int = 0
    """Zeros that a word such as million adds."""


def measured(text: str) -> TakenOff:
    """Take the unit and the words off ``text``, which is ``spelled``; off what has none, nothing."""
    for sign, name in _CURRENCIES.items():
        if sign in text:
            return _money(text, sign, name)
    text = re.sub(r"(?<=\d)\s*\^\s*\\circ\s*([CFK])$", r' "deg\1"', text)
    found = re.fullmatch(r"(.*?)\s*\^\s*\\circ", text)
    if found and not re.search(r"sin|cos|tan|cot|sec|csc", text):
        return TakenOff(found[1], "degree")
    if found := re.fullmatch(r"(.*?)\s*(?:\\?%|\"?\bper\s?cent(?:age)?\"?|\"?\bpct\"?)", text):
        return TakenOff(found[1].strip(), "%")
    if found := re.fullmatch(r"(.*\d)\s*(?:\^\s*\{?\s*)?\"?(?:st|nd|rd|th)\"?\s*\}?", text):
        return TakenOff(found[1], "a word")
    found = _QUOTED.fullmatch(text) or _BARE.fullmatch(text)
    return _with_words(text, found) if found else TakenOff(text, "")


def _money(text: str, sign: str, name: str) -> TakenOff:
    rest = text.replace(sign, " ", 1).strip()
    rest = re.sub(r"^-\s+", "-", rest)
    found = measured(rest)
    if found.unit in ("", "a word", name):
        return TakenOff(found.rest, name, found.zeros)
    return TakenOff(text, "")


def _with_words(text: str, found: re.Match[str]) -> TakenOff:
    rest, gap, tail = found[1], bool(found[2]), found[3].strip()
    if not tail:
        return TakenOff(rest, "")
    quoted = tail.startswith('"')
    scale = re.match(r"\"?\s*([A-Za-z]+)s?\b\s*", tail)
    if scale and scale[1].lower() in _SCALES:
        after = tail[scale.end() :].strip(' "')
        inner = measured(f'{rest} "{after}"') if after else TakenOff(rest, "")
        return TakenOff(inner.rest, inner.unit, _SCALES[scale[1].lower()]) if inner.rest == rest else TakenOff(text, "")
    unit = _unit(tail, quoted=quoted)
    if unit:
        return TakenOff(rest, unit)
    words = words_of(tail).split()
    plain = re.fullmatch(r"[A-Za-z\"\s.,'-]+", tail) is not None
    if not plain or not words or len(words) > MOST_WORDS or _NOT_WORDS & set(words):
        return TakenOff(text, "")
    # Bare letters are variables, unless they are clearly a word.
    if quoted or (gap and all(len(word) >= 2 for word in words) and len(words[0]) >= 4) or (gap and words[0] in _CANONICAL):
        return TakenOff(rest, "a word")
    return TakenOff(text, "")


def _unit(tail: str, *, quoted: bool) -> str:
    """The unit of measure that ``tail`` is, as "cm^2" or "km/h"; "" when it is none."""
    text = tail.replace('"', " ").strip().rstrip(".")
    if re.fullmatch(r"([ap])\s*\.?\s*m", text, re.IGNORECASE):
        return text[0].lower() + "m" if quoted or len(text) > 1 else ""
    if text in ("degC", "degF", "degK"):
        return text
    text = re.sub(
        r"\b(square|sq|cubic|cu)\.?\s+([A-Za-z]+)", lambda each: f"{each[2]}^{2 if each[1][0] == 's' else 3}", text
    )
    text = re.sub(r"\s*\bper\b\s*|\s*/\s*", "/", text)
    # The h in km/h is no variable.
    parts = [_power(part, quoted=quoted or place > 0) for place, part in enumerate(text.split("/"))]
    if len(parts) > 3 or not all(parts):
        return ""
    return "kmh" if parts == ["km", "h"] else "mph" if parts == ["mi", "h"] else "/".join(parts)


def _power(part: str, *, quoted: bool) -> str:
    found = re.fullmatch(r"\s*([A-Za-z]+)\s*(?:\^\s*\{?(-?\d)\}?)?\s*(squared|cubed)?", part)
    if found is None:
        return ""
    name = _name(found[1], quoted=quoted)
    exponent = found[2] or {"squared": "2", "cubed": "3"}.get(found[3] or "", "1")
    return name and (name if exponent == "1" else f"{name}^{exponent}")


def _name(word: str, *, quoted: bool) -> str:
    """One unit by its canonical name. A bare letter is a variable."""
    lower = word.lower()
    if len(word) == 1:
        return _CANONICAL[lower] if quoted and lower in _ONE_LETTER else ""
    candidates = (lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((_CANONICAL[each] for each in candidates if len(each) > 1 and each in _CANONICAL), "")
