"""Calls of pip in one environment: locked, without the indexes that do not answer, and with errors that say what to do."""

import ast
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

LOCKED = ("--no-deps", "--require-hashes")
"""What a list in requirements/ names and nothing else, from files with its hashes."""

PYPI = "https://pypi.org/simple"

NOT_THERE = "No matching distribution found"
"""What pip says where an index has no such file, or cannot be reached."""

AGAIN = "what is installed stays: the same command goes on from here"


class SetupError(Exception):
    """What went wrong, and the way out; the text is for the user."""


def say(text: str) -> None:
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


class Pip:
    """pip for one environment. It is the environment's own, or that of another one, which has a newer pip."""

    def __init__(self, python: Path, runner: Path | None = None) -> None:
        self._python, self._runner = python, runner or python
        self._environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def install(self, *words: str, env: dict[str, str] | None = None, may_be_missing: bool = False) -> bool:
        """Install; return False where no index has the file and that is allowed.

        Raises: SetupError, with pip's last lines, for anything else.
        """
        command = self._command("install", "--quiet", *words)
        done = subprocess.run(command, env=self._environment | (env or {}), stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return True
        if may_be_missing and NOT_THERE in done.stderr:
            return False
        sys.stderr.write(done.stderr)
        raise SetupError(f"{way_out(done.stderr)}; {AGAIN}")

    def check(self) -> None:
        """Raises: SetupError if an installed package lacks what it asks for."""
        if subprocess.run(self._command("check"), env=self._environment, check=False).returncode:
            raise SetupError("the packages do not fit together: the lines above say which")

    def avoid_dead_indexes(self) -> None:
        """Look once at each index of pip's configuration. Where one is dead, pip would wait for it before every package.

        Raises: SetupError if the main index does not answer.
        """
        options = self._options()
        if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            return
        main = options.get("index-url") or PYPI
        if reason := why_dead(main, options.get("proxy")):
            raise SetupError(
                f"the package index {without_password(main)} does not answer ({reason}): look at the network; behind a "
                "proxy set HTTPS_PROXY, and for a mirror PIP_INDEX_URL, or both in pip's configuration"
            )
        extra = options.get("extra-index-url", "").split()
        dead = {url: reason for url in extra if (reason := why_dead(url, options.get("proxy")))}
        for url, reason in dead.items():
            say(f"pip's extra index {without_password(url)} does not answer ({reason}): going on without it")
        if dead:
            # A variable outranks the configuration files, but an empty one counts as none.
            self._environment["PIP_EXTRA_INDEX_URL"] = " ".join(url for url in extra if url not in dead) or main

    def _command(self, *words: str) -> list[str]:
        other = () if self._runner == self._python else ("--python", str(self._python))
        return [str(self._runner), "-m", "pip", *other, *words]

    def _options(self) -> dict[str, str]:
        """What `pip install` would use, from its files and variables, by the option's name."""
        command = [str(self._runner), "-m", "pip", "config", "list"]
        shown = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if shown.returncode:
            raise SetupError(f"pip cannot read its configuration: {shown.stderr.strip()}")
        found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
        for line in shown.stdout.splitlines():
            key, _, value = line.partition("=")
            section, _, option = key.partition(".")
            if section in found and value:
                found[section][option] = str(ast.literal_eval(value))
        return {**found["global"], **found["install"], **found[":env:"]}


def why_dead(url: str, proxy: str | None) -> str | None:
    """Why nobody answers at a URL; None if somebody does, whatever the answer is, and for files."""
    if urlsplit(url).scheme not in ("http", "https"):
        return None
    handlers = [urllib.request.ProxyHandler({"http": proxy, "https": proxy})] if proxy else []
    try:
        with urllib.request.build_opener(*handlers).open(urllib.request.Request(url, method="HEAD"), timeout=10):
            return None
    except urllib.error.HTTPError:
        return None
    except urllib.error.URLError as error:
        # A certificate that this Python does not know is no dead index: pip may have others, and says what is wrong.
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (TimeoutError, ConnectionError) as error:
        return str(error) or type(error).__name__


def way_out(text: str) -> str:
    """What to do about the last lines of pip."""
    if "DO NOT MATCH THE HASHES" in text:
        return (
            "a file is not the one that was locked. If your index is a mirror, ask who keeps it; a broken copy in pip's "
            "cache goes away with: python3 -m pip cache purge"
        )
    if "No space left on device" in text:
        return "the disk is full: free some space"
    if NOT_THERE in text:
        return "the package index has no locked file for this Python, or does not answer: its lines above say which"
    if any(word in text for word in ("Connection broken", "ConnectionError", "timed out", "TimeoutError", "IncompleteRead")):
        return "the network ended: wait until it is there again"
    return "pip could not install: its lines above say why"


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
