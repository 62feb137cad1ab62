"""Episodes of one turn, sampled in one batch with a key-value cache: a small inference engine in torch.

Every token has its log-probability under the exact logits that it was drawn from, in the sampler's own precision, as in an
engine. A run trains against the difference between these numbers and the learner's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from benchmarks.study.config import Noise
from gspo.environments import ChatMessage, DemonstratingEnvironment, RewardJob, Task
from gspo.model.packing import TrainSequence

MAX_NEW_TOKENS = {"arithmetic": 16, "countdown": 64}
"""The longest right answers have 3 and 60 tokens."""


@dataclass(frozen=True)
class Answer:
    """The sampler's answer to one prompt."""

    ids: list[int]
    logprobs: list[float]


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
        )


class Sampler:
    """A copy of the learner's model that lags behind it, or is less exact, as configured."""

    def __init__(
        self,
        model: Qwen3MoeForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        environment: DemonstratingEnvironment,
        *,
        max_new_tokens: int,
        noise: Noise = "none",
        noise_sigma: float = 0.0,
    ) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False)
        if noise == "bf16":
            self._model = self._model.to(torch.bfloat16)
        self._tokenizer = tokenizer
        self._environment = environment
        self._max_new_tokens = max_new_tokens
        self._noise = noise
        self._noise_sigma = noise_sigma

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], *, seed: int) -> None:
        """Take these weights; the same seed gives the same noise."""
        self._model.load_state_dict(weights)
        if self._noise != "weights":
            return
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + self._noise_sigma * noise)

    def play(self, tasks: Sequence[Task], *, seed: int) -> list[Episode]:
        """Play one episode of each task."""
        starts = [self._environment.start(task, seed=0) for task in tasks]
        prompts = [self._prompt(start.messages[0]) for start in starts]
        generator = torch.Generator().manual_seed(seed)
        answers = self._with_noise(self._generate(prompts, generator), generator)
        episodes = []
        for start, prompt, answer in zip(starts, prompts, answers, strict=True):
            said = self._tokenizer.decode(answer.ids, skip_special_tokens=True)
            reward = self._environment.step(start.state, said).reward
            if isinstance(reward, RewardJob):
                raise ValueError("the study's environments must reward at once, not with a reward job")
            episodes.append(Episode(prompt, answer, reward if answer.ids[-1] == self._tokenizer.eos_token_id else 0.0))
        return episodes

    def _prompt(self, message: ChatMessage) -> list[int]:
        text = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _with_noise(self, answers: list[Answer], generator: torch.Generator) -> list[Answer]:
        if self._noise != "logprobs":
            return answers
        noisy = []
        for answer in answers:
            noise = self._noise_sigma * torch.randn(len(answer.logprobs), generator=generator)
            # A log-prob is at most 0; for a nearly certain token this halves the noise.
            noisy.append(Answer(answer.ids, (torch.tensor(answer.logprobs) + noise).clamp(max=0.0).tolist()))
        return noisy

    @torch.no_grad()
    def _generate(self, prompts: Sequence[list[int]], generator: torch.Generator) -> list[Answer]:
        """Sample at temperature 1 up to and including the end marker. Finished rows leave the batch."""
        answers = [Answer([], []) for _ in prompts]
        length = max(map(len, prompts))
        pad_id, end_id = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        ids_BT = torch.tensor([[pad_id] * (length - len(prompt)) + prompt for prompt in prompts])
        mask_BT = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        padded = not bool(mask_BT.all())
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        cache, rows_B = DynamicCache(), torch.arange(len(prompts))
        for _ in range(self._max_new_tokens):
            states_BTH = self._model.model(
                input_ids=ids_BT,
                position_ids=positions_BT,
                attention_mask=mask_BT if padded else None,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            logprobs_BV = self._model.lm_head(states_BTH[:, -1]).float().log_softmax(dim=-1)
            next_B = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
            for row, token, logprob in zip(
                rows_B.tolist(), next_B[:, 0].tolist(), logprobs_BV.gather(1, next_B)[:, 0].tolist(), strict=True
            ):
                answers[row].ids.append(token)
                answers[row].logprobs.append(logprob)
            alive_B = torch.nonzero(next_B[:, 0] != end_id)[:, 0]
            if len(alive_B) == 0:
                break
            if len(alive_B) < len(rows_B):
                cache.batch_select_indices(alive_B)
                rows_B, next_B, mask_BT, positions_BT = (x[alive_B] for x in (rows_B, next_B, mask_BT, positions_BT))
            ids_BT = next_B
            mask_BT = torch.cat([mask_BT, torch.ones_like(next_B)], dim=1)
            positions_BT = positions_BT[:, -1:] + 1
        return answers
