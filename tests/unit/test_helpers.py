"""What two test modules need is in tests/support, where it can be found: no module imports from a test module."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^\s*(?:from (tests[\w.]*) import (\([^)]*\)|[^\n]*)|import (tests[\w.]*))", re.MULTILINE)


def imported_test_modules(source: str) -> list[str]:
    """Test modules that a module's text imports, or imports from."""
    found = []
    for package, names, module in IMPORT.findall(source):
        each = [f"{package}.{name}" for name in re.findall(r"\w+", re.sub(r" as \w+", "", names))] or [module]
        found += [name for name in each if any(part.startswith("test_") for part in name.split("."))]
    return found


def test_no_module_imports_from_a_test_module() -> None:
    paths = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 500
    found = {
        str(path.relative_to(ROOT)): names
        for path in paths
        if (names := imported_test_modules(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_an_import_from_a_test_module_is_found_in_every_form() -> None:
    forms = (
        "from tests.unit.test_a import b",
        "from tests.unit import test_a as a",
        "import tests.unit.test_a",
        "def f():\n    from tests.unit import (\n        other,\n        test_a,\n    )",
    )
    for form in forms:
        assert any("tests.unit.test_a" in name for name in imported_test_modules(form)), form
    assert imported_test_modules("from tests.support.a import tested\nimport tests.support.c") == []
