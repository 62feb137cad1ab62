"""The pages of the documentation and their code blocks, so that tests run what they show."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@dataclass(frozen=True)
class Block:
    """A fenced block: ``python`` or ``toml``, as its fence says."""

    place: str
    """Page and line, for messages."""
    language: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def tokens(page: Path) -> tuple[Token, ...]:
    return tuple(MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")))


def blocks(*languages: str, pages: tuple[Path, ...] = tuple(PAGES)) -> list[Block]:
    """The blocks in these languages; without any, all."""
    return [
        Block(f"{name_of(page)}:{(token.map or [0])[0] + 1}", token.info, token.content)
        for page in pages
        for token in tokens(page)
        if token.type == "fence" and (not languages or token.info in languages)
    ]


def inline_code(page: Path) -> Iterator[str]:
    """What stands between backticks in its text, in its tables and headings."""
    for token in tokens(page):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def shown(page: str, first_line: str) -> str:
    """The block that has a line which begins so, from there on. Raises: ValueError unless there is one."""
    found = []
    for block in blocks(pages=(ROOT / page,)):
        lines = block.text.splitlines(keepends=True)
        found += ["".join(lines[number:]) for number, line in enumerate(lines) if line.startswith(first_line)]
    (text,) = found
    return text
