"""Coverage-guided fuzzing of every boundary, under atheris (`make fuzz` sets up its environment).

python -m tests.fuzz --target message --cases 100000      one target
python -m tests.fuzz --target all --share 0.1 --jobs 2    all, each a tenth of its share of ten million cases

Inputs that reach new code are kept in tests/fuzz/corpus when --keep is given; one that breaks something always is. Exit
status 1 when something was broken.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.fuzz.corpus import keep, kept
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

KEPT_BYTES: Final = 4_000
"""New inputs of a target that are kept, all together: the smallest ones."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=["all", *TARGETS], help="one or more (default: all)")
    parser.add_argument("--cases", type=int, help="of each target (default: its share of ten million)")
    parser.add_argument("--share", type=float, default=1.0, help="of each target's cases (default: 1)")
    parser.add_argument("--seconds", type=int, default=86_400, help="at most, for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="keep inputs that reach new code")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    options = parser.parse_args(arguments)
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
    """What a session begins with."""
    (directory / "found").mkdir(parents=True)
    for number, data in enumerate([*target.seeds(), *kept(target.name)]):
        (directory / "found" / f"seed-{number}").write_bytes(data[: target.max_bytes])


def _start(names: list[str], directory: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """A process that fuzzes these targets one after the other."""
    command = [sys.executable, "-m", "tests.fuzz.session", f"--directory={directory}", f"--seconds={options.seconds}"]
    command += [f"--seed={options.seed}", f"--share={options.share}"]
    command += [f"--cases={options.cases}"] if options.cases else []
    return subprocess.Popen([*command, *names])


def _result(target: Target, directory: Path, *, keep_new: bool) -> dict[str, Any]:
    """The report of one session, with what broke it."""
    report = directory / "report.json"
    result: dict[str, Any] = {"target": target.name, "cases": 0, "crash": "the session did not begin"}
    if report.is_file():
        result = json.loads(report.read_text())
    for artifact in sorted(directory.glob("artifact-*")):
        said = (directory / "said").read_text(errors="replace")
        result.setdefault("crash", f"{artifact.name}: {said[-1500:]}")
        result["input"] = str(keep(target.name, artifact.read_bytes(), broken=True))
    if keep_new:
        found = (directory / "found").iterdir()
        _keep_smallest(target, [path.read_bytes() for path in found if not path.name.startswith("seed-")])
    return result


def _keep_smallest(target: Target, found: list[bytes]) -> None:
    left = KEPT_BYTES
    for data in sorted(found, key=len):
        left -= len(data)
        if left < 0:
            return
        keep(target.name, data)


def _line(result: dict[str, Any]) -> str:
    seconds = result.get("seconds") or 1.0
    text = f"{result['target']:14} {result['cases']:>10,} cases {result['cases'] / seconds:>8,.0f}/s"
    text += f"  slowest {result.get('slowest_ms', 0):,.1f} ms  largest {result.get('largest_bytes', 0) / 2**20:.1f} MiB"
    return text + (f"\n    {result['crash']}\n    {result.get('input', '')}" if "crash" in result else "")


if __name__ == "__main__":
    sys.exit(main())
