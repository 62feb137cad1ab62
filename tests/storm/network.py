"""The storm's own network: a namespace with only a loopback interface, in which ports of one broker can be cut off."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, Literal

INSIDE: Final = "GSPO_STORM_INSIDE"
"""Set for the program that runs in the namespace."""
TABLE: Final = "inet storm"
Way = Literal["drop", "reset"]


def enter(module: str) -> None:
    """Run ``module`` again with the same arguments in a network namespace, unless this is it. Needs root."""
    if INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    command = ["unshare", "--net", sys.executable, "-m", module, *sys.argv[1:]]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1", "GLOO_SOCKET_IFNAME": "lo"})


def cut_off(ports: Sequence[int], way: Way) -> None:
    """From now on nothing reaches these ports or comes from them. drop: silently. reset: connections break.

    An earlier cut ends.
    """
    join()
    which = "{ " + ", ".join(map(str, ports)) + " }"
    action = "drop" if way == "drop" else "reject with tcp reset"
    rules = "\n".join(f"tcp {end} {which} {action}" for end in ("dport", "sport"))
    _nft(f"table {TABLE} {{\nchain cut {{\ntype filter hook input priority 0\n{rules}\n}}\n}}")


def join() -> None:
    """End the cut, if there is one."""
    _nft(f"table {TABLE}\ndelete table {TABLE}")


def _nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
