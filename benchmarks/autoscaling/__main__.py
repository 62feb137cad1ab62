"""Make the figures of docs/guide/autoscaling.md, in minutes of one core: ``python -m benchmarks.autoscaling``."""

import argparse
from pathlib import Path

from benchmarks.autoscaling.report import run_all

parser = argparse.ArgumentParser(prog="python -m benchmarks.autoscaling", description=__doc__)
parser.add_argument("--directory", type=Path, default=Path("runs/autoscaling"), help="directory of tables and JSON")
parser.add_argument("--seeds", type=int, default=5, help="runs of each case")
parser.add_argument("--jobs", type=int, default=1, help="processes")

if __name__ == "__main__":
    arguments = parser.parse_args()
    run_all(arguments.directory, seeds=range(arguments.seeds), jobs=arguments.jobs)
