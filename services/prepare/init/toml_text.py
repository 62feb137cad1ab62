"""run.toml of a new project, with a line on why each value is what it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from gspo_services.prepare.init.choices import Answers
from gspo_services.prepare.init.plan import ProjectPlan
from gspo_services.prepare.init.rows import TaskRows
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.tasks.environments import LAST_MESSAGE

VOLUME_DATA: Final = "/models/data/"
"""On a cluster, of rows that no ConfigMap holds."""
REMARK_COLUMN: Final = 32
GYM_GENERATORS: Final = ("chain_sum", "basic_arithmetic", "countdown", "letter_counting", "spell_backward", "number_sorting")
"""Of a new project: short questions, and levels that begin easily."""


def quoted(text: str) -> str:
    """A string of TOML. Raises: ConfigurationError for what no TOML file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{text!r} is not text in UTF-8: rename it") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def run_toml(answers: Answers, plan: ProjectPlan, rows: TaskRows | None) -> str:
    """The file's text."""
    lines = [
        *_head(answers, plan), *_tasks(answers, plan, rows), *_lengths(plan), *_objective(),
        *_distillation(answers), *_evaluation(plan),
        *_broker(answers), *_rollout(answers, plan), *_learner(answers, plan), *_lora(plan), *_security(answers),
    ]  # fmt: skip
    return "\n".join(_aligned(line) for line in lines) + "\n"


def _aligned(line: str) -> str:
    """Remarks begin in one column, where the value leaves it free."""
    value, mark, remark = line.rpartition("  # ")
    return f"{value.rstrip():<{REMARK_COLUMN}}  # {remark}" if mark else line


def _head(answers: Answers, plan: ProjectPlan) -> Iterator[str]:
    directory = "/var/lib/gspo/run" if answers.place == "kubernetes" else "runs/first"
    yield "# Written by `gspo init`. Every key and its meaning: `gspo check run.toml --explain`. A misspelt key is an error."
    yield ""
    yield "[run]"
    yield f"directory = {quoted(directory)}      # everything that the run writes; the same directory resumes it"
    yield f"num_batches = {plan.num_batches}"
    yield "seed = 0"
    yield ""
    yield "[model]"
    yield f"path = {quoted(answers.model)}"
    yield f"dtype = {quoted(plan.dtype)}              # in which versions are served"
    yield ""


def _tasks(answers: Answers, plan: ProjectPlan, rows: TaskRows | None) -> Iterator[str]:
    yield "[environment]"
    if answers.kind == "reasoning_gym":
        yield from _gym(plan)
        return
    if rows is None:
        yield 'name = "my_environment:MyEnvironment"   # the class in my_environment.py'
        yield ""
        return
    yield f"name = {quoted({'agent': 'rows', 'code': 'code'}.get(answers.kind, 'dataset'))}"
    yield ""
    yield "[environment.options]"
    for key, path in (("train_path", rows.train_path), ("eval_path", rows.eval_path)):
        yield f"{key} = {quoted(path)}" + ("      # on the volume `model`" if path.startswith(VOLUME_DATA) else "")
    if answers.kind == "code":
        yield from _programs(plan)
    elif answers.kind != "agent":
        yield f"prompt_column = {quoted(rows.prompt_column)}"
        if rows.answer_column != LAST_MESSAGE:
            yield f"answer_column = {quoted(rows.answer_column)}"
        if answers.kind == "reward":
            yield 'reward = "my_reward:grade"     # the function in my_reward.py'
            yield "reward_weights = { right = 1.0, brief = 0.1 }     # what each component of the reward counts"
        yield _system_prompt(answers, plan)
    else:
        yield ""
        yield "[agent]"
        yield 'function = "my_agent:solve"        # the function in my_agent.py'
        yield "deadline_s = 300                   # seconds that an episode may take"
    yield ""


def _programs(plan: ProjectPlan) -> Iterator[str]:
    if plan.is_small:
        yield 'system_prompt = ""             # the tiny model knows none'
        yield "test_s = 1                     # a program that runs longer has failed the test"


def _gym(plan: ProjectPlan) -> Iterator[str]:
    yield 'name = "reasoning_gym"         # tasks without data; they get harder as they are solved'
    yield ""
    yield "[environment.options]"
    if plan.is_small:
        yield 'generators = "chain_sum"       # one of 106'
        yield 'answer_form = "whole"          # the tiny model knows no tags'
        yield 'system_prompt = ""             # and no system message'
    else:
        yield f"generators = {json.dumps(GYM_GENERATORS)}     # of 106"
    yield f"num_eval_tasks = {plan.num_eval_tasks}          # held out: all generators and all levels, evenly"
    yield ""


