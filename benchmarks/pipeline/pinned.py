"""Run a module on chosen cores: ``python -m benchmarks.pipeline.pinned 0,2 gspo_services.learner CONFIG ...``.

It pins itself before any import, so that all later threads and processes inherit the cores.
"""

import os
import runpy
import sys


def parse_cores(text: str) -> set[int]:
    """Parse a list of core numbers such as 0,2. Raises: ValueError for anything else."""
    try:
        return {int(word) for word in text.split(",")}
    except ValueError as error:
        raise ValueError(f"cores are {text!r}: numbers separated by commas are expected, such as 0,2") from error


def main() -> None:
    """Pin this process, then become the module."""
    cores, module = sys.argv[1:3]
    os.sched_setaffinity(0, parse_cores(cores))
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
