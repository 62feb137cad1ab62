"""``gspo model tiny DIR``: makes the demo's model."""

import argparse
import sys
from pathlib import Path

from gspo_services.prepare.tiny_models.imitation import TinyProgress
from gspo_services.prepare.tiny_models.tiny import DEFAULT_ENVIRONMENTS, TinyReport, make_tiny_model
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.runtime.plain_text import indented_lines


def main() -> int:
    """Parse the command line, make the model, report on it. Returns the exit status."""
    begin_command()
    parser = argparse.ArgumentParser(
        prog="gspo model tiny",
        description="Make a small Qwen3-MoE with a byte-level tokenizer, taught by careless teachers: it has the skill but "
        "a bad policy, so that reinforcement learning has something to improve. About a minute on one core.",
    )
    parser.add_argument("directory", type=Path, help="where to put the model; an earlier tiny model there is replaced")
    parser.add_argument("--seed", type=int, default=0, help="the seed that determines everything (default: %(default)s)")
    learning = parser.add_mutually_exclusive_group()
    learning.add_argument(
        "--environment",
        action="append",
        dest="environments",
        help="an environment whose demonstrations to learn from; repeatable",
    )
    learning.add_argument(
        "--tools", action="store_true", help="a model for agents: it knows tools, and learns to use those of a small shop"
    )
    learning.add_argument(
        "--programs", action="store_true", help="a model that writes small programs; their problems go to DIR/tasks"
    )
    parser.add_argument(
        "--for-gpu", action="store_true", help="heads of a size that SGLang serves on a GPU; train it in bfloat16 there"
    )
    parser.add_argument("--if-missing", action="store_true", help="do nothing when the directory holds a model already")
    arguments = parser.parse_args()
    if arguments.if_missing and (arguments.directory / "config.json").is_file():
        return 0
    environments = arguments.environments or list(DEFAULT_ENVIRONMENTS)
    try:
        report = make_tiny_model(
            arguments.directory,
            seed=arguments.seed,
            environments=environments,
            tools=arguments.tools,
            programs=arguments.programs,
            for_gpu=arguments.for_gpu,
            progress=_show_progress,
        )
    except (ValueError, OSError) as error:
        sys.stderr.write(indented_lines(f"gspo model tiny: {error}") + "\n")
        return 2
    sys.stdout.write(_describe(report))
    return 0


def _show_progress(progress: TinyProgress) -> None:
    end = "\r" if sys.stdout.isatty() else "\n"
    share = progress.step / progress.num_steps
    sys.stdout.write(
        f"cold start: step {progress.step}/{progress.num_steps} ({share:4.0%}), loss {progress.loss:.3f}, "
        f"{progress.seconds:.0f} s{end}"
    )
    sys.stdout.flush()


def _describe(report: TinyReport) -> str:
    rewards = ", ".join(
        f"{name} {reward:.2f} sampled, {report.greedy_rewards[name]:.2f} greedy"
        for name, reward in report.sampled_rewards.items()
    )
    return (
        f"{report.directory}: {report.num_parameters:,} parameters, {report.num_steps} steps in {report.seconds:.0f} s; "
        f"held-out reward: {rewards}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
