"""What a tiny model learns from: demonstrations, and a measure of what it makes of held-out tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from gspo.tasks.environments import DemonstratingEnvironment, RewardJob
from gspo_services.prepare.tiny_models.lessons import Lesson, encode, encode_conversations
from gspo_services.prepare.tiny_models.small_programs import draw_small_problem, right_answer, small_demonstration
from gspo_services.prepare.tiny_models.tokenizer import UNUSED_IDS
from gspo_services.rollout.rendering import Renderer, create_renderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.tasks.environments import TOOLS, Shop, draw_problem, tool_result

MAX_NEW_TOKENS = 16
MAX_CALL_TOKENS = 32
MAX_PROGRAM_TOKENS = 48
MAX_TURNS = 4
"""Turns of an episode with tools."""


class Demonstrator(Protocol):
    """Where demonstrations come from."""

    batch_tokens: int
    """Tokens of an optimizer step, with padding: one with longer episodes shows fewer."""

    def lessons(self, number: int, rng: random.Random, *, careful: bool) -> list[Lesson]:
        """``number`` demonstrations of training tasks, by the careful teacher or by the careless one."""
        ...


class School(Demonstrator, Protocol):
    """Demonstrations, and held-out tasks that measure what a model has learned."""

    def reward(self, model: Qwen3MoeForCausalLM, num_episodes: int, *, greedy: bool) -> float:
        """Mean return of held-out episodes, played turn by turn at temperature 1 or greedily."""
        ...


class EnvironmentSchool:
    """The demonstrations of an environment."""

    batch_tokens = 1_250

    def __init__(self, tokenizer: PreTrainedTokenizerFast, environment: DemonstratingEnvironment) -> None:
        self._tokenizer = tokenizer
        self._environment = environment

    def lessons(self, number: int, rng: random.Random, *, careful: bool) -> list[Lesson]:
        """See ``School.lessons``."""
        return encode(self._tokenizer, [self._environment.demonstration(rng, careful=careful) for _ in range(number)])

    @torch.no_grad()
    def reward(self, model: Qwen3MoeForCausalLM, num_episodes: int, *, greedy: bool) -> float:
        """See ``School.reward``. Raises: ValueError for an environment with reward jobs."""
        tokenizer, environment = self._tokenizer, self._environment
        source = environment.tasks("eval")
        available = num_episodes if source.num_tasks is None else source.num_tasks
        starts = [environment.start(source.task(index % available), seed=index) for index in range(num_episodes)]
        states = [start.state for start in starts]
        contexts = [self._render(start.messages) for start in starts]
        unfinished = list(range(num_episodes))
        total = 0.0
        while unfinished:
            actions = _generate(model, [contexts[index] for index in unfinished], MAX_NEW_TOKENS, greedy=greedy)
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
                contexts[index] = contexts[index] + action + self._render(step.messages)
                still_unfinished.append(index)
            unfinished = still_unfinished
        return total / num_episodes

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class ToolSchool:
    """The demonstrations of the shop, whose conversations have tools. Episodes are rendered as a rollout renders them."""

    batch_tokens = 2_500

    def __init__(self, tokenizer: PreTrainedTokenizerFast, shop: Shop) -> None:
        self._tokenizer = tokenizer
        self._shop = shop
        self._renderer = renderer_of(tokenizer)

    def lessons(self, number: int, rng: random.Random, *, careful: bool) -> list[Lesson]:
        """See ``School.lessons``."""
        conversations = [self._shop.demonstration(rng, careful=careful) for _ in range(number)]
        return encode_conversations(self._tokenizer, conversations, TOOLS)

    @torch.no_grad()
    def reward(self, model: Qwen3MoeForCausalLM, num_episodes: int, *, greedy: bool) -> float:
        """See ``School.reward``."""
        source = self._shop.tasks("eval")
        episodes = [
            _ToolEpisode(self._renderer, source.task(index % (source.num_tasks or num_episodes)))
            for index in range(num_episodes)
        ]
        for _ in range(MAX_TURNS):
            unfinished = [episode for episode in episodes if episode.reward is None]
            if not unfinished:
                break
            contexts = [episode.context for episode in unfinished]
            for episode, turn in zip(unfinished, _generate(model, contexts, MAX_CALL_TOKENS, greedy=greedy), strict=True):
                episode.take(turn)
        return sum(episode.reward or 0.0 for episode in episodes) / num_episodes


class ProgramSchool:
    """Small programs; their problems are tasks of the environment ``code``."""

    batch_tokens = 2_500

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def lessons(self, number: int, rng: random.Random, *, careful: bool) -> list[Lesson]:
        """See ``School.lessons``."""
        return encode(self._tokenizer, [small_demonstration(rng, careful=careful) for _ in range(number)])

    @torch.no_grad()
    def reward(self, model: Qwen3MoeForCausalLM, num_episodes: int, *, greedy: bool) -> float:
        """See ``School.reward``. An answer is right when it is the careful teacher's: no program runs here."""
        rng = random.Random("measured")
        problems = [draw_problem(draw_small_problem, "eval", rng) for _ in range(num_episodes)]
        texts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": problem}], tokenize=False, add_generation_prompt=True
            )
            for problem in problems
        ]
        contexts = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        turns = _generate(model, contexts, MAX_PROGRAM_TOKENS, greedy=greedy)
        answers = [self._tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
        pairs = zip(answers, problems, strict=True)
        return sum(1.0 for answer, problem in pairs if answer == right_answer(problem)) / num_episodes


class _ToolEpisode:
    """One episode of the shop."""

    def __init__(self, renderer: Renderer, task: Mapping[str, Any]) -> None:
        self._renderer = renderer
        self._task = task
        self.context = renderer.prompt_ids([{"role": "user", "content": task["question"]}], TOOLS)
        self.reward: float | None = None
        """None until the episode ends."""

    def take(self, turn: list[int]) -> None:
        """Answer the calls of a turn, or take the turn as the answer and end the episode."""
        parsed = self._renderer.parse(turn, TOOLS)
        results = [
            {"role": "tool", "content": tool_result(self._task, call.name, json.loads(call.arguments_json))}
            for call in parsed.tool_calls
        ]
        bridge = self._renderer.bridge(self.context, turn, results, TOOLS) if results else None
        if bridge is None:
            self.reward = float(parsed.content == self._task["answer"])
        else:
            self.context = [*self.context, *turn, *bridge]


def renderer_of(tokenizer: PreTrainedTokenizerFast) -> Renderer:
    """The renderer that a rollout makes of a model with this tokenizer."""
    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        config = {"vocab_size": len(tokenizer) + UNUSED_IDS, "eos_token_id": tokenizer.eos_token_id}
        Path(directory, "config.json").write_text(json.dumps(config))
        return create_renderer(ChatTokenizer(Path(directory)), "template")


def _generate(
    model: Qwen3MoeForCausalLM, contexts: Sequence[list[int]], max_new_tokens: int, *, greedy: bool
) -> list[list[int]]:
    """One assistant turn for each context, up to and with the end marker."""
    length = max(len(context) for context in contexts)
    pad_id, end_id = model.config.pad_token_id, model.config.eos_token_id
    ids_BT = torch.tensor([[pad_id] * (length - len(context)) + context for context in contexts])
    mask_BT = torch.tensor([[0] * (length - len(context)) + [1] * len(context) for context in contexts])
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output_BT = model.generate(
        input_ids=ids_BT,
        attention_mask=mask_BT,
        max_new_tokens=max_new_tokens,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        **sampling,
    )
    turns: list[list[int]] = output_BT[:, length:].tolist()
    return [turn[: turn.index(end_id) + 1] if end_id in turn else turn for turn in turns]
