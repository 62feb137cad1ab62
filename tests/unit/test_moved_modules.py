"""The import of a module that has moved says its new name; every other import is Python's own."""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec

import pytest

import gspo.moved
import services.moved
from gspo.moved import MovedModules

MOVED = {
    f"{package}.{old}": new
    for package, moved in (("gspo", gspo.moved.MOVED), ("services", services.moved.MOVED))
    for old, new in moved.items()
}


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_says_the_new_one_which_exists(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"^{old} has moved: import {MOVED[old]}$"):
        import_module(old)
    assert find_spec(MOVED[old]) is not None


def test_the_import_of_a_name_from_its_package_says_the_new_one_too() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"services\.runtime\.channel has moved: import services\.runtime\.net"):
        from services.runtime import channel  # noqa: F401


def test_a_module_inside_a_moved_package_says_where_the_package_is() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"services\.audit has moved: import services\.runs\.audit"):
        import services.audit.findings  # noqa: F401


@pytest.mark.parametrize("name", ["services.runtime.chanel", "services.nothing", "gspo.nothing", "nothing.attention"])
def test_a_name_that_never_existed_gives_pythons_own_error(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named ") as caught:
        import_module(name)
    assert caught.value.name in (name, name.partition(".")[0])


def test_a_misspelt_name_of_a_package_gives_pythons_own_error() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'chanel' from 'services\.runtime'"):
        from services.runtime import chanel  # noqa: F401


def test_names_that_are_packages_now_give_what_they_gave_as_modules() -> None:
    from services.cli.run import run_command
    from services.runtime.settings import Settings

    assert Settings.__module__.startswith("services.runtime.settings.")
    assert run_command.__module__ == "services.cli.run.command"


def test_modules_are_looked_for_before_moves() -> None:
    moves = [place for place, finder in enumerate(sys.meta_path) if isinstance(finder, MovedModules)]
    assert len(moves) == 2
    assert min(moves) > sys.meta_path.index(PathFinder)
