"""Calls of pip in one environment: locked, without the indexes that do not answer, and with errors that say what to do."""

import ast
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

LOCKED = ("--no-deps", "--require-hashes")
"""What a list in requirements/ names and nothing else, from files with its hashes."""

PYPI = "https://pypi.org/simple"

NOT_THERE = "No matching distribution found"
"""What pip says where an index has no such file, or cannot be reached."""

EVERY_S = 20.0
"""How often a long installation says how far it is."""

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
        status, said = self._watched(self._command("install", "--quiet", *words), self._environment | (env or {}))
        if status == 0:
            return True
        if may_be_missing and NOT_THERE in said:
            return False
        sys.stderr.write(said)
        raise SetupError(f"{way_out(said)}; {AGAIN}")

    def check(self) -> None:
        """Raises: SetupError if an installed package lacks what it asks for."""
        if subprocess.run(self._command("check"), env=self._environment, check=False).returncode:
            raise SetupError("the packages do not fit together: the lines above say which")

    def avoid_dead_indexes(self) -> None:
        """Look once at each index of pip's configuration. Where one is dead, pip would wait for it before every package.

        Raises: SetupError if the main index does not answer.
        """
        options = self._options
        if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            return
        main = options.get("index-url") or PYPI
        if reason := self.why_dead(main, timeout_s=60):
            raise SetupError(
                f"the package index {without_password(main)} does not answer ({reason}): look at the network; behind a "
                "proxy set HTTPS_PROXY, and for a mirror PIP_INDEX_URL, or both in pip's configuration"
            )
        extra = options.get("extra-index-url", "").split()
        dead = {url: reason for url in extra if (reason := self.why_dead(url))}
        for url, reason in dead.items():
            say(f"pip's extra index {without_password(url)} does not answer ({reason}): going on without it")
        if dead:
            # A variable outranks the configuration files, but an empty one counts as none.
            self._environment["PIP_EXTRA_INDEX_URL"] = " ".join(url for url in extra if url not in dead) or main

    def _watched(self, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Run a command, and say now and then how far it is; return its status and what it wrote to stderr."""
        started, free = time.monotonic(), shutil.disk_usage(self._python.parent).free
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            with subprocess.Popen(command, env=environment, stderr=errors) as process:
                while True:
                    try:
                        status = process.wait(EVERY_S)
                        break
                    except subprocess.TimeoutExpired:
                        written = max(0, free - shutil.disk_usage(self._python.parent).free)
                        say(f"  {time.monotonic() - started:.0f} s, {written / 1e9:.1f} GB written")
            errors.seek(0)
            return status, errors.read()

    def why_dead(self, url: str, timeout_s: float = 15) -> str | None:
        """Why nobody answers at a URL, asked as pip would ask; None if somebody does."""
        return why_dead(url, self._options.get("proxy"), timeout_s)

    def _command(self, *words: str) -> list[str]:
        other = () if self._runner == self._python else ("--python", str(self._python))
        return [str(self._runner), "-m", "pip", *other, *words]

    @cached_property
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


def why_dead(url: str, proxy: str | None, timeout_s: float) -> str | None:
    """Why nobody answers at a URL; None if somebody does, whatever the answer is, and for files."""
    if urlsplit(url).scheme not in ("http", "https"):
        return None
    handlers = [urllib.request.ProxyHandler({"http": proxy, "https": proxy})] if proxy else []
    try:
        with urllib.request.build_opener(*handlers).open(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
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
    if any(
        word in text for word in ("Connection broken", "ConnectionError", "incomplete-download", "timed out", "TimeoutError")
    ):
        return "the network ended: wait until it is there again"
    return "pip could not install: its lines above say why"


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
