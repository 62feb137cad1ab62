"""Where the rules for APPS, TACO, PrimeIntellect and verl differ from each of their runners, and why."""

from collections.abc import Mapping
from typing import Final

FUNCTION: Final = "theirs runs the program as a function on substitutes of its streams; here it runs as it is"
GUARD: Final = "theirs takes this out of the standard library, or it ends theirs"
NAMES: Final = "theirs imports other names, and no recursion limit"
ONE_PROCESS: Final = "theirs calls all tests in one process; here each test has a process of its own"
BESIDE: Final = "theirs looks for functions in the class alone"
OWN_EQ: Final = "theirs compares by the program's own __eq__, which can say anything"

EXPLAINED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "verl": {
        FUNCTION: (
            "stdin.buffer.read", "stdin.buffer.readline", "open(0)", "open of lines", "with open(0)", "main, then more",
            "global", "future import", "star import", "stdout.buffer", "descriptor 1",
        ),
        GUARD: ("exit()", "quit()", "os._exit", "resource", "subprocess"),
        "theirs has to write a result as JSON": ("f Fraction", "f Decimal"),
        BESIDE: ("f beside the class",),
        ONE_PROCESS: ("f state that stays",),
    },
    "apps": {
        FUNCTION: (
            "stdin.buffer.read", "stdin.buffer.readline", "from sys import stdin, for line", "main", "main in double quotes",
            "main, then more", "global", "future import", "from sys import stdout", "stdout.buffer", "descriptor 1",
        ),
        "theirs gives the input for every file": ("open of /dev/stdin", "open of a file for tests"),
        GUARD: ("exit()", "quit()", "os._exit", "resource", "subprocess"),
        NAMES: ("recursion", "Counter, heappush, inf", "time without import", "f deepcopy", "f itemgetter", "f deep"),
        "theirs compares whole numbers as floats": ("leading zero",),
        OWN_EQ: ("f equal to all",),
        BESIDE: ("f beside the class",),
        ONE_PROCESS: ("f state that stays",),
    },
    "taco": {
        "a sandbox's input is a pipe of another user": ("open of /dev/stdin",),
        NAMES: ("recursion", "Counter, heappush, inf", "time without import", "f deepcopy", "f itemgetter", "f deep"),
        "theirs wants status 0; APPS and verl take any of sys.exit": ("sys.exit(1)",),
        "theirs compares texts alone where APPS compares numbers": ("as float", "exponent", "more digits", "another zero"),
        "theirs compares sets of characters, so that tokens may change their lines": ("lines on one",),
        OWN_EQ: ("f equal to all",),
        BESIDE: ("f beside the class",),
        ONE_PROCESS: ("f state that stays",),
    },
}  # fmt: skip
"""By recorded runner and reason: programs of which ours says another thing."""
