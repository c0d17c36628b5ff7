"""Turns what parts report into numbers: latencies and outcomes into metrics, traffic into flows, failures into counts.

Steps are observed where they run (steps.py). Owner: the main loop.
"""

from __future__ import annotations

import collections

from pdd.daemon.flows import IN, OUT, Flows
from pdd.daemon.latency import Latencies
from pdd.daemon.ledger import Ledger
from pdd.engine.request import EngineEvent, Finished, KvReserved
from pdd.messenger.status import AttemptDone, JobDone
from pdd.metrics import Metrics


class Meter:
    """The engine's events come here after the ledger has taken them."""

    def __init__(self, metrics: Metrics, ledger: Ledger, latencies: Latencies) -> None:
        self.flows = Flows()
        self.failures: collections.Counter[str] = collections.Counter()  # attempts of this decoder, by reason
        self.cached_tokens = 0
        self._metrics = metrics
        self._ledger = ledger
        self._latencies = latencies

    def engine_event(self, event: EngineEvent) -> None:
        match event:
            case KvReserved():
                entry = self._ledger.find(event.request_id)
                if entry is not None and entry.attempts == 1 and entry.started is not None:
                    self._metrics.queue_time.observe(entry.started - entry.received)
            case Finished():
                self.cached_tokens += event.cached_tokens
                self._metrics.cached_tokens.inc(event.cached_tokens)
            case _:
                pass

    def attempt_done(self, done: AttemptDone) -> None:
        """A try at the KV of a prompt is over."""
        if not done.whole:
            self.failures[done.reason] += 1
        if not done.peer:  # nobody was asked
            return
        flow = self.flows.of(done.peer, IN, done.via)
        if done.whole:
            seconds = 0.0 if done.asked is None else done.finished - done.asked  # None: there was nothing to send
            flow.bytes += done.bytes
            flow.units += done.units
            flow.times.append(seconds)
            self._metrics.kv_transfer.labels(IN, done.via).observe(seconds)
            self._latencies.kv_wait.observe(seconds)
        elif done.reason != "cancelled":
            flow.failed += 1

    def job_done(self, done: JobDone) -> None:
        """A prefill for a decoder is over."""
        flow = self.flows.of(done.peer, OUT, done.via)
        flow.writes += done.writes
        flow.bytes += done.bytes
        flow.units += done.units
        flow.failed += done.reason not in ("", "cancelled")
        if done.whole and done.started is not None:
            flow.times.append(done.busy_seconds)
            self._metrics.kv_transfer.labels(OUT, done.via).observe(done.busy_seconds)
