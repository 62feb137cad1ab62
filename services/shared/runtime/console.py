"""The console on which ``gspo`` shows a run. What it is given is text: never markup, and never a control character."""

from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from gspo_services.shared.runtime.plain_text import one_line


class PlainConsole(Console):
    """A rich console for texts from others.

    Every ``str`` in a table, a title or ``print`` comes through ``render_str``: it shows as it is, in one line.
    A ``Text`` is shown as it was made, so make one only of known text.
    """

    def __init__(self, **options: Any) -> None:
        """``options``: those of rich's console, except those that interpret a text."""
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, *, style: str | Style = "", **_: Any) -> Text:
        """``text``, made printable; emoji codes, markup and highlighting are never looked for."""
        return Text(one_line(text), style=style)
