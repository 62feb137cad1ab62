"""The throughput of the whole pipeline, compared with each half alone, and with taking turns.

    python -m benchmarks.pipeline --plot docs/evidence/images/pipeline.png --json pipeline.json
    python -m benchmarks.pipeline --config examples/smollm2.toml

A short run comes first, and sets the length of prompts so that generating a batch takes about as long as training it; a
configuration is measured as it is, without evaluations. Then one run of everything that ``gspo run`` starts, with real
SGLang, broker and DeepSpeed learner: SGLang and its agent on half of the cores, the learner on the other half. Then, each on
the same cores as before, SGLang alone with the run's own prompts, sampling and concurrency, the learner alone on the run's
own batches (``gspo replay``; those that count for the run), and both at the same time. Last, the run once more with max_lag
0, where generation and training take turns. All figures are tokens of the policy per second.
"""

import argparse
import asyncio
import json
import platform
import shutil
import sys
import tempfile
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from benchmarks.pipeline.balance import balanced
from benchmarks.pipeline.halves import measure_halves, recorded_questions
from benchmarks.pipeline.measures import trained_batches
from benchmarks.pipeline.report import Comparison, Lanes, half_figures, lanes_of, run_figures, steady_batches, tables
from benchmarks.pipeline.run import run_pinned
from benchmarks.pipeline.timeline import draw
from benchmarks.pipeline.workload import Workload, choose_cores, run_files, write_config
from benchmarks.watch import watched
from gspo_services.shared.runtime.lifecycle import run_process
from gspo_services.shared.runtime.logs import configure_logging

log = structlog.get_logger()

PICTURE_BATCHES: Final = 4
"""Most synchronous batches in the picture."""


async def compare(arguments: argparse.Namespace, directory: Path, stop: asyncio.Event) -> tuple[Comparison, list[Lanes]]:
    """Run everything below ``directory``; also return the lanes of the asynchronous and the synchronous run.

    Raises: the error of a failed run; ValueError for too few batches; TimeoutError.
    """
    max_lag, limit_s = arguments.max_lag, arguments.limit_s
    cores = choose_cores(arguments.rollout_cores, arguments.learner_cores)
    config, workload = arguments.config, None
    if config is None:
        workload = workload_of(arguments)
        model, config = directory / "model", directory / "config.toml"
        await asyncio.to_thread(_make_model, model, workload)
        if not arguments.prompt_letters:
            log.info("part", what="the balance")
            workload = await balanced(workload, model, cores, directory / "pilot", stop, limit_s)
            _go_on(stop)
        write_config(config, workload, model)

    log.info("part", what="the whole", max_lag=max_lag, batches=arguments.batches)
    files = run_files(config, directory / "whole", num_batches=arguments.batches, max_lag=max_lag)
    whole = await run_pinned(files, cores, stop, limit_s)
    _go_on(stop)
    trained = trained_batches(whole.rows)
    tokens = {batch.index: batch.action_tokens for batch in trained}
    asked = range(max(0, len(trained) - arguments.sglang_batches), len(trained))
    questions = await asyncio.to_thread(recorded_questions, files.settings.run.directory, asked)

    # Those batches alone that count for the whole: a batch with fewer action tokens costs more for each of them.
    counted = [batch.index for batch in steady_batches(whole, max_lag)]
    log.info("part", what="the halves", requests=len(questions), batches=counted[-1] + 1)
    async with asyncio.timeout(limit_s):
        halves = await measure_halves(files.settings, tokens, questions, counted[-1] + 1, cores, directory)
    halves_alone = half_figures(halves, counted)
    _go_on(stop)

    log.info("part", what="taking turns", max_lag=0, batches=arguments.turns)
    turns = run_files(config, directory / "turns", num_batches=arguments.turns, max_lag=0)
    synchronous = await run_pinned(turns, cores, stop, limit_s)
    _go_on(stop)
    comparison = Comparison(
        **halves_alone,
        whole=run_figures(whole, max_lag),
        synchronous=run_figures(synchronous, 0),
        workload=workload or str(config),
        max_lag=max_lag,
        same_weights=halves.learner.same_weights and halves.learner_at_once.same_weights,
    )
    return comparison, [lanes_of(whole, max_lag), lanes_of(synchronous, 0)]


