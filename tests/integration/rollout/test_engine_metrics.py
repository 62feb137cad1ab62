"""SGLang's own metrics, exported by the rollout: from a real server, and without one."""

import asyncio
import urllib.request

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.generation import GenerateRequest, SamplingParameters
from gspo_services.rollout.sglang.metrics import ENGINE_METRICS, EngineMetrics
from tests.integration.conftest import SglangServer
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE
from tests.support.processes.ports import free_port

UP = "gspo_rollout_engine_metrics_up"


def exported(registry: CollectorRegistry) -> dict[str, float]:
    """Sums over the labels, by the name of the sample."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def test_the_samples_of_a_group_compute_their_prompt_once(sglang_server: SglangServer) -> None:
    registry = CollectorRegistry()
    registry.register(EngineMetrics(sglang_server.url))
    computed = {"sglang:prompt_tokens_total": 1, "sglang:cached_tokens_total": -1}
    prompts = [[7 + group, *range(20, 50)] for group in range(3)]
    sampling = SamplingParameters(max_new_tokens=4, ignore_eos=True)

    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as engine:

        async def sample(name: str, prompt: list[int]) -> None:
            async for _ in engine.generate(GenerateRequest(rid=name, input_ids=prompt, sampling=sampling)):
                pass

        before = await asyncio.to_thread(exported, registry)
        await asyncio.gather(*(sample(f"{prompt[0]}-{i}", prompt) for prompt in prompts for i in range(8)))
        after, finished = before, "sglang:num_requests_total"
        while after.get(finished, 0) < before.get(finished, 0) + 24:
            await engine.weight_version()
            after = await asyncio.to_thread(exported, registry)
    found = sum(sign * (after[name] - before.get(name, 0)) for name, sign in computed.items())
    # Of each prompt 31 tokens, and in each other sample its last token, whose state is never kept.
    assert found == 3 * (31 + 7)


async def test_the_metrics_of_a_real_server_are_passed_on_under_their_names(sglang_server: SglangServer) -> None:
    registry = CollectorRegistry()
    RolloutMetrics(registry)
    registry.register(EngineMetrics(sglang_server.url))
    before = await asyncio.to_thread(exported, registry)
    sampling = SamplingParameters(max_new_tokens=7, ignore_eos=True)
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as engine:
        async for _ in engine.generate(GenerateRequest(rid="metrics", input_ids=[1, 2, 3], sampling=sampling)):
            pass
        # The server counts a request a moment after its last byte: ask until it has.
        after = await asyncio.to_thread(exported, registry)
        while after.get("sglang:num_requests_total", 0) == before.get("sglang:num_requests_total", 0):
            await engine.weight_version()
            after = await asyncio.to_thread(exported, registry)
    assert after[UP] == 1
    assert after["sglang:generation_tokens_total"] - before.get("sglang:generation_tokens_total", 0) == 7
    assert after["sglang:prompt_tokens_total"] - before.get("sglang:prompt_tokens_total", 0) == 3
    assert after["sglang:max_total_num_tokens"] == 16384
    families = {name.removesuffix("_total").removesuffix("_count") for name in after}
    assert families >= ENGINE_METRICS, "SGLang does not export what the dashboards ask for"


def test_only_the_chosen_metrics_of_a_server_are_passed_on(sglang_server: SglangServer) -> None:
    registry = CollectorRegistry()
    registry.register(EngineMetrics(sglang_server.url))
    with urllib.request.urlopen(f"{sglang_server.url}/metrics") as response:
        own = response.read().decode()
    assert len({family.name for family in text_string_to_metric_families(own)}) > 2 * len(ENGINE_METRICS)
    assert {family.name for family in registry.collect()} <= ENGINE_METRICS | {UP}


def test_without_a_server_the_rollouts_own_metrics_are_there_and_report_it() -> None:
    registry = CollectorRegistry()
    RolloutMetrics(registry)
    registry.register(EngineMetrics(f"http://127.0.0.1:{free_port()}"))
    values = exported(registry)
    assert values[UP] == 0
    assert values["gspo_rollout_episodes_running"] == 0
    assert not [name for name in values if name.startswith("sglang")]
