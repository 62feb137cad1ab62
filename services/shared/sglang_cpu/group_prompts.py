"""A group's requests come together: one of them computes the prompt, and the others wait for the next pass, which finds it
in the prefix cache.

SGLang puts the others at the end of its queue only, and takes them into the same pass while that has room: a prompt of 36
tokens was computed 28 times at once. On a CPU this was most of the work of short answers.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any, Final

LEAST_TOKENS: Final = 8
"""A prompt of which fewer tokens are missing is computed again: a pass of its own would cost more."""


def share_prompts(schedule_policy: Any) -> None:
    """Change the classes of SGLang's module ``schedule_policy``, and of its scheduler once that is loaded."""
    adder, hurry = schedule_policy.PrefillAdder, _Hurry()
    add = adder.add_one_req

    def add_one_req(self: Any, req: Any, *others: Any, **more: Any) -> Any:
        if waits(self, req):
            hurry.next_pass()
            # "Go on with the others": the request stays in the queue.
            return schedule_policy.AddReqResult.CONTINUE
        return add(self, req, *others, **more)

    adder.add_one_req = add_one_req


class _Hurry:
    """Requests wait for a prompt: the pass after the next does not wait until eight tokens are decoded."""

    def __init__(self) -> None:
        self._wanted = self._changed = False

    def next_pass(self) -> None:
        """Called while a pass is filled."""
        self._wanted = True
        if self._changed:
            return
        self._changed = True
        # It imports the module that calls ``share_prompts``, and so it is not there before.
        scheduler: Any = sys.modules["sglang.srt.managers.scheduler"].Scheduler
        arm = scheduler._arm_prefill_decode_interval

        def arm_interval(own: Any, batch: Any) -> None:
            arm(own, batch)
            if self._wanted and batch is not None and batch.forward_mode.is_extend():
                self._wanted = False
                own._prefill_decode_interval_remaining = 0

        scheduler._arm_prefill_decode_interval = arm_interval


def waits(adder: Any, req: Any) -> bool:
    """Return whether another request computes the prompt of ``req``: in the pass that ``adder`` fills, or in the one before,
    of which no result has come yet."""
    if getattr(adder.tree_cache, "disable", False):
        return False
    prompt = req.origin_input_ids
    if len(prompt) - req.prefix_len < LEAST_TOKENS:
        return False
    in_flight = (other for other in adder.running_batch.reqs if not other.output_ids)
    return any(
        other.origin_input_ids == prompt and other.extra_key == req.extra_key and other.cache_salt == req.cache_salt
        for other in chain(adder.can_run_list, in_flight)
    )
