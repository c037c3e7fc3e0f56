"""`docs/metrics.md` lists what the catalogue has, and the dashboard asks for nothing else. `make docs` writes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest

from pellucid.telemetry import catalogue, vllm_names
from pellucid.telemetry.families import Metric

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "metrics.md"
DASHBOARD = DOCS / "grafana.json"


def render(page: str) -> str:
    """The page with its two tables made anew."""
    rows = ["| metric | | labels | |", "|---|---|---|---|", *map(_row, catalogue.ALL)]
    names = [
        "| vLLM's name | ours |",
        "|---|---|",
        *(f"| `{n}` | {_code(ours)} |" for n, ours in vllm_names.NAMES.items()),
    ]
    return _between(_between(page, "metrics", rows), "vllm", names)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    needs = f" Needs {metric.needs}." if metric.needs else ""
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{needs} |"


def _code(text: str) -> str:
    return re.sub(r"\bpellucid_\w+", r"`\g<0>`", text)


def _between(page: str, name: str, lines: list[str]) -> str:
    pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    assert pattern.search(page), f"{PAGE} has no place for {name}"
    table = "\n".join(["", *lines, "", ""])
    return pattern.sub(lambda match: match[1] + table + match[2], page)


def test_the_page_lists_what_there_is():
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "docs/metrics.md is stale: run `make docs`"


def scraped() -> set[str]:
    """The names of all samples that a scrape can give."""
    names = set()
    for metric in catalogue.ALL:
        suffixes = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        names |= {metric.name + suffix for suffix in suffixes}
    return names


def expressions() -> dict[str, str]:
    """Every query of the dashboard, by panel and number."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return {
        f"{panel['title']} {index}": target["expr"]
        for panel in panels
        for index, target in enumerate(panel.get("targets", []))
    }


def test_the_page_and_the_dashboard_ask_for_metrics_that_exist():
    known = scraped() | {metric.name for metric in catalogue.ALL}
    asked = set(re.findall(r"\bpellucid_\w+", PAGE.read_text(encoding="utf-8")))
    assert asked <= known, f"docs/metrics.md names {sorted(asked - known)}"
    queries = expressions()
    assert len(queries) > 15
    for title, expression in queries.items():
        names = set(re.findall(r"\b(?:pellucid|vllm)\w+", expression))
        assert names, title
        assert names <= scraped(), f"{title} asks for {sorted(names - scraped())}"


def test_the_dashboard_uses_every_metric():
    asked = set(re.findall(r"\bpellucid_\w+", " ".join(expressions().values())))
    for metric in catalogue.ALL:
        assert any(name.startswith(metric.name) for name in asked), f"no panel shows {metric.name}"


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]]
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
        assert one["x"] + one["w"] <= 24


def test_promtool_can_read_every_query(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    rules = [
        {"record": f"query:{index}", "expr": expression.replace("$__rate_interval", "1m")}
        for index, expression in enumerate(expressions().values())
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
