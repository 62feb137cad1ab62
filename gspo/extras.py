"""Packages that a plain ``pip install gspo`` does not bring: an import that needs them says which extra does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_OURS = ("gspo", "gspo_protocol", "gspo_services")


@contextmanager
def needs_extras(module: str, extras: str) -> Iterator[None]:
    """Watch the imports inside the block, which are those of ``module``.

    Args:
        module: its dotted name, for the error.
        extras: those of pyproject.toml that bring its packages, with commas between them.

    Raises: ModuleNotFoundError (an ImportError) with the package that is not installed and the way out. A module of ours
    that is not there is a mistake of ours, and its error stays as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _OURS:
            raise
        text = f"{module} needs the package {package}, which is not installed here: pip install 'gspo[{extras}]'"
        raise ModuleNotFoundError(text, name=error.name) from error
