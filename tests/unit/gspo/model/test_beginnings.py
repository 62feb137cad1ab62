"""Sequences that begin alike, computed with the beginning once, against the same sequences whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.model import attention
from gspo.model.attention import segment_attention
from gspo.model.beginnings import FamilyBoundaries, PromptFamily, can_share, shared_row
from gspo.model.packing import PackedBatch, TrainSequence, pack
from gspo.model.policy import prepare_policy
from gspo_services.learner.engine.forward import model_inputs
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, tiny_qwen3_moe, tiny_tied_model
from tests.support.loss.sequences import after_prompt, random_sequence

FAMILIES = (0, 0, 0, 1, 2, 2, 2, 2)


def members() -> list[TrainSequence]:
    """Three answers to one prompt, one of them empty; one alone; four to another, two of which are the same."""
    made = [random_sequence(length, seed, vocab_size=TINY_VOCAB_SIZE) for seed, length in enumerate((12, 9, 20, 15))]
    first, second = (np.arange(prompt, 3 * prompt, 2) % TINY_VOCAB_SIZE for prompt in (9, 14))
    sequences = [after_prompt(first, each) for each in made[:3]]
    sequences += [made[3], *(after_prompt(second, made[index]) for index in (0, 1, 0, 2))]
    return [
        each.with_advantages(np.zeros(each.num_tokens, np.float32))
        for each in [*sequences[:1], _cut(sequences[1], 9), *sequences[2:]]
    ]


def _cut(sequence: TrainSequence, length: int) -> TrainSequence:
    names = ("token_ids", "action_mask", "behaviour_logprobs", "versions", "turn_ids")
    return replace(sequence, **{name: getattr(sequence, name)[:length] for name in names})


def passed(model: Any, packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the actions, after a backward pass of a weighted sum of both."""
    result = model(**model_inputs(packed, None), with_entropy=True, entropy_gradient=True)
    weights_N = torch.linspace(-1, 1, len(packed.scored_N))
    logprobs_N, entropies_N = result.logprobs_T[packed.scored_N], result.entropies_T[packed.scored_N]
    ((logprobs_N + 0.1 * entropies_N) * weights_N).sum().backward()
    return logprobs_N.detach(), entropies_N.detach()


@pytest.mark.parametrize("masked_tokens", [512, 0])
@pytest.mark.parametrize("build", [tiny_qwen3_moe, tiny_tied_model])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_logprobs_entropies_and_gradients_are_those_of_whole_sequences(
    build: Any, activation_checkpointing: bool, masked_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MASKED_TOKENS", masked_tokens)
    torch.set_num_threads(1)
    whole, shared = (pack(members(), policy_version=0, families=families) for families in (None, FAMILIES))
    assert whole.shared is None
    assert shared.shared is not None
    # 9 + 12 + 20 and 15, then 14 + 12 + 9 + 20: of the two that are the same, one.
    assert shared.shared.input_ids.shape == (1, 41 + 15 + 55)
    found = []
    for packed in (whole, shared):
        model = build()
        prepare_policy(model, logprob_chunk_tokens=7, activation_checkpointing=activation_checkpointing)
        values = passed(model, packed)
        found.append((values, {name: each.grad for name, each in model.named_parameters()}))
    (expected, expected_gradients), (values, gradients) = found
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() <= 1e-4 * expected_gradients[name].norm(), name


sequences_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=6)


@given(rows=sequences_of_tokens, data=st.data())
def test_each_token_of_the_row_has_itself_its_position_and_all_before_it(rows: list[list[int]], data: st.DataObject) -> None:
    families = sorted(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    found = shared_row([np.array(row) for row in rows], families)
    if found is None:
        return
    owners, places = [], iter(found.places_T.tolist())
    boundaries = FamilyBoundaries(found.families)
    starts = list(boundaries)[:-1]
    for row in rows:
        own = [next(places) for _ in row]
        owners.append(own)
        assert found.input_ids[0, own].tolist() == row
        assert found.position_ids[0, own].tolist() == list(range(len(row)))
        index = max(index for index, start in enumerate(starts) if start <= own[0])
        family, start = found.families[index], starts[index]
        seen = boundaries.mask(family, torch.device("cpu"), torch.float32) if family.rests else None
        for number, place in enumerate(own):
            visible = range(start, place + 1) if seen is None else (seen[place - start] == 0).nonzero().flatten() + start
            assert [int(each) for each in visible] == own[: number + 1]
    assert sorted({place for own in owners for place in own}) == list(range(found.input_ids.shape[1]))
    assert found.places_T[found.firsts_U].tolist() == list(range(found.input_ids.shape[1]))


def test_sequences_that_have_little_in_common_stay_whole() -> None:
    long = [np.array([1, *range(10 * index, 10 * index + 20)]) for index in range(3)]
    assert shared_row(long, [0, 0, 0]) is None
    assert shared_row([long[0], long[0]], [0, 1]) is None, "of two groups"
    found = shared_row([long[0], long[0]], [0, 0])
    assert found is not None
    assert found.families == (PromptFamily(21),), "all of one is the beginning of the other"


def test_models_with_windows_states_or_caps_do_not_share() -> None:
    assert can_share({"layer_types": ["full_attention"] * 2, "sliding_window": 8})
    assert can_share({"sliding_window": None})
    others: Sequence[dict[str, Any]] = (
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["sliding_attention"]},
        {"sliding_window": 4096},
        {"attn_logit_softcapping": 50.0},
    )
    assert not any(can_share(config) for config in others)
    heads = torch.zeros(1, 2, 6, 4)
    boundaries = FamilyBoundaries([PromptFamily(2, (2, 2))])
    for options in ({"sliding_window": 3}, {"softcap": 2.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"cannot share common beginnings; use learner\.share_prompts = false"):
            segment_attention(torch.nn.Identity(), heads, heads, heads, None, cu_seqlens=boundaries, **options)
