"""The page of families is what the code says."""

from pathlib import Path

from tests.support.checking.family_table import page

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "families.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs-families` and commit docs/guide/families.md"
