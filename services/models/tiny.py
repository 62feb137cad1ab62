"""A tiny mixture-of-experts model that can do its tasks but has a bad policy: the start of every demonstration.

A byte-level tokenizer with single-token chat markers, and a Qwen3-MoE of a quarter of a million parameters. It learns by
imitation from the environments' own demonstrations: first from a careful teacher, then from a careless one that is right
about a third of the time. The result has the skill and a bad policy. Its sampled reward on held-out problems starts
near 0.3, its greedy reward even lower, and everything above that is the work of reinforcement learning.

The seed determines everything. It takes one minute on one core.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.environments import DemonstratingEnvironment, DemonstrationMessage, RewardJob
from services.environments import create_environment

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("user", "assistant", "tool", "system")
MARKERS = (END, PAD, *(f"<|{role}|>" for role in ROLES))

# One line, no spaces or newlines: a marker, the content, and the end, for each message.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

VOCAB_SIZE = 264
"""256 bytes, 6 markers, and 2 unused ids: SGLang misreports the input log-prob of the last id."""

DEFAULT_ENVIRONMENTS = ("arithmetic", "calculator")
DEFAULT_NUM_STEPS = 600
CAREFUL_SHARE = 0.8
"""Share of the steps with the careful teacher: the skill takes longer to learn than the bad habits."""
BATCH_TOKENS = 1_250
"""Size of a step for each environment, with padding: an environment with longer episodes shows fewer."""
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 30
DECAY_SHARE = 0.45

RECORD_FILE = "tiny_model.json"
MAX_NEW_TOKENS = 16
IGNORED_LABEL = -100


@dataclass(frozen=True)
class TinyProgress:
    """Progress of the cold start; reported about once a second."""

    step: int
    num_steps: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class TinyReport:
    """Facts about the new model. Rewards are means over held-out problems, by environment."""

    directory: Path
    num_parameters: int
    num_steps: int
    seconds: float
    sampled_rewards: Mapping[str, float]
    """At temperature 1: where a training run starts."""
    greedy_rewards: Mapping[str, float]


@dataclass(frozen=True)
class Lesson:
    """A demonstration as tokens."""

    ids: list[int]
    labels: list[int]
    """The id where the model must produce it, IGNORED_LABEL elsewhere."""


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    environments: Sequence[str] = DEFAULT_ENVIRONMENTS,
    num_steps: int = DEFAULT_NUM_STEPS,
    num_eval_episodes: int = 256,
    progress: Callable[[TinyProgress], None],
) -> TinyReport:
    """Make a tiny model and its tokenizer in ``directory``, as an ordinary Hugging Face checkpoint in float32.

    ``directory`` appears complete or not at all; an earlier tiny model there is replaced.
    Raises: ValueError when it holds anything else, or an environment has no demonstrations.
    """
    refuse_foreign_directory(directory)
    schools = {name: _demonstrating(name) for name in environments}
    if not schools:
        raise ValueError("no environment to learn from: name at least one")
    started = time.monotonic()
    tokenizer = build_tokenizer()
    with _one_deterministic_thread(seed):
        model = build_model(tokenizer)
        _imitate(model, tokenizer, list(schools.values()), random.Random(seed), num_steps, progress)
        sampled = {n: measure_reward(model, tokenizer, e, num_eval_episodes, greedy=False) for n, e in schools.items()}
        greedy = {n: measure_reward(model, tokenizer, e, num_eval_episodes, greedy=True) for n, e in schools.items()}
    report = TinyReport(
        directory=directory,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_steps=num_steps,
        seconds=time.monotonic() - started,
        sampled_rewards=sampled,
        greedy_rewards=greedy,
    )
    _save(model, tokenizer, report, seed)
    return report


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte and each marker; any text survives the round trip unchanged."""
    characters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKERS]
    vocabulary = {character: index for index, character in enumerate(characters)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[marker for marker in MARKERS if marker not in (END, PAD)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int = 2,
    num_experts: int = 8,
    num_experts_per_token: int = 2,
    expert_size: int = 64,
) -> Qwen3MoeForCausalLM:
    """An untrained model; torch's random state determines its weights. ``expert_size`` is an expert's inner width."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=expert_size,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=False,
        use_sliding_window=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    config.dtype = torch.float32
    return Qwen3MoeForCausalLM(config)


def refuse_foreign_directory(directory: Path) -> None:
    """Raises: ValueError when ``directory`` holds something other than a tiny model, which must not be overwritten."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file: name a directory")
    if any(directory.iterdir()) and not (directory / RECORD_FILE).is_file():
        raise ValueError(f"{directory} is not empty and not a tiny model: name another directory, or empty it first")


def _demonstrating(name: str) -> DemonstratingEnvironment:
    environment = create_environment(name, {})
    if not isinstance(environment, DemonstratingEnvironment):
        raise ValueError(f'environment "{name}" has no demonstrations, so a tiny model cannot learn from it')
    return environment


