"""Tables as the benchmarks print them and the documentation has them."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown; a row has a cell for each head."""
    lines = [line(heads), "|" + "---|" * len(heads)]
    return "\n".join([*lines, *map(line, rows)])


def line(cells: Sequence[object]) -> str:
    """Return one row of a table."""
    return f"| {' | '.join(map(str, cells))} |"
