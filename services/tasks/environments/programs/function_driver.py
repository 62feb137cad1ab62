"""The script that calls one function of a Python solution in the sandbox, and writes its result as JSON.

Arguments come from standard input, one a line, each as JSON. What the solution prints goes to standard error. The expected
result never enters the sandbox, so that nothing is gained by forging an answer.
"""

from __future__ import annotations

from typing import Final

DRIVER_FILE: Final = "call_function.py"
SOLUTION_MODULE: Final = "solution.py"

DRIVER: Final = """\
import json, os, sys
answers = os.dup(1)
os.dup2(2, 1)
arguments = [json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()]
import bisect, builtins, collections, copy, datetime, functools, heapq, io, itertools, math, operator, random, re
import statistics, string, typing
space = {"__name__": "solution"}
for module in (typing, math, itertools, functools, heapq, bisect, collections):
    names = getattr(module, "__all__", dir(module))
    # math has a pow of its own, which takes two arguments.
    space.update({name: vars(module)[name] for name in names if name[0] != "_" and not hasattr(builtins, name)})
space.update(
    bisect=bisect, collections=collections, copy=copy, datetime=datetime, functools=functools, heapq=heapq, io=io,
    itertools=itertools, json=json, math=math, operator=operator, os=os, random=random, re=re, statistics=statistics,
    string=string, sys=sys, typing=typing,
)
sys.setrecursionlimit(50000)
with open("/sandbox/solution.py", encoding="utf-8", errors="surrogateescape") as file:
    exec(compile(file.read(), "solution.py", "exec"), space)
name = sys.argv[1]
found = getattr(space["Solution"](), name, None) if isinstance(space.get("Solution"), type) else None
found = space.get(name) if found is None else found
if found is None:
    sys.exit(f"the solution has no function {name}")
result = found(*arguments)
def plain(value):
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "__iter__"):
        return list(value)
    return str(value)
with os.fdopen(answers, "w", encoding="utf-8") as output:
    output.write(json.dumps(result, default=plain))
"""
"""Names that sites such as LeetCode import for their users are there, as in LiveCodeBench's own runner
(LiveCodeBench/LiveCodeBench: lcb_runner/evaluation/testing_util.py, import_string, and testing_util.py of
hendrycks/apps)."""
