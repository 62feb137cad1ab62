"""Runs the steps and writes the report: see the package."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.half_hour.run import ENGINE_ARGUMENTS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MODELS = Path("/dev/shm/half-hour-models")


@dataclass(frozen=True)
class Step:
    """One step: a module of this package, or any command, and the seconds after which it is ended."""

    name: str
    words: list[str]
    limit_s: float = 240.0

    @property
    def command(self) -> list[str]:
        if self.words[0] == "pytest":
            return [sys.executable, "-m", *self.words]
        return [sys.executable, "-m", f"tests.gpu.half_hour.{self.words[0]}", *self.words[1:]]


def _engine_setting(share: float) -> str:
    return "rollout.server_args=" + json.dumps([*ENGINE_ARGUMENTS, "--mem-fraction-static", str(share)])


def steps(tiny: Path) -> list[Step]:
    """All of them, the most telling first."""
    small, large, words = str(MODELS / "small"), str(MODELS / "30b"), str(HERE / "words.toml")
    tests = ["pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
    return [
        Step("device", ["device"], 60),
        Step("checksum", ["checksum"], 90),
        Step("small-model", ["shapes", small, "--shape", "small"], 60),
        Step("engine", ["engine", small, *ENGINE_ARGUMENTS, "--mem-fraction-static", "0.3"], 300),
        Step(
            "demo",
            ["run", "examples/arithmetic.toml", "/tmp/half-hour-demo", f"model.path={json.dumps(str(tiny))}",
             'model.dtype="bfloat16"', 'learner.dtype="bfloat16"', "rollout.num_servers=1", _engine_setting(0.3)],
            420,
        ),
        Step("tests", [*tests, "-k", "not uses_the_gpu"], 400),
        Step("large-model", ["shapes", large, "--shape", "30b", "--layers", "2"], 120),
        Step("large-engine", ["engine", large, *ENGINE_ARGUMENTS, "--mem-fraction-static", "0.3"], 300),
        Step(
            "large-run",
            ["run", words, "/tmp/half-hour-large", f"model.path={json.dumps(large)}", _engine_setting(0.2)],
            420,
        ),
        Step("layers-4", ["layers", "4"], 200),
        Step("layers-2-no-checkpointing", ["layers", "2", "activation_checkpointing=false"], 200),
        Step("export", ["export"], 60),
        Step("speed", [*tests, "-s", "-k", "uses_the_gpu"], 400),
    ]  # fmt: skip


def run_step(step: Step, out: Path) -> dict[str, Any]:
    """Run one step; its output goes to a log of its own, and its last line, if it is JSON, into the report."""
    begin = time.monotonic()
    log = out / f"{step.name}.log"
    try:
        with log.open("w") as output:
            status = subprocess.run(
                step.command, stdout=output, stderr=subprocess.STDOUT, timeout=step.limit_s, check=False, cwd=ROOT
            ).returncode
    except subprocess.TimeoutExpired:
        status = 124
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    try:
        found = json.loads(lines[-1])
    except ValueError:
        found = None if status == 0 else lines[-12:]
        if step.words[0] == "pytest":
            found = lines[-8:]
    return {"step": step.name, "status": status, "seconds": round(time.monotonic() - begin, 1), "found": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of report.json and of each step's log")
    parser.add_argument("--tiny", type=Path, default=Path("models/tiny"), help="the demo's model (gspo model tiny DIR)")
    parser.add_argument("--only", default="", help="steps, separated by commas; all by default")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no step after this time")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in chosen.only.split(",") if name]
    begin, results = time.monotonic(), []
    for step in steps(chosen.tiny.resolve()):
        if wanted and step.name not in wanted:
            continue
        if time.monotonic() - begin > 60 * chosen.minutes:
            results.append({"step": step.name, "status": None, "found": "no time was left"})
            continue
        results.append(run_step(step, chosen.out))
        print(json.dumps(results[-1]), flush=True)
        (chosen.out / "report.json").write_text(json.dumps(results, indent=1))
    return int(any(result["status"] != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())
