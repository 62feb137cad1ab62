"""The model card of an export: README.md in the format of the Hugging Face hub."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gspo.settings import Objective
from gspo_services.runs.export.choice import ChosenCheckpoint
from gspo_services.runs.export.versions import gspo_version, versions
from gspo_services.runs.metrics import HeldOut, RunMetrics, number
from gspo_services.shared.learning import LearningOutcome
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import Settings, is_place, told_settings

PAPER: Final = "https://arxiv.org/abs/2507.18071"
_SECRET: Final = re.compile(r"(?i)key|token|secret|password|credential|authorization")
_NOT_TOLD: Final = ("broker", "rollout", "security")
"""Sections about the machines that a run was made on: addresses, ports, places of keys."""
_ROWS: Final = 40
_UNITS: Final = {"token": "Ratios per token", "turn": "Ratios per turn", "sequence": "Ratios per sequence"}
_NAMES: Final = {
    "sequence": f"[GSPO]({PAPER}) (arXiv 2507.18071)",
    "turn": f"[GSPO]({PAPER}) (arXiv 2507.18071), with ratios per turn",
    "token": "[GRPO](https://arxiv.org/abs/2402.03300) (arXiv 2402.03300): ratios per token",
}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The facts that a card shows."""

    settings: Settings
    choice: ChosenCheckpoint
    metrics: RunMetrics | None
    """None: the run has no metrics.jsonl."""
    num_parameters: int
    published: bool | None
    """Whether the ledger has the digest of exactly these weights; None: they cannot be compared."""
    adapter: bool = False
    """The export has the adapters alone."""
    outcome: LearningOutcome | None = None
    """Whether the run learned; None without metrics.jsonl."""


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md."""
    checkpoint, settings = facts.choice.checkpoint, facts.settings
    name = one_line(settings.run.directory.resolve().name, 100)
    parts = [
        _front_matter(settings, facts.adapter),
        f"# {_plain(name).replace('<', '&lt;')}, after {checkpoint.batch_position} batches\n",
        _summary(facts),
        "## Training data and environment\n\n" + _data(settings),
        "## Objective and batches\n\n" + _objective(settings),
        "## Evaluation\n\n" + _evaluation(facts),
        "## Settings\n\nAs the run had them, defaults included, without addresses, ports and keys:\n\n"
        + _block("toml", _toml(settings)),
        "## Versions\n\nOf the program that wrote this export:\n\n" + _versions(),
        "## Reproduce\n\n" + _reproduce(facts),
    ]
    return "\n".join(parts)


def _front_matter(settings: Settings, adapter: bool) -> str:
    base = json.dumps(settings.model.path.name or "unknown")
    objective = settings.objective
    of_clip = "grpo" if objective.ratio_unit == "token" else "gspo"
    tags = [of_clip if objective.surrogate == "clip" else objective.surrogate, "reinforcement-learning"]
    lines = (
        f"library_name: {'peft' if adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        f"base_model: {base}",
        f"tags: {json.dumps(tags)}",
    )
    return "\n".join(["---", *lines, "---", ""])


def _summary(facts: CardFacts) -> str:
    checkpoint, evaluation = facts.choice.checkpoint, facts.choice.evaluation
    lines = [
        f"- Starting model: `{_plain(facts.settings.model.path.name)}`, {facts.num_parameters:,} parameters",
        f"- Trained by reinforcement learning with {_method(facts.settings.objective)}, by gspo {gspo_version()}",
        f"- Policy version {checkpoint.policy_version}, after {checkpoint.batch_position} of "
        f"{facts.settings.run.num_batches} batches",
        f"- Weights: {_weights(facts)}",
    ]
    if evaluation is not None:
        lines.append(f"- Held-out reward: **{evaluation.reward:.4g}** ({evaluation.num_finished} tasks)")
    if facts.choice.remark:
        lines.append(f"- Note: {facts.choice.remark}")
    if facts.outcome is not None:
        lines.append(f"- The run, first evaluation and last: {_plain(facts.outcome.text)}")
    if facts.metrics is not None:
        lines += [f"- Note on the run's end: {_plain(each.text)}" for each in facts.metrics.learning.findings]
    checked = "Every bit was compared with the digest that the learner took of its weights"
    if facts.published:
        checked += ", and with the digest of the version that the engines served"
    return "\n".join([*lines, f"- {checked}.", ""])


def _method(objective: Objective) -> str:
    if objective.surrogate == "clip":
        return _NAMES[objective.ratio_unit]
    return f"{objective.surrogate.upper()}: ratios per token"


def _weights(facts: CardFacts) -> str:
    settings = facts.settings
    modules = _plain(", ".join(settings.lora.target_modules))
    lora = f"adapters (LoRA) of rank {settings.lora.rank}, alpha {settings.lora.alpha:g}, on {modules}"
    if facts.adapter:
        lora += f", {len(settings.lora.adapters)} of them, each in its folder" if settings.lora.adapters else ""
        return f"{lora}, without the starting model, in {settings.learner.dtype}"
    merged = f", with {lora}, merged" if settings.lora.is_used else ""
    return f"{settings.model.dtype}, rounded from the learner's float32 weights as they were served{merged}"


def _data(settings: Settings) -> str:
    agent = settings.agent
    source = agent.function or " ".join(agent.command) or agent.url
    lines = [f"- Environment: `{_plain(settings.environment.name)}`"]
    lines += [f"- `{_plain(key)}`: `{_plain(_shown(key, value))}`" for key, value in settings.environment.options.items()]
    if source:
        lines.append(f"- Agent: `{_plain(source)}`")
    sampling = settings.sampling
    lines.append(
        f"- Sampling: temperature {sampling.temperature:g}, at most {sampling.max_turn_tokens} tokens a turn and "
        f"{sampling.max_tokens} a sequence"
    )
    return "\n".join([*lines, ""])


def _objective(settings: Settings) -> str:
    objective, batch, learner = settings.objective, settings.batch, settings.learner
    first, second = learner.betas
    clip_range = f"clip range 1 - {objective.eps_low:g} to 1 + {objective.eps_high:g}"
    bound = clip_range if objective.has_clip_range else "no clip range"
    lines = [
        f"- {_UNITS[objective.ratio_unit]}, anchor `{objective.anchor}`, {bound}",
        f"- {batch.groups_per_batch} groups of {batch.group_size} trajectories a batch, {batch.mini_batches} optimizer "
        "steps each",
        f"- Tokens at most {batch.max_lag} policy versions old",
        f"- AdamW, learning rate {learner.learning_rate:g}, betas {first:g} and {second:g}, weight decay "
        f"{learner.weight_decay:g}, gradient norm at most {learner.max_grad_norm:g}, in {learner.dtype}",
    ]
    return "\n".join([*lines, ""])


def _evaluation(facts: CardFacts) -> str:
    metrics, checkpoint = facts.metrics, facts.choice.checkpoint
    if metrics is None or not metrics.evaluations:
        return "The run has no evaluation on held-out tasks.\n"
    tasks = facts.settings.evaluation.num_tasks
    header = f"Mean reward on {tasks} held-out tasks, the same each time, sampled as in training:\n"
    training = {int(row["batch"]) + 1: number(row, "train/reward") for row in metrics.batches}
    rows = [
        "| batches | policy version | held-out reward | training reward | tasks finished | |",
        "|---|---|---|---|---|---|",
    ]
    for each in _thinned(metrics.evaluations, checkpoint.policy_version):
        here = "this model" if each == facts.choice.evaluation else ""
        reward = training.get(each.batch)
        trained = "" if reward is None or reward != reward else f"{reward:.4g}"
        rows.append(
            f"| {each.batch} | {each.policy_version} | {each.reward:.4g} | {trained} | {each.num_finished} | {here} |"
        )
    return "\n".join([header, *rows, ""])


def _thinned(evaluations: Sequence[HeldOut], version: int) -> list[HeldOut]:
    """Return about _ROWS of them, spread evenly, with the first, the last and that of ``version``."""
    stride = -(-len(evaluations) // _ROWS)
    last = len(evaluations) - 1
    return [each for at, each in enumerate(evaluations) if at % stride == 0 or at == last or each.policy_version == version]


def _toml(settings: Settings) -> str:
    lines: list[str] = []
    for section, content in told_settings(settings).items():
        if section in _NOT_TOLD:
            continue
        kept = {key: value for key, value in content.items() if value is not None and not is_place(section, key)}
        lines += [f"[{section}]", *(f"{key} = {_toml_value(_shown(key, value))}" for key, value in kept.items()), ""]
    return "\n".join(lines).rstrip()


def _shown(key: str, value: Any) -> Any:
    """Return ``value`` without possible secrets. An option ``api_key`` is one; one named ``max_tokens`` is a number."""
    if isinstance(value, Mapping):
        return {name: _shown(str(name), each) for name, each in value.items()}
    return "***" if isinstance(value, str) and value and _SECRET.search(key) else value


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml_key(name)} = {_toml_value(each)}" for name, each in value.items() if each is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(each) for each in value)}]"
    return json.dumps(value)


def _toml_key(name: object) -> str:
    text = str(name)
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text)


def _versions() -> str:
    return "\n".join([*(f"- {name} {text}" for name, text in versions()), ""])


def _reproduce(facts: CardFacts) -> str:
    position = facts.choice.checkpoint.batch_position
    name = one_line(facts.settings.run.directory.name, 100)
    commands = [
        "gspo run run.toml      # trains again from the starting model; sampling is asynchronous, so results vary",
        f"gspo replay {name} --batches {position}      # trains the recorded batches again, bit for bit, from the ledger",
        f"gspo export {name} --checkpoint {position}",
    ]
    return (
        "`run.toml` has the settings above. The run's directory, if it was kept, has every token, reward and decision:\n\n"
        + _block("", "\n".join(commands))
    )


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.replace('```', '` ` `')}\n```\n"


def _plain(value: object) -> str:
    """Format a user's value for a line of Markdown."""
    text = value if isinstance(value, str) else json.dumps(value)
    return one_line(text, 300).replace("`", "'").replace("|", "/")
