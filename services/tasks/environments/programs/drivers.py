"""Scripts that run a Python program in the sandbox as the owners of its problem run it.

The program is in solution.py. The expected result never enters the sandbox, so that nothing is gained by forging an answer.

LiveCodeBench's runner (LiveCodeBench/LiveCodeBench, commit 28fef95: lcb_runner/evaluation/testing_util.py) puts star imports
of the standard library before each program. It calls a program that reads and prints as the body of a function, on
substitutes of sys.stdin and sys.stdout. Some programs run only there (a ``return`` outside of functions, any status of
sys.exit), and some run everywhere but there (``global``, ``for line in sys.stdin``). verl's prime_code has the same imports.
"""

from __future__ import annotations

from typing import Final

SOLUTION_MODULE: Final = "solution.py"
DRIVER_FILE: Final = "run_solution.py"

_STARS: Final = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
NAMES: Final = "".join(
    [f"from {name} import *\n" for name in _STARS]
    + [f"import {name}\n" for name in _STARS if name not in ("builtins", "typing")]
    + ["sys.setrecursionlimit(50000)\n"]
)
"""What stands before a program. The order matters: ``time`` is datetime's, and ``pow`` is the built-in one again."""

_BEGIN: Final = f"""\
import os, sys, types
sys.set_int_max_str_digits(50000)
NAMES = {NAMES!r}
with open("/sandbox/{SOLUTION_MODULE}", encoding="utf-8", errors="surrogateescape") as file:
    text = file.read()
"""

_HIDDEN_OUTPUT: Final = """\
answers = os.dup(1)
os.dup2(2, 1)
"""
"""What the program prints goes to standard error, and the answer to where only the driver writes."""

FUNCTION_DRIVER: Final = (
    _BEGIN
    + _HIDDEN_OUTPUT
    + """\
import json, numbers
name, rules = sys.argv[1:]
arguments = [json.loads(line) for line in sys.stdin.read().split("\\n") if line.strip()]
if rules == "prime" and arguments and isinstance(arguments[0], dict):
    try:
        # JSON has made texts of numbers that were keys.
        arguments = [{int(key): value for key, value in arguments[0].items()}]
    except ValueError:
        pass
if rules == "prime" and ("np" in text or "numpy" in text):
    NAMES += "try:\\n    import numpy, numpy as np\\nexcept ImportError:\\n    pass\\n"
module = types.ModuleType("tmp_sol")
# Theirs is one text, in which an import from the future stands too late.
for part in (NAMES, text) if rules == "own" else (NAMES + "\\n\\n" + text,):
    exec(compile(part, "solution.py", "exec", dont_inherit=True), vars(module))
    if part is NAMES:
        vars(module).pop(name, None)  # The library has an add and a gcd, and the program is to define its own.
holder = vars(module)["Solution"]() if "class Solution" in text else module
if rules != "livecodebench" and not hasattr(holder, name):
    holder = module
if not hasattr(holder, name):
    sys.exit(f"the solution has no function {name}")
result = getattr(holder, name)(*arguments)


def said(value):
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        value = int(value)
        return value if abs(value) < 1 << 53 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [said(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [said(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[said(key), said(each)] for key, each in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {"set": [said(each) for each in value]}
    if isinstance(value, numbers.Rational):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    if type(value).__module__ == "decimal":
        return {"decimal": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return said(value.item())
    if hasattr(value, "__iter__"):
        return {"sequence": [said(each) for each in value]}
    return {"other": 0}


sys.setrecursionlimit(50000)
answer = json.dumps(said(result))
with os.fdopen(answers, "w", encoding="utf-8") as output:
    output.write(answer)
"""
)
"""Calls a function; its arguments are lines of standard input, each as JSON. Arguments: its name, and whose rules hold."""

LIVECODEBENCH_DRIVER: Final = (
    _BEGIN
    + _HIDDEN_OUTPUT
    + """\
import ast, builtins, io
given = sys.stdin.buffer.read().decode("utf-8", "replace")


def inlined(text):
    try:
        body = ast.parse(text).body
        if isinstance(body[-1], ast.If) and ast.unparse(body[-1].test).strip() == "__name__ == '__main__'":
            return ast.unparse(body[:-1]) + "\\n" + ast.unparse(body[-1].body)
    except Exception:
        pass
    return text


def as_function(text):
    try:
        body = ast.parse(text).body
        imports = [each for each in body if isinstance(each, (ast.Import, ast.ImportFrom))]
        rest = [each for each in body if not isinstance(each, (ast.Import, ast.ImportFrom))]
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        function = ast.FunctionDef(name="wrapped_function", args=none, body=rest, decorator_list=[], lineno=-1)
        return NAMES + "\\n" + ast.unparse(imports) + "\\n" + ast.unparse(function)
    except Exception:
        return text


class Bytes:
    def read(self, *_):
        return given.encode()

    def readline(self, *_):
        return given.encode().split(b"\\n")[0] + b"\\n"


class Input:
    def __init__(self):
        self.inputs, self.buffer, self.text = given, Bytes(), io.StringIO(given)

    def read(self, *_):
        return given

    def readline(self, *size):
        return self.text.readline(*size)

    def readlines(self, *_):
        return given.split("\\n")

    def __getattr__(self, name):
        return getattr(self.text, name)


for name in (
    "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace unlink "
    "fchmod fchown chmod chown chroot lchown getcwd chdir"
).split():
    setattr(os, name, None)
builtins.quit = None
if "shutil" in text or "subprocess" in text:
    import shutil, subprocess

    shutil.rmtree = shutil.move = shutil.chown = subprocess.Popen = None
for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
    sys.modules[name] = None
code = as_function(inlined(text))
# Whoever imports stdin by its name has it before the substitute, without anything to read but by these three.
sys.stdin = stdin = open(os.devnull)
module = types.ModuleType("tmp_sol")
exec(compile(code, "solution.py", "exec", dont_inherit=True), vars(module))
if "class Solution" in code:
    module.Solution()
lines = iter(given.split("\\n"))
stdin.read, stdin.readline, stdin.readlines = lambda *_: given, lambda *_: next(lines), lambda *_: given.split("\\n")
sys.stdin, sys.stdout = Input(), io.StringIO()
printed = sys.stdout
printed.close = lambda _: 1
try:
    module.wrapped_function()
except SystemExit:
    pass
with os.fdopen(answers, "wb") as output:
    output.write(printed.getvalue().encode("utf-8", "surrogateescape"))
"""
)
"""Runs a program that reads and prints as LiveCodeBench's runner does."""

NAMED_DRIVER: Final = (
    _BEGIN
    + """\
if "np" in text or "numpy" in text:
    NAMES += "try:\\n    import numpy, numpy as np\\nexcept ImportError:\\n    pass\\n"
module = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(NAMES, "names", "exec", dont_inherit=True), vars(module))
try:
    code = compile(text, "solution.py", "exec", dont_inherit=True)
except SyntaxError:
    import ast

    # Theirs is the body of a function, and may return.
    tree = ast.parse(text)
    none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    body = ast.FunctionDef(name="main_program", args=none, body=tree.body, decorator_list=[])
    call = ast.Expr(ast.Call(ast.Name("main_program", ast.Load()), [], []))
    tree.body = [body, call]
    code = compile(ast.fix_missing_locations(tree), "solution.py", "exec", dont_inherit=True)
try:
    exec(code, vars(module))
except SystemExit:
    pass
"""
)
"""Runs a program that reads and prints as it is, behind the same names; with any status of sys.exit it has ended well."""
