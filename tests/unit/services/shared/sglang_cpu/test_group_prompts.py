"""Which requests of a pass wait for a prompt that another one computes. A real server: tests/integration/rollout."""

from types import SimpleNamespace
from typing import Any

import pytest

from gspo_services.shared.sglang_cpu.group_prompts import LEAST_TOKENS, waits

PROMPT = list(range(40))


def request(prompt: list[int] = PROMPT, *, prefix_len: int = 0, extra_key: str | None = None, answer: str = "") -> Any:
    return SimpleNamespace(
        origin_input_ids=list(prompt), prefix_len=prefix_len, extra_key=extra_key, cache_salt=None, output_ids=list(answer)
    )


def a_pass(*taken: Any, running: Any = (), disable: bool = False) -> Any:
    cache, batch = SimpleNamespace(disable=disable), SimpleNamespace(reqs=list(running))
    return SimpleNamespace(can_run_list=list(taken), tree_cache=cache, running_batch=batch)


def test_a_request_waits_for_another_one_with_its_prompt() -> None:
    assert waits(a_pass(request()), request())
    assert waits(a_pass(request(list(range(9))), request()), request())
    assert waits(a_pass(running=[request()]), request()), "its result is not in the cache yet"
    assert not waits(a_pass(running=[request(answer="a")]), request()), "the cache had it, and gave it up"
    assert not waits(a_pass(), request()), "it is the first"


@pytest.mark.parametrize(
    ("taken", "req"),
    [
        (a_pass(request([*PROMPT[:-1], 99])), request()),
        (a_pass(request(extra_key="an adapter")), request()),
        (a_pass(request()), request(prefix_len=len(PROMPT) - LEAST_TOKENS + 1)),
        (a_pass(request(), disable=True), request()),
    ],
    ids=["another prompt", "other weights", "nearly all is in the cache", "nothing is kept"],
)
def test_it_does_not_wait_without_gain(taken: Any, req: Any) -> None:
    assert not waits(taken, req)
