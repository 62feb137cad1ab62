"""Coverage-guided fuzzing of every boundary, under atheris, which make fuzz installs.

python -m tests.fuzz --target message --cases 100000      one target
python -m tests.fuzz --target all --share 0.1 --jobs 2    all targets, each with a tenth of its cases (ten million in all)
python -m tests.fuzz --add message FILE                   put a file that broke a target into the corpus; needs no atheris

The corpus has one archive for each target: tests/fuzz/corpus/FAMILY/TARGET.tar.xz (tar -xJf unpacks it). A run adds
each input that breaks something, and with --keep the smallest inputs that reach new code. Commit the archives that
change. Exit status: 1 when something broke, 2 when an archive or an argument is wrong.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from tests.fuzz.corpus import CorpusError, add, archive_of, cases_of, keep
from tests.fuzz.target import Target
from tests.fuzz.targets.registry import TARGETS

KEPT_BYTES: Final = 4_000
"""Total size of the new inputs that one run keeps for a target. The smallest come first."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=["all", *TARGETS], help="one or more (default: all)")
    parser.add_argument("--cases", type=int, help="for each target (default: its part of ten million)")
    parser.add_argument("--share", type=float, default=1.0, help="fraction of each target's cases to run (default: 1)")
    parser.add_argument("--seconds", type=int, default=86_400, help="time limit for each target (default: a day)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new code to the corpus")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--add",
        nargs=2,
        action="append",
        metavar=("TARGET", "FILE"),
        help="add FILE to TARGET's archive and exit; a name broken-WHAT stays, any other becomes the digest of the content",
    )
    options = parser.parse_args(arguments)
    try:
        return _add(options.add) if options.add else _run(options)
    except CorpusError as error:
        parser.error(str(error))


def _add(additions: Iterable[tuple[str, str]]) -> int:
    for target, file in additions:
        if target not in TARGETS:
            raise CorpusError(f"no target is called {target!r}: choose from {', '.join(TARGETS)}")
        try:
            name = add(target, Path(file))
        except OSError as error:
            raise CorpusError(f"{file} cannot be added: {error}") from error
        print(f"{archive_of(target)} has {name}: run pytest tests/fuzz -k {target}, then commit the archive")
    return 0


def _run(options: argparse.Namespace) -> int:
    chosen = options.target or ["all"]
    targets = [target for target in TARGETS.values() if "all" in chosen or target.name in chosen]
    with tempfile.TemporaryDirectory(prefix="gspo-fuzz-") as name:
        directory = Path(name)
        for target in targets:
            _prepare(target, directory / target.name)
        running = [
            _start([target.name for target in targets[at :: options.jobs]], directory, options) for at in range(options.jobs)
        ]
        for process in running:
            process.wait()
        results = [_result(target, directory / target.name, keep_new=options.keep) for target in targets]
    for result in results:
        print(_line(result))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    total = sum(result["cases"] for result in results)
    broken = [result["target"] for result in results if "crash" in result]
    print(f"{total:,} cases, {len(broken)} targets broken {' '.join(broken)}")
    return int(bool(broken))


def _prepare(target: Target, directory: Path) -> None:
    """Write the inputs that a session starts with: libFuzzer reads them from a folder."""
    (directory / "found").mkdir(parents=True)
    for number, data in enumerate([*target.seeds(), *cases_of(target.name).values()]):
        (directory / "found" / f"seed-{number}").write_bytes(data[: target.max_bytes])


def _start(names: list[str], directory: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a process that fuzzes these targets one after the other."""
    command = [sys.executable, "-m", "tests.fuzz.session", f"--directory={directory}", f"--seconds={options.seconds}"]
    command += [f"--seed={options.seed}", f"--share={options.share}"]
    command += [f"--cases={options.cases}"] if options.cases else []
    return subprocess.Popen([*command, *names])


def _result(target: Target, directory: Path, *, keep_new: bool) -> dict[str, Any]:
    """The report of one session, with the inputs that broke it."""
    report = directory / "report.json"
    result: dict[str, Any] = {"target": target.name, "cases": 0, "crash": "the session did not start"}
    if report.is_file():
        result = json.loads(report.read_text())
    for artifact in sorted(directory.glob("artifact-*")):
        said = (directory / "said").read_text(errors="replace")
        result.setdefault("crash", f"{artifact.name}: {said[-1500:]}")
        (name,) = keep(target.name, [artifact.read_bytes()], broken=True)
        result["input"] = f"{archive_of(target.name)}: {name}"
    if keep_new:
        found = (directory / "found").iterdir()
        _keep_smallest(target, [path.read_bytes() for path in found if not path.name.startswith("seed-")])
    return result


def _keep_smallest(target: Target, found: list[bytes]) -> None:
    """Put the smallest inputs into the corpus, up to ``KEPT_BYTES``."""
    smallest = sorted(found, key=len)
    totals = accumulate(map(len, smallest))
    keep(target.name, [data for data, total in zip(smallest, totals, strict=True) if total <= KEPT_BYTES])


def _line(result: dict[str, Any]) -> str:
    seconds = result.get("seconds") or 1.0
    text = f"{result['target']:14} {result['cases']:>10,} cases {result['cases'] / seconds:>8,.0f}/s"
    text += f"  slowest {result.get('slowest_ms', 0):,.1f} ms  largest {result.get('largest_bytes', 0) / 2**20:.1f} MiB"
    return text + (f"\n    {result['crash']}\n    {result.get('input', '')}" if "crash" in result else "")


if __name__ == "__main__":
    sys.exit(main())
