"""Prometheus metrics with closed label sets."""

from __future__ import annotations

from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from kiln_core.inference import Usage

__all__ = ["METRICS", "Metrics"]

# their names would be metrics nobody declared
disable_created_metrics()  # type: ignore[no-untyped-call] # untyped upstream

METRICS: Final = {
    "kiln_chat_requests_total": "Chat completions by outcome.",
    "kiln_chat_tokens_total": "Tokens of chat completions by kind.",
    "kiln_completion_requests_total": "Plain and batched completions by outcome.",
    "kiln_completion_tokens_total": "Tokens of plain and batched completions by kind.",
    "kiln_openenv_training_preflights_total": "Training preflights by outcome.",
    "kiln_training_jobs_total": "Finished training jobs by type and outcome.",
    "kiln_training_active": "Training jobs running now.",
    "kiln_training_queued": "Training jobs waiting.",
    "kiln_adapters_loaded": "Adapters that can be served now.",
}
"""Every metric and its help text."""


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.chat_requests = self._counter("kiln_chat_requests_total", "status")
        self.chat_tokens = self._counter("kiln_chat_tokens_total", "kind")
        self.completion_requests = self._counter(
            "kiln_completion_requests_total", "status"
        )
        self.completion_tokens = self._counter("kiln_completion_tokens_total", "kind")
        self.preflights = self._counter(
            "kiln_openenv_training_preflights_total", "status"
        )
        self.jobs = self._counter("kiln_training_jobs_total", "type", "status")
        self.training_active = self._gauge("kiln_training_active")
        self.training_queued = self._gauge("kiln_training_queued")
        self.adapters_loaded = self._gauge("kiln_adapters_loaded")
        for status in ("completed", "failed", "cancelled", "refused"):
            self.chat_requests.labels(status=status)
            self.completion_requests.labels(status=status)
        for kind in ("prompt", "completion"):
            self.chat_tokens.labels(kind=kind)
            self.completion_tokens.labels(kind=kind)
        for status in ("accepted", "rejected"):
            self.preflights.labels(status=status)
        for status in ("completed", "failed", "cancelled"):
            self.jobs.labels(type="grpo", status=status)

    def render(self) -> tuple[bytes, str]:
        """Return the exposition text and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def count_tokens(self, tokens: Counter, usage: Usage) -> None:
        """Count the tokens of an answer.

        Args:
            tokens: Of this kind of answer, labelled by kind.
            usage: What it used.
        """
        tokens.labels(kind="prompt").inc(usage.prompt_tokens)
        tokens.labels(kind="completion").inc(usage.completion_tokens)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(
            name.removesuffix("_total"), METRICS[name], labels, registry=self.registry
        )

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, METRICS[name], registry=self.registry)
