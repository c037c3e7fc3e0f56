"""Counters and histograms that cost a few additions, and one table entry (`Metric`) that says what each of them is.

prometheus_client's own take a lock and walk the buckets one by one: a microsecond and more, for every token of every
stream. Everything here is touched by one event loop alone, so an observation is a bisection and two additions; the
library only writes the text. Invariant: bucket counts are kept apart and summed when they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """What one metric is: the name as it is scraped, its type, its text, its labels and (histograms) its buckets'
    upper bounds. `needs` says without what it is absent."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    needs: str = ""


class Counters:
    """The values of one counter by label values, in the order of the metric's labels."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[tuple[str, ...], float] = {} if metric.labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        """Count `amount` more."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def family(self) -> Family:
        """As prometheus_client writes it."""
        return counter(self.metric, self.values.items())


class Histogram:
    """The observations of one histogram without labels."""

    __slots__ = ("counts", "metric", "sum")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of `value`."""
        self.counts[bisect_left(self.metric.buckets, value)] += count
        self.sum += value * count

    def family(self, name: str = "", labels: tuple[tuple[str, str], ...] = ()) -> Family:
        """As prometheus_client writes it, under another name and with fixed labels if given."""
        bounds = [str(float(bound)) for bound in self.metric.buckets]
        total, rows = 0, []
        for bound, count in zip([*bounds, "+Inf"], self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        family = HistogramMetricFamily(name or self.metric.name, self.metric.help, labels=[key for key, _ in labels])
        family.add_metric([value for _, value in labels], rows, self.sum)
        return family


Rows = Iterable[tuple[tuple[str, ...], float]]


def counter(metric: Metric, rows: Rows) -> Family:
    """A counter from (label values, value) rows."""
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def gauge(metric: Metric, rows: Rows) -> Family:
    """A gauge from (label values, value) rows."""
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family