@contextmanager
def _one_deterministic_thread(seed: int) -> Iterator[None]:
    """Inside the block torch is deterministic: one thread adds in one order on any machine."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _imitate(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environments: Sequence[DemonstratingEnvironment],
    rng: random.Random,
    num_steps: int,
    progress: Callable[[TinyProgress], None],
) -> None:
    """Supervised training on demonstrations, ``BATCH_TOKENS`` of each environment in a step."""
    batch_sizes = [_batch_size(tokenizer, environment, rng) for environment in environments]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, num_steps))
    started = reported = time.monotonic()
    for step in range(num_steps):
        careful = step < CAREFUL_SHARE * num_steps
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        # One forward per environment: their episodes differ in length, and padding would cost more than it saves.
        for environment, batch_size in zip(environments, batch_sizes, strict=True):
            episodes = [environment.demonstration(rng, careful=careful) for _ in range(batch_size)]
            lessons = encode(tokenizer, episodes)
            loss += _learn(model, lessons, tokenizer.pad_token_id) / len(environments)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        now = time.monotonic()
        if now - reported >= 1.0 or step == num_steps - 1:
            progress(TinyProgress(step=step + 1, num_steps=num_steps, seconds=now - started, loss=loss))
            reported = now


def _batch_size(tokenizer: PreTrainedTokenizerFast, environment: DemonstratingEnvironment, rng: random.Random) -> int:
    samples = encode(tokenizer, [environment.demonstration(rng, careful=True) for _ in range(32)])
    return max(1, BATCH_TOKENS // max(len(lesson.ids) for lesson in samples))


def _learning_rate_factor(step: int, num_steps: int) -> float:
    decay_steps = DECAY_SHARE * num_steps
    return min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / decay_steps)


def encode(tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Sequence[DemonstrationMessage]]) -> list[Lesson]:
    """Demonstrations as tokens; each marked content is trained, with the end marker after it."""
    messages = [message for demonstration in demonstrations for message in demonstration]
    # One call for all: the call is what costs, not the bytes.
    texts = [f"<|{message.role}|>{message.content}{END}" for message in messages]
    tokens = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [_lesson(demonstration, tokens) for demonstration in demonstrations]


def _lesson(demonstration: Sequence[DemonstrationMessage], tokens: Iterator[list[int]]) -> Lesson:
    ids: list[int] = []
    labels: list[int] = []
    for message in demonstration:
        said = next(tokens)
        ids += said
        # The template writes the marker that opens the turn, not the model.
        labels += [IGNORED_LABEL, *said[1:]] if message.train else [IGNORED_LABEL] * len(said)
    return Lesson(ids=ids, labels=labels)


def _learn(model: Qwen3MoeForCausalLM, lessons: Sequence[Lesson], pad_id: int) -> float:
    """Add the gradient of the mean cross-entropy over the trained tokens of ``lessons``; return that mean."""
    length = max(len(lesson.ids) for lesson in lessons)
    ids_BT = torch.tensor([lesson.ids + [pad_id] * (length - len(lesson.ids)) for lesson in lessons])
    labels_BT = torch.tensor([x.labels + [IGNORED_LABEL] * (length - len(x.labels)) for x in lessons])
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits_BTV.reshape(-1, VOCAB_SIZE), labels_BT[:, 1:].reshape(-1), ignore_index=IGNORED_LABEL
    )
    loss.backward()
    return float(loss.item())


@torch.no_grad()
def measure_reward(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: DemonstratingEnvironment,
    num_episodes: int,
    *,
    greedy: bool,
) -> float:
    """Mean return of ``num_episodes`` held-out episodes, played turn by turn at temperature 1 or greedily."""
    source = environment.tasks("eval")
    available = num_episodes if source.num_tasks is None else source.num_tasks
    starts = [environment.start(source.task(index % available), seed=index) for index in range(num_episodes)]
    states = [start.state for start in starts]
    contexts = [_render(tokenizer, start.messages) for start in starts]
    unfinished = list(range(num_episodes))
    total = 0.0
    while unfinished:
        actions = _generate(model, tokenizer, [contexts[index] for index in unfinished], greedy=greedy)
        still_unfinished = []
        for index, action in zip(unfinished, actions, strict=True):
            step = environment.step(states[index], tokenizer.decode(action, skip_special_tokens=True))
            if isinstance(step.reward, RewardJob):
                raise ValueError("a tiny model learns from environments that reward at once, not from reward jobs")
            total += step.reward
            # An action without an end was cut off: no message can follow it.
            if step.done or action[-1] != tokenizer.eos_token_id:
                continue
            states[index] = step.state
            contexts[index] = contexts[index] + action + _render(tokenizer, step.messages)
            still_unfinished.append(index)
        unfinished = still_unfinished
    return total / num_episodes


def _render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _generate(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, contexts: Sequence[list[int]], *, greedy: bool
) -> list[list[int]]:
    """One assistant turn for each context, up to and with the end marker."""
    length = max(len(context) for context in contexts)
    pad_id, end_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids_BT = torch.tensor([[pad_id] * (length - len(context)) + context for context in contexts])
    mask_BT = torch.tensor([[0] * (length - len(context)) + [1] * len(context) for context in contexts])
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output_BT = model.generate(
        input_ids=ids_BT,
        attention_mask=mask_BT,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        **sampling,
    )
    turns: list[list[int]] = output_BT[:, length:].tolist()
    return [turn[: turn.index(end_id) + 1] if end_id in turn else turn for turn in turns]


def _save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, report: TinyReport, seed: int) -> None:
    """Write everything beside the directory, then rename it into place."""
    directory = report.directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}.unfinished"
    previous = directory.parent / f".{directory.name}.{os.getpid()}.previous"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        record = {
            "seed": seed,
            "num_steps": report.num_steps,
            "sampled_rewards": dict(report.sampled_rewards),
            "greedy_rewards": dict(report.greedy_rewards),
        }
        (unfinished / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
        refuse_foreign_directory(directory)
        if directory.exists():
            directory.rename(previous)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)
