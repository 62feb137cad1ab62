"""Episodes of one turn, sampled in one batch.

Every token has its log-probability under the exact logits that it was drawn from, in the sampler's own precision, as in an
engine. A run trains against the difference between these numbers and the learner's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

from benchmarks.study.config import Noise, TaskName
from benchmarks.study.decoding import Answer, Decoder, Order
from gspo.model.packing import TrainSequence
from gspo.tasks.environments import ChatMessage, DemonstratingEnvironment, RewardJob, Start, Task

MAX_NEW_TOKENS: dict[TaskName, int] = {"arithmetic": 16, "countdown": 64, "long-countdown": 168, "mixed-countdown": 126}
"""The longest right answers have 3, 60, 160 and 120 tokens."""


@dataclass(frozen=True)
class Episode:
    """One finished episode."""

    prompt_ids: list[int]
    answer: Answer
    reward: float

    def train_sequence(self, version: int) -> TrainSequence:
        """Return the learner's form of the episode, without advantages."""
        num_prompt, num_answer = len(self.prompt_ids), len(self.answer.ids)
        observed = np.zeros(num_prompt)
        mask = np.concatenate([observed, np.ones(num_answer)]).astype(np.bool_)
        return TrainSequence(
            token_ids=np.array(self.prompt_ids + self.answer.ids, dtype=np.int64),
            action_mask=mask,
            behaviour_logprobs=np.concatenate([observed, self.answer.logprobs]).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int64),
            turn_ids=np.where(mask, 0, -1).astype(np.int32),
            temperature=1.0,
            experts=np.stack(self.answer.experts) if self.answer.experts else None,
        )


@dataclass(frozen=True)
class Part:
    """Tasks to play under one version's weights. The same seeds give the same episodes."""

    weights: Mapping[str, Tensor]
    tasks: Sequence[Task]
    seed: int
    noise_seed: int = 0


class Sampler:
    """Plays episodes with weights that lag behind the learner's, or in less exact arithmetic, as configured."""

    def __init__(
        self,
        config: Qwen3MoeConfig,
        tokenizer: PreTrainedTokenizerFast,
        environment: DemonstratingEnvironment,
        *,
        max_new_tokens: int,
        noise: Noise = "none",
        noise_sigma: float = 0.0,
    ) -> None:
        self._decoder = Decoder(
            config=config,
            bf16=noise == "bf16",
            fp8=noise == "fp8",
            pad_id=tokenizer.pad_token_id,
            end_id=tokenizer.eos_token_id,
        )
        self._tokenizer = tokenizer
        self._environment = environment
        self._max_new_tokens = max_new_tokens
        self._noise = noise
        self._noise_sigma = noise_sigma

    def play(self, parts: Sequence[Part]) -> list[list[Episode]]:
        """Play one episode of each task of each part."""
        starts = [[self._environment.start(task, seed=0) for task in part.tasks] for part in parts]
        orders = [
            Order(self._noisy(part), [self._prompt(start.messages[0]) for start in started], part.seed)
            for part, started in zip(parts, starts, strict=True)
        ]
        answered = self._decoder.decode(orders, self._max_new_tokens)
        return [
            [
                self._episode(start, prompt, answer)
                for start, prompt, answer in zip(started, order.prompts, self._with_noise(answers, part), strict=True)
            ]
            for started, order, answers, part in zip(starts, orders, answered, parts, strict=True)
        ]

    def _episode(self, start: Start, prompt: list[int], answer: Answer) -> Episode:
        said = self._tokenizer.decode(answer.ids, skip_special_tokens=True)
        reward = self._environment.step(start.state, said).reward
        if isinstance(reward, RewardJob):
            raise ValueError("the study's environments must reward at once, not with a reward job")
        return Episode(prompt, answer, reward if answer.ids[-1] == self._tokenizer.eos_token_id else 0.0)

    def _prompt(self, message: ChatMessage) -> list[int]:
        text = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _noisy(self, part: Part) -> Mapping[str, Tensor]:
        if self._noise != "weights":
            return part.weights
        generator = torch.Generator().manual_seed(part.noise_seed)
        return {
            name: tensor * (1 + self._noise_sigma * torch.randn(tensor.shape, generator=generator))
            for name, tensor in part.weights.items()
        }

    def _with_noise(self, answers: list[Answer], part: Part) -> list[Answer]:
        if self._noise != "logprobs":
            return answers
        generator = torch.Generator().manual_seed(part.noise_seed)
        noisy = []
        for answer in answers:
            noise = self._noise_sigma * torch.randn(len(answer.logprobs), generator=generator)
            # A log-prob is at most 0; for a nearly certain token this halves the noise.
            logprobs = (torch.tensor(answer.logprobs) + noise).clamp(max=0.0).tolist()
            noisy.append(replace(answer, logprobs=logprobs))
        return noisy