def _go_on(stop: asyncio.Event) -> None:
    if stop.is_set():
        raise asyncio.CancelledError


def _make_model(directory: Path, workload: Workload) -> None:
    from benchmarks.pipeline.model import ModelSize, make_model

    size = ModelSize(
        hidden_size=workload.hidden_size,
        num_hidden_layers=workload.layers,
        moe_intermediate_size=workload.hidden_size,
    )
    log.info("model", parameters=make_model(directory, size))


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Return the requested sizes, with the usual length of prompts by default."""
    chosen = {each.name: int(vars(arguments)[each.name]) for each in fields(Workload)}
    usual = Workload()
    return replace(usual, **{name: value for name, value in chosen.items() if value})


def plot(lanes: list[Lanes], max_lag: int, path: Path) -> None:
    """Cut both runs to one scale: from where each is steady, and only as far as both reach."""
    whole, turns = lanes
    num_turns = sum(span.kind == "training" and turns.begin < span.end <= turns.end for span in turns.learner)
    wanted_s = PICTURE_BATCHES * (turns.end - turns.begin) / max(1, num_turns)
    names = {f"asynchronous, max_lag {max_lag}": whole, "synchronous, max_lag 0": turns}
    draw(
        {name: {"SGLang": run.rollout, "learner": run.learner} for name, run in names.items()},
        {name: run.begin for name, run in names.items()},
        min(wanted_s, whole.end - whole.begin, turns.end - turns.begin),
        path,
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line: a run's sizes and lengths."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--config", type=Path, help="measure this configuration (default: a model and a task made for it)")
    made.add_argument("--batches", type=int, default=14, help="of the asynchronous run")
    made.add_argument("--turns", type=int, default=7, help="batches of the synchronous run")
    made.add_argument("--sglang-batches", type=int, default=3, help="batches of the run that SGLang alone generates")
    made.add_argument("--max-lag", type=int, default=2, help="of the asynchronous run")
    made.add_argument(
        "--rollout-cores", default="", help="cores for SGLang and its agent, such as 0 (default: the first half)"
    )
    made.add_argument("--learner-cores", default="", help="cores for the learner, such as 1 (default: the other half)")
    made.add_argument("--limit-s", type=float, default=1200.0, help="time limit of each part, in seconds")
    made.add_argument("--plot", type=Path, help="write the timeline here (PNG)")
    made.add_argument("--json", type=Path, help="write all figures here")
    made.add_argument("--keep", type=Path, help="leave the runs here (default: a temporary directory)")
    for each in fields(Workload):
        # The balance is found by default; the other sizes have fixed defaults.
        by_default = 0 if each.name == "prompt_letters" else each.default
        made.add_argument(f"--{each.name.replace('_', '-')}", type=int, default=by_default)
    return made


def main() -> int:
    """Measure and print the tables. Return the exit status: 0 whether or not the goals are met."""
    arguments = parser().parse_args()
    configure_logging("benchmark")
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="pipeline-"))
    directory.mkdir(parents=True, exist_ok=True)
    found: list[tuple[Comparison, list[Lanes]]] = []

    async def measure(stop: asyncio.Event) -> None:
        with watched() as watch:
            comparison, lanes = await compare(arguments, directory, stop)
        found.append((replace(comparison, others_cores=watch.others_cores()), lanes))

    try:
        status = run_process(measure)
        if not found:
            return status or 1
        comparison, lanes = found[0]
        if arguments.json:
            made = {"machine": platform.platform(), "made": datetime.now(tz=UTC).isoformat(timespec="seconds")}
            content = made | comparison.as_json()
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if arguments.plot:
            plot(lanes, arguments.max_lag, arguments.plot)
        print(tables(comparison))
        print(f"\n{comparison.workload}")
        strays = comparison.whole.strays | comparison.synchronous.strays
        print(f"threads on their cores: {comparison.whole.num_threads - len(strays)} of {comparison.whole.num_threads}")
        print(f"the learner alone made the run's weights bit for bit: {comparison.same_weights}")
        for name, where in strays.items():
            print(f"  {name} may run on {where}")
        return 0
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