def _system_prompt(answers: Answers, plan: ProjectPlan) -> str:
    if plan.is_small:
        return 'system_prompt = ""             # the tiny model knows none'
    if answers.kind == "maths":
        return 'system_prompt = "auto"         # says how to state the answer, where the prompt does not'
    return f"system_prompt = {quoted('Think briefly. End with the answer as a number.')}"


def _lengths(plan: ProjectPlan) -> Iterator[str]:
    prompt = plan.max_tokens - plan.max_turn_tokens
    per_batch = plan.groups_per_batch * plan.group_size
    yield "[sampling]"
    yield "temperature = 1.0"
    yield f"max_turn_tokens = {plan.max_turn_tokens}           # one answer"
    yield f"max_tokens = {plan.max_tokens}              # prompt and answers together: leaves {prompt} tokens for the prompt"
    yield ""
    yield "[batch]"
    yield f"group_size = {plan.group_size}                # attempts at each task; they are compared with each other"
    yield f"groups_per_batch = {plan.groups_per_batch}         # {per_batch} attempts for each policy version"
    steps = plan.groups_per_batch // plan.mini_batches * plan.group_size
    yield f"mini_batches = {plan.mini_batches}              # optimizer steps a batch, of {steps} attempts each"
    yield f"max_lag = {plan.max_lag}                   # how many versions old a trained token may be; 0: take turns"
    yield ""


def _objective() -> Iterator[str]:
    yield "[objective]"
    yield 'ratio_unit = "sequence"       # GSPO: the paper\'s clip range, wider by the drift and noise measured for each lag'
    yield ""


def _distillation(answers: Answers) -> Iterator[str]:
    if answers.teacher:
        yield "[distillation]"
        yield f"teacher = {quoted(answers.teacher)}"
        yield "coefficient = 1.0             # what its view of a token counts beside the reward; `only = true`: it alone"
        yield ""


def _evaluation(plan: ProjectPlan) -> Iterator[str]:
    yield "[evaluation]"
    yield f"every_batches = {5 if plan.is_small else 10}"
    yield f"num_tasks = {plan.num_eval_tasks}"
    yield ""


def _broker(answers: Answers) -> Iterator[str]:
    if answers.place == "kubernetes":
        yield "[broker]"
        yield 'work_endpoint = "tcp://broker:7001"'
        yield 'batch_endpoint = "tcp://broker:7002"'
        yield "lease_s = 30.0"
        yield ""


def _rollout(answers: Answers, plan: ProjectPlan) -> Iterator[str]:
    yield "[rollout]"
    if answers.place == "kubernetes":
        yield "linger = true                 # a Deployment starts again whatever ends"
        yield "start_timeout_s = 1800.0"
    else:
        remark = "             # one GPU each; `gspo run` says which" if answers.place == "node" else ""
        yield f"num_servers = {plan.num_servers}{remark}"
    yield f"max_running = {plan.max_running}              # episodes at a time on each"
    if answers.place == "laptop":
        yield f"max_total_tokens = {plan.max_total_tokens}      # the KV cache: max_running sequences of max_tokens"
    elif plan.static_share is not None:
        yield f'server_args = ["--mem-fraction-static", "{plan.static_share:g}"]     # the rest of the GPU is the learner\'s'
    yield ""


def _learner(answers: Answers, plan: ProjectPlan) -> Iterator[str]:
    yield "[learner]"
    if plan.num_ranks > 1:
        yield f"num_ranks = {plan.num_ranks}                 # GPUs that train; the others generate"
        yield f"zero_stage = {plan.zero_stage}"
    if plan.offload != "none":
        yield f"offload = {quoted(plan.offload)}         # masters and moments are in the host's memory"
    yield f"dtype = {quoted(plan.dtype)}"
    yield f"learning_rate = {plan.learning_rate:g}"
    yield f"max_tokens_per_micro_batch = {plan.max_tokens_per_micro_batch}  # as many as memory allows"
    if plan.activation_checkpointing:
        yield "activation_checkpointing = true"
    yield f"checkpoint_every_batches = {5 if plan.is_small else 10}"
    if answers.place == "kubernetes":
        yield 'weights_endpoint = "tcp://0.0.0.0:7003"'
        yield 'advertised_weights_endpoint = "tcp://learner-0.learner:7003"'


def _lora(plan: ProjectPlan) -> Iterator[str]:
    if plan.lora_rank:
        yield ""
        yield "[lora]"
        yield f"rank = {plan.lora_rank}                     # of the adapters; the model itself stays as it is"
        yield 'target_modules = ["attention"]     # also "mlp", "experts"'


def _security(answers: Answers) -> Iterator[str]:
    if answers.place == "kubernetes":
        yield ""
        yield "[security]"
        yield 'keys = "/etc/gspo/keys"'
        yield 'metrics_host = "0.0.0.0"'
