"""`python -m tests.simulation --seed 17` replays one seed and tells what happened; `--seeds 0..1000 --jobs 2` runs many."""

import argparse
import logging
import sys
import time
from collections import Counter

from tests.simulation.weather import plan_of
from tests.simulation.world import simulate


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds")
    args = parser.parse_args()
    if args.seed is not None:
        outcome = simulate(plan_of(args.seed), log_level=logging.INFO)
        print(outcome.plan)
        for line in outcome.history:
            print(line)
        print(outcome.violation, outcome.virtual_s)
        return 0
    first, last = args.seeds.split("..")
    happened = Counter()
    begin = time.process_time()
    for seed in range(int(first), int(last)):
        outcome = simulate(plan_of(seed))
        happened += outcome.happened
        if outcome.violation:
            print(seed, outcome.violation)
    print(time.process_time() - begin)
    for k, v in sorted(happened.items()):
        print(k, v)
    return 0


if __name__ == "__main__":
    sys.exit(main())
