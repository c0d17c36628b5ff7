"""Some of a node's metrics once more under vLLM's names, for routers and dashboards that know only those.

`metrics.compat = ["vllm"]` asks for it. A name is a second look at a family that was just collected: nothing is counted
twice, and both say the same in every scrape. Names and labels are of vLLM 0.20 and later. Colons in names break
Prometheus' rule for exporters, which is why pdd's own have none.

Not here: what pdd does not measure, such as `vllm:lora_requests_info`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# Name of the family at pdd → at vLLM; of counters without _total.
NAMES = {
    "pdd_requests_running": "vllm:num_requests_running",
    "pdd_requests_waiting": "vllm:num_requests_waiting",
    "pdd_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",  # a share as well, for all its name
    "pdd_prompt_tokens": "vllm:prompt_tokens",
    "pdd_generation_tokens": "vllm:generation_tokens",
    "pdd_preemptions": "vllm:num_preemptions",
    "pdd_requests": "vllm:request_success",
    "pdd_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "pdd_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "pdd_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "pdd_request_queue_seconds": "vllm:request_queue_time_seconds",
}
_LABELS = {"outcome": "finished_reason"}


class WithVllmNames(Collector):
    """All families of a registry, each followed by its twin under vLLM's name, where it has one."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        """`model`: the served name, which vLLM has as a label on all of them."""
        self._registry = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            if family.name in NAMES:
                yield self._twin(family)

    def _twin(self, family: Metric) -> Metric:
        twin = Metric(NAMES[family.name], family.documentation, family.type)
        for sample in family.samples:
            name = twin.name + sample.name.removeprefix(family.name)
            twin.add_sample(name, {"model_name": self._model, "engine": "0", **_renamed(sample.labels.items())}, sample.value)
        return twin


def _renamed(labels: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {_LABELS.get(label, label): value for label, value in labels}
