"""Runs the steps and writes the report: see the package."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.specifiers import SpecifierSet

from tests.gpu.half_hour.steps import Step, steps

ROOT = Path(__file__).parents[3]
PR_SET_CHILD_SUBREAPER = 36
KEPT_BYTES = 4 << 20
"""Larger files of a run are not archived: weights, checkpoints."""
KEPT = {".log", ".json", ".jsonl", ".toml", ".png", ".txt", ".html"}


def _end_others(before: list[psutil.Process]) -> int:
    """Kill our processes that were not there before a step, orphans included, and return how many that were."""
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=10)
    return len(left)


def run_step(step: Step, out: Path, *, limit_s: float | None = None) -> dict[str, Any]:
    """Run one step; its output goes to a log of its own, and its last line, if it is JSON, into the report."""
    begin, before = time.monotonic(), psutil.Process().children(recursive=True)
    log = out / f"{step.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            step.command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
        )
        try:
            status = process.wait(step.limit_s if limit_s is None else min(limit_s, step.limit_s))
        except subprocess.TimeoutExpired:
            status = 124
        left = _end_others(before)
        process.wait()
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    try:
        found = json.loads(lines[-1])
    except ValueError:
        found = lines[-8:] if step.words[0] == "pytest" else None if status == 0 else lines[-12:]
    result = {"step": step.name, "status": status, "seconds": round(time.monotonic() - begin, 1), "found": found}
    return result | ({"ended_processes": left} if left else {})


def archive(out: Path, work: Path) -> None:
    """All logs, and the small files of the runs, in one file beside the report."""
    with tarfile.open(out / "logs.tar.gz", "w:gz") as tar:
        for root in (out / "logs", work):
            for path in sorted(root.rglob("*")):
                if path.is_file() and path.suffix in KEPT and path.stat().st_size <= KEPT_BYTES:
                    tar.add(path, f"{root.name}/{path.relative_to(root)}")


def wrong_python(required: str | None, version: str) -> str | None:
    """Say that the packages on the path are made for another Python; None: they are not, or do not say.

    ``required``: Requires-Python of what is there under the project's name (tests.gpu.half_hour.pack writes it).
    """
    if required is None or SpecifierSet(required).contains(version):
        return None
    return (
        f"the packages on PYTHONPATH are made for Python {required}, and this is {version}: run that Python, or make the "
        "archive again with make gpu-pack GPU_PYTHON=, and a Python of this version"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of report.json and logs.tar.gz")
    parser.add_argument("--work", type=Path, help="directory of what the steps write; a temporary one by default")
    parser.add_argument(
        "--tiny", type=Path, default=Path("models/tiny-gpu"), help="the demo's model (gspo model tiny DIR --for-gpu)"
    )
    parser.add_argument("--real", type=Path, default=Path("models/smollm2"), help="a real model for the second run")
    parser.add_argument("--groups", default="", help="numbers of groups of steps, separated by commas; all by default")
    parser.add_argument("--only", default="", help="steps, separated by commas; all by default")
    parser.add_argument("--minutes", type=float, default=30.0, help="end by then, whatever is under way")
    parser.add_argument("--on-cpu", action="store_true", help="try the steps without a GPU: those that measure one fail")
    chosen = parser.parse_args()
    with suppress(PackageNotFoundError):
        if wrong := wrong_python(metadata("gspo")["Requires-Python"], platform.python_version()):
            parser.error(wrong)
    # What a step's processes leave behind becomes ours, and so can be ended.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    work = chosen.work or Path(tempfile.mkdtemp(prefix="half-hour-"))
    logs = chosen.out / "logs"
    for directory in (logs, work):
        directory.mkdir(parents=True, exist_ok=True)
    names = [name for name in chosen.only.split(",") if name]
    groups = [int(number) for number in chosen.groups.split(",") if number]
    begin, results = time.monotonic(), []
    os.environ["PYTHONUNBUFFERED"] = "1"
    # SGLang's radix tree in Rust reads tensors by the layout of its own PyTorch: under 2.11 it takes int64 for int32.
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    for step in steps(chosen.tiny.resolve(), chosen.real.resolve(), work, on_cpu=chosen.on_cpu):
        if (names and step.name not in names) or (groups and step.group not in groups):
            continue
        left_s = 60 * chosen.minutes - (time.monotonic() - begin)
        if left_s < 10:
            results.append({"step": step.name, "status": None, "found": "no time was left"})
            continue
        results.append(run_step(step, logs, limit_s=left_s))
        print(json.dumps(results[-1]), flush=True)
        (chosen.out / "report.json").write_text(json.dumps(results, indent=1))
        archive(chosen.out, work)
    return int(any(result["status"] != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
