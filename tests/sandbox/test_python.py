"""A script in an interpreter that is already there behaves as in one that was started for it."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from gspo_services.tasks.sandbox import LocalOptions, Sandbox
from tests.sandbox.conftest import python

pytestmark = pytest.mark.sandbox

SCRIPTS = {
    "threads end first": "import threading, time\ndef late():\n  time.sleep(0.05)\n  print('late')\n"
    "threading.Thread(target=late).start()",
    "what was registered is called": "import atexit\natexit.register(print, 'over')\nprint('running')",
    "exits are codes": "import sys\nprint('a', file=sys.stderr)\nsys.exit('wrong')",
    "an exit in a function": "def f(): raise SystemExit(3)\nf()",
    "an error has its own frames alone": "def f():\n  return 1 / 0\nf()",
    "an error in the text": "print('a'\n",
    "letters": "print(input(), 'ä', '\\udc80')",
    "names": "import sys\nprint(__name__, sys.stdin.encoding, sys.stderr.errors, sys.stdout is sys.__stdout__)",
    "a class of the main module": "import sys\nclass A: pass\nprint(A.__module__, sys.modules[A.__module__].A is A)",
    "standard error before a crash": "import os, sys\nprint('why', file=sys.stderr)\nos.abort()",
    "children": "import os, sys\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1])\nelse: sys.exit(3)",
    "a deep stack in a thread": "import sys, threading\nthreading.stack_size(1 << 26)\nsys.setrecursionlimit(20000)\n"
    "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(9000)))\n"
    "t.start()\nt.join()",
    "pools": "import concurrent.futures as c\nwith c.ThreadPoolExecutor(3) as p: print(list(p.map(abs, [-1, 2])))",
}


async def bare(script: str, stdin: bytes) -> tuple[int | None, bytes, bytes]:
    """Exit code, output and errors of a fresh interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(script)
        process = await asyncio.create_subprocess_exec(
            str(LocalOptions().python), "-I", "script.py", cwd=folder, stdin=-1, stdout=-1, stderr=-1,
            env={"LANG": "C.UTF-8"},
        )  # fmt: skip
        out, err = await process.communicate(stdin)
        return process.returncode, out, err.replace(os.fsencode(folder), b"/sandbox")


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_ends_and_says_what_it_does_in_a_fresh_interpreter(sandbox: Sandbox, name: str) -> None:
    outcome = await python(sandbox, SCRIPTS[name], stdin="ß\n".encode())
    code = outcome.exit_code if outcome.signal is None else -outcome.signal
    assert (code, outcome.stdout, outcome.stderr) == await bare(SCRIPTS[name], "ß\n".encode())


async def test_random_numbers_are_new_in_each_run(sandbox: Sandbox) -> None:
    said = {(await python(sandbox, "import random\nprint(random.random())")).stdout for _ in range(3)}
    assert len(said) == 3


async def test_what_one_run_changes_in_the_interpreter_no_other_sees(sandbox: Sandbox) -> None:
    await python(sandbox, "import sys, math, builtins\nmath.pi = 3\nbuiltins.print = None\nsys.setrecursionlimit(50)")
    outcome = await python(
        sandbox, "import sys, math\nprint(round(math.pi, 2), sys.getrecursionlimit(), __file__, sys.argv)"
    )
    assert outcome.stdout == b"3.14 1000 /sandbox/script.py ['/sandbox/script.py']\n"
