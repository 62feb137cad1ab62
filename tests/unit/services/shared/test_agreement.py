"""An engine's log-probs of a probe beside the learner's: what is rounding, and what differs otherwise."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gspo_protocol.messages import Probe
from gspo_protocol.probes import probe_spans, probe_tokens
from gspo_services.shared.agreement import disagreement

TOKENS = 1000
CONFIG = {"rms_norm_eps": 1e-6, "sliding_window": 256, "rope_parameters": {"rope_theta": 1e4}, "eos_token_id": 1}
PLACES = np.concatenate([np.arange(first, last) for first, last in probe_spans(TOKENS)])
Moved = Callable[[Any], Any]


def compared(moved: Moved, dtype: str = "float32", **other: Any) -> str:
    """What is said where the engine's log-probs are moved by so much at each place."""
    rng = np.random.default_rng(1)
    own = rng.uniform(-8, -1, len(PLACES))
    probe = Probe(
        TOKENS, 100, own.tolist(), other.pop("of_learner", dtype), other.pop("config_of_learner", json.dumps(CONFIG))
    )
    found = own + rng.normal(0, {"float32": 2e-6, "bfloat16": 0.02}[dtype], len(own)) + moved(PLACES)
    return disagreement(found.tolist(), probe, **{"dtype": dtype, "device": "cpu", "config": CONFIG} | other)


def test_the_probe_reaches_the_end_and_has_windows_between() -> None:
    assert probe_spans(1000) == [(1, 64), (96, 128), (224, 256), (480, 512), (968, 1000)]
    assert probe_spans(130) == [(1, 64), (96, 128), (128, 130)]
    assert probe_spans(64) == [(1, 64)]
    assert probe_spans(2) == [(1, 2)]
    tokens = probe_tokens(1000, 50)
    assert set(tokens.tolist()) == set(range(49))
    assert tokens[480:512].tolist() == tokens[:32].tolist()
    assert probe_tokens(300, 50).tolist()[:256] == tokens[:256].tolist()


def test_rounding_is_no_difference() -> None:
    assert compared(lambda place: 0.0 * place) == ""
    assert compared(lambda place: 0.0 * place, "bfloat16") == ""
    # A router's choice that rounding decides.
    assert compared(lambda place: np.where(place % 20 == 3, 1.5, 0.0), "bfloat16") == ""


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        (
            lambda place: np.where(place >= 300, 0.3, 0.0),
            "from token 480 of 1000 on.*Before it they agree: a sliding window",
        ),
        (lambda place: 1e-3 * place, "It grows with the position: rope's theta"),
        (lambda place: -0.2 + 0 * place, "the engine's are lower.*nearly the same for all tokens: the engine's vocabulary"),
        (lambda place: np.where(place % 2, 0.2, -0.3), "there from the first token on: a norm's epsilon"),
        (lambda place: np.nan * place, "from token 1 of 1000 on"),
    ],
)
def test_the_place_where_it_begins_says_what_may_differ(moved: Moved, said: str) -> None:
    assert re.search(said, compared(moved))
    assert compared(moved, "bfloat16")


def test_configurations_that_differ_are_named_by_their_keys() -> None:
    served = CONFIG | {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6}, "eos_token_id": 7}
    found = compared(lambda place: 1e-2 + 0 * place, config=served)
    assert "rms_norm_eps is 1e-05 in the engine, 1e-06 in the learner; rope_parameters.rope_theta is 1000000.0" in found
    assert "eos" not in found
    assert "config.json" not in compared(lambda place: 1e-2 + 0 * place, config=None)
    assert "unknown" in compared(lambda place: 1e-4 * place, config_of_learner="")


def test_the_less_precise_side_says_what_rounding_explains() -> None:
    def moved(place: Any) -> Any:
        return np.where(place % 2, 0.01, -0.01)

    assert compared(moved)
    assert compared(moved, of_learner="bfloat16") == ""
    assert compared(moved, quantised_cache=True) == ""
    # A server that says nothing of its type.
    assert disagreement([-1.0], Probe(2, 9, [-1.01], "float32"), dtype="auto", device="cpu") == ""
    assert disagreement([-1.0], Probe(2, 9, [-1.0005], "float32"), dtype="float32", device="cuda") == ""


def test_another_number_of_log_probs_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="a probe of 2 tokens has 1 log-probs, the learner gave 1 and the engine 2"):
        disagreement([-1.0, -2.0], Probe(2, 9, [-1.0], "float32"), dtype="float32", device="cpu")
