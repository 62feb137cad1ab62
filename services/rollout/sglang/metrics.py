"""Exports SGLang's own metrics with the rollout's: its port is a random one on loopback, where no scrape finds it."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

import aiohttp
import structlog
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gspo_services.shared.runtime.http_content import UNCOMPRESSED, content_within

log = structlog.get_logger()

TIMEOUT_S: Final = 3.0
"""Less than a scrape's timeout: a server that does not answer must not cost the rollout's own metrics."""

PAGE_BYTES: Final = 16 * 2**20

ENGINE_METRICS: Final = frozenset(
    {
        "sglang:cache_hit_rate",
        "sglang:cached_tokens",
        "sglang:e2e_request_latency_seconds",
        "sglang:gen_throughput",
        "sglang:generation_tokens",
        "sglang:max_total_num_tokens",
        "sglang:num_queue_reqs",
        "sglang:num_requests",
        "sglang:num_retracted_reqs",
        "sglang:num_running_reqs",
        "sglang:prompt_tokens",
        "sglang:time_to_first_token_seconds",
        "sglang:token_usage",
    }
)
"""Families that are passed on, under SGLang's names; about a hundred others are left out."""


class EngineMetrics(Collector):
    """Asks the server at ``url`` at every scrape. Register it with the rollout's metrics.

    Collect in a thread without an event loop, such as the telemetry server's: each scrape runs its own loop.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url = f"{url}/metrics"
        self._timeout_s = timeout_s

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering sends no request."""
        return ()

    def collect(self) -> Iterator[Metric]:
        families = self._fetch()
        up = GaugeMetricFamily(
            "gspo_rollout_engine_metrics_up", "1 while SGLang answers /metrics (--enable-metrics), asked at each scrape"
        )
        up.add_metric([], 0 if families is None else 1)
        yield up
        yield from families or ()

    def _fetch(self) -> list[Metric] | None:
        """Fetch the metrics; None: the server gave no readable answer."""
        try:
            text = asyncio.run(self._page())
            return [family for family in text_string_to_metric_families(text) if family.name in ENGINE_METRICS]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            log.debug("engine_metrics_missing", url=self._url, error=str(error) or type(error).__name__)
            return None

    async def _page(self) -> str:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with (
            aiohttp.ClientSession(
                timeout=timeout, trust_env=False, raise_for_status=True, auto_decompress=False, headers=UNCOMPRESSED
            ) as session,
            session.get(self._url) as response,
        ):
            return (await content_within(response, PAGE_BYTES)).decode()
