"""Asks the official runners again, and writes down what they say.

    python -m tests.sandbox.programs.official.record livecodebench=DIR codeforces=DIR verl=DIR apps=DIR taco=DIR

Each DIR is a clone of LiveCodeBench/LiveCodeBench, guipenedo/piston, volcengine/verl, hendrycks/apps and FlagOpen/TACO;
those left out keep their verdicts. Nothing of them is kept in this repository. It runs programs without a sandbox: only
ours. Needs numpy, tqdm, bash and g++.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.sandbox.programs.official import codeforces, livecodebench
from tests.sandbox.programs.official.cases import VERDICTS, Case, recorded

LIVECODEBENCH: Final = """
from lcb_runner.evaluation.compute_code_generation_metrics import evaluate_generations_by_problem
def verdict(asked, program):
    (results,), _ = evaluate_generations_by_problem(([program], {"input_output": json.dumps(asked)}, False, 6))
    return all(result is True for result in results)
"""
VERL: Final = """
import prime_code
def verdict(asked, program):
    score, _ = prime_code.compute_score("```python\\n" + program + "\\n```", json.dumps(asked), continuous=True)
    return score is True or score == 1.0
"""
APPS: Final = """
import testing_util
def verdict(asked, program):
    if "fn_name" in asked:
        asked = {**asked, "inputs": [[json.loads(line) for line in text.split("\\n")] for text in asked["inputs"]],
                 "outputs": [json.loads(text) for text in asked["outputs"]]}
    found = testing_util.run_test(%s, test=program, debug=False)
    return bool(found) and all(result is True for result in found)
"""
OF_APPS: Final = APPS % 'problem={"input_output": asked}'
OF_TACO: Final = (
    APPS.replace("testing_util", "metrics.testing_util") % '{"input_output": json.dumps(asked)}'
    # It starts NumPy anew for each test, by the clock.
    + "metrics.testing_util.TIMEOUT = 30\n"
)
PYEXT: Final = """
import sys, types
class RuntimeModule:
    @staticmethod
    def from_string(name, doc, text):
        module = types.ModuleType(name, doc)
        exec(text, module.__dict__)
        return module
"""
"""What pyext does for these runners; pyext itself no longer runs on this Python."""
ASK: Final = """
import io, json, os, sys
sys.path[:0] = ["."]
{setup}
asked = json.loads(sys.argv[1])
kept = os.dup(1)
os.dup2(2, 1)
try:
    said = verdict(asked, sys.argv[2])
except BaseException as error:
    print(repr(error), file=sys.stderr)
    said = False
os.write(kept, b"RIGHT" if said else b"WRONG")
os._exit(0)
"""


def python_runner(setup: str) -> Callable[[Path, Case, Mapping[str, Any]], bool]:
    """Asks a runner in Python that takes APPS' form of tests."""

    def ask(folder: Path, case: Case, row: Mapping[str, Any]) -> bool:
        asked = livecodebench.asked_of(row)
        text = ASK.format(setup=setup)
        try:
            done = subprocess.run(
                [sys.executable, "-c", text, json.dumps(asked), case.program],
                cwd=folder, capture_output=True, timeout=120, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.stdout.endswith(b"RIGHT")

    return ask


def piston(folder: Path, case: Case, row: Mapping[str, Any]) -> bool:
    """What open-r1's cf_scoring makes of piston's package for Codeforces, test by test."""
    package = folder / "packages/codeforces/1.0.0"
    with tempfile.TemporaryDirectory() as scratch:
        main = Path(scratch) / ("main.py" if case.language == "python" else "main.cpp")
        main.write_text(case.program)
        variables = {
            "PISTON_LANGUAGE": "python3" if case.language == "python" else "c++17",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
        }
        run = {"cwd": scratch, "env": {**variables, "PATH": f"{Path(sys.executable).parent}:{variables['PATH']}"}}
        if subprocess.run(["bash", package / "compile", main.name], capture_output=True, check=False, **run).returncode:  # type: ignore[call-overload]
            return False
        for test in row["official_tests"]:
            files = {
                "input.txt": test["input"],
                "correct_output.txt": test["output"],
                "grader_config": f"TIME_LIMIT={row['time_limit']}\nMEMORY_LIMIT={row['memory_limit']}\nINPUT_MODE=stdio",
            }
            if row["generated_checker"]:
                files["checker.py"] = row["generated_checker"]
            for name, text in files.items():
                (Path(scratch) / name).write_bytes(text.encode())
            done = subprocess.run(["bash", package / "run", main.name], capture_output=True, check=False, timeout=60, **run)  # type: ignore[call-overload]
            if done.returncode or done.stdout.strip() != b"1":
                return False
    return True


RUNNERS: Final[Mapping[str, tuple[Any, list[str], Callable[[Path, Case, Mapping[str, Any]], bool]]]] = {
    "livecodebench": (livecodebench, ["lcb_runner/evaluation"], python_runner(LIVECODEBENCH)),
    "codeforces": (codeforces, ["packages/codeforces"], piston),
    "verl": (livecodebench, ["verl/utils/reward_score/prime_code"], python_runner(VERL)),
    "apps": (livecodebench, ["eval"], python_runner(OF_APPS)),
    "taco": (livecodebench, ["metrics"], python_runner(OF_TACO)),
}


def unpacked(clone: Path, paths: list[str], folder: Path) -> str:
    """Put files of a clone into ``folder``, as they are imported; gives their repository and commit."""
    archive = subprocess.run(["git", "-C", clone, "archive", "HEAD", *paths], capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
    for inner in ("eval", "verl/utils/reward_score"):
        for path in sorted((folder / inner).glob("*")):
            path.rename(folder / path.name)
    (folder / "pyext.py").write_text(PYEXT)
    if (folder / "metrics").is_dir():
        (folder / "metrics/pyext2.py").write_text(PYEXT)
    return subprocess.run(
        ["git", "-C", clone, "log", "-1", "--format=%H %as"], capture_output=True, check=True, text=True
    ).stdout.strip()


def main() -> None:
    """Record what the sets named on the command line say."""
    found = recorded() if VERDICTS.exists() else {}
    for argument in sys.argv[1:]:
        name, _, clone = argument.partition("=")
        module, paths, ask = RUNNERS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            commit = unpacked(Path(clone), paths, folder)
            verdicts = {}
            for case in module.CASES:
                verdicts[case.name] = ask(folder, case, module.ROWS[case.row])
                print(f"{name}: {case.name}: {verdicts[case.name]}", flush=True)
        found[name] = {"commit": commit, "verdicts": verdicts}
    VERDICTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
