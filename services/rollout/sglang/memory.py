"""The memory of one server: released between turns on a device that others use, too, and taken back."""

from typing import Final

from gspo_services.rollout.sglang.http import EngineHttp

WEIGHTS_MEMORY: Final = "weights"
CACHE_MEMORY: Final = "kv_cache"


class ServerMemory:
    """What a server has released of its weights and its cache."""

    def __init__(self, http: EngineHttp, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._released: set[str] = set()

    async def release(self, paused_mode: str | None) -> None:
        """Have the paused server give up the memory of weights and cache; nobody may ask for checksums until it is back.

        SGLang 0.5.23 (managers/scheduler_components/weight_updater.py:337-381) asserts that nothing runs, and ends itself if
        something does: hence only after ``pause("retract")``, whose waiting requests it allows. It flushes the prefix cache.
        Without --enable-memory-saver, as on a CPU, no memory moves; everything else happens.
        Raises: EngineError; what it has released is unknown then.
        """
        if paused_mode != "retract":
            raise ValueError(f"the engine is paused with mode {paused_mode}: it is idle only after a pause with retract")
        if tags := sorted({WEIGHTS_MEMORY, CACHE_MEMORY} - self._released):
            await self._http.post("/release_memory_occupation", {"tags": tags}, timeout_s=self._timeout_s)
            self._released |= set(tags)

    async def take_back(self, tag: str) -> None:
        """Take ``WEIGHTS_MEMORY`` or ``CACHE_MEMORY`` back, if it was released.

        The weights are undefined then: SGLang keeps a copy of them only with --enable-weights-cpu-backup
        (model_executor/model_runner_components/load_model_utils.py:307), which would be a second one beside ours. So
        ``Engine.generate`` refuses until a version is loaded. Raises: EngineError.
        """
        if tag in self._released:
            await self._http.post("/resume_memory_occupation", {"tags": [tag]}, timeout_s=self._timeout_s)
            self._released.remove(tag)
