"""Fuzzing sessions under atheris: ``python -m tests.fuzz.session --directory DIR NAME ...``.

atheris instruments the services during import, so this module imports none of them earlier. libFuzzer ends the process
that it runs in. So each session is a fork of the process that has imported everything, and writes its report to
DIR/NAME/report.json while it runs.
"""

import argparse
import importlib
import json
import logging
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import atheris

if TYPE_CHECKING:
    from tests.fuzz.target import Target

REPORT_EVERY_S: Final = 5.0
HANG_S: Final = 10
INSTRUMENTED: Final = ("gspo_protocol", "gspo_services")
STRUCTURED_ONE_IN: Final = 2
"""One input in this many gets a change that knows its format. The others change as bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.session", description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--cases", type=int, help="for each target (default: its own number)")
    parser.add_argument("--share", type=float, default=1.0, help="fraction of each target's own number (default: 1)")
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        targets = importlib.import_module("tests.fuzz.targets.registry")
        chosen = [targets.TARGETS[name] for name in arguments.targets]
        for target in chosen:
            target.seeds()  # imports what the target imports late
    _require_instrumented()
    _be_quiet()
    for target in chosen:
        child = os.fork()
        if child == 0:
            _fuzz(target, arguments)
        os.waitpid(child, 0)


def _require_instrumented() -> None:
    """Raises: SystemExit when the fuzzer would see no coverage: it would find nothing, and say nothing."""
    for package in INSTRUMENTED:
        modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
        if not any(type(module.__loader__).__module__.startswith("atheris.") for module in modules):
            sys.exit(f"atheris instruments no module of {package}: has the package another name, or was it imported before?")


def _fuzz(target: "Target", arguments: argparse.Namespace) -> None:
    """Fuzz one target. Never returns: libFuzzer ends the process."""
    directory: Path = arguments.directory / target.name
    cases = arguments.cases or max(1, int(target.cases * arguments.share))
    os.dup2(os.open(directory / "said", os.O_WRONLY | os.O_CREAT, 0o644), 2)
    session = _Session(target, directory / "report.json", cases)
    atheris.Setup(
        [
            sys.argv[0], f"-runs={cases}", f"-max_total_time={arguments.seconds}", f"-timeout={HANG_S}",
            f"-max_len={target.max_bytes}", f"-seed={arguments.seed}", "-rss_limit_mb=4096", "-print_final_stats=0",
            f"-artifact_prefix={directory}/artifact-", "-verbosity=0", str(directory / "found"),
        ],
        session.one,
        custom_mutator=session.mutate,
        internal_libfuzzer=True,
    )  # fmt: skip
    session.write()
    atheris.Fuzz()


def _be_quiet() -> None:
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


class _Session:
    """Counts cases, and writes a report every few seconds and at the end."""

    def __init__(self, target: "Target", report: Path, cases: int) -> None:
        from tests.fuzz.target import Measured

        self._target = target
        self._report = report
        self._cases = cases
        self._measured = Measured()
        self._begin = time.monotonic()
        self._written = self._begin

    def one(self, data: bytes) -> None:
        try:
            self._measured.run(self._target, data)
        except BaseException as error:
            self.write(crash=f"{type(error).__name__}: {error}"[:500], data=data)
            raise
        if self._measured.cases >= self._cases or time.monotonic() - self._written > REPORT_EVERY_S:
            self.write()

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if not data:
            return rng.choice(self._target.seeds())[:max_size]
        if rng.randrange(STRUCTURED_ONE_IN):
            changed: bytes = atheris.Mutate(data, max_size)
            return changed
        return self._target.mutate(data, rng)[:max_size]

    def write(self, **more: Any) -> None:
        self._written = time.monotonic()
        plain = {
            "target": self._target.name,
            "cases": self._measured.cases,
            "seconds": round(self._written - self._begin, 2),
            "slowest_ms": round(self._measured.slowest_s * 1e3, 1),
            "largest_bytes": self._measured.largest_bytes,
            **{key: value.hex() if isinstance(value, bytes) else value for key, value in more.items()},
        }
        partial = self._report.with_suffix(".partial")
        partial.write_text(json.dumps(plain))
        partial.replace(self._report)


if __name__ == "__main__":
    main()
