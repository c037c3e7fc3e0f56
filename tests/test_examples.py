"""The examples and the README's Python do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.default_model import REASON, default_model_path

from pellucid.models.sources import default_cache_dir

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXPECTED = {
    "offline.py": ["Paris", "length"],
    "conversation.py": ["prompt tokens came from the cache"],
    "watch_the_scheduler.py": ["step 0 | new 0(4)", "Finished(request_id='b', reason='length'"],
}
NEEDS_SERVER = {"openai_client.py"}  # run by test_serve.py


def run(*command: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_example_is_tested_and_short():
    assert {path.name for path in EXAMPLES} == set(EXPECTED) | NEEDS_SERVER
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 40, path


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_promises(name):
    arguments = []
    if name != "watch_the_scheduler.py":
        path = default_model_path()
        if path is None:
            pytest.skip(REASON)
        arguments = [str(path)]
    printed = run(str(ROOT / "examples" / name), *arguments)
    for text in EXPECTED[name]:
        assert text in printed


def test_the_second_turn_hits_the_first():
    path = default_model_path()
    if path is None:
        pytest.skip(REASON)
    printed = run(str(ROOT / "examples" / "conversation.py"), str(path))
    turns = [tuple(map(int, found)) for found in re.findall(r"\((\d+) of (\d+) prompt tokens", printed)]
    assert turns[0][0] == 0
    assert turns[1][0] >= turns[0][1] // 16 * 16


def test_the_python_of_the_readme_runs(tmp_path):
    if not any(default_cache_dir(os.environ).glob("**/*.gguf")):
        pytest.skip("the default model is not in the cache; `make test` fetches it")
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(block, encoding="utf-8")
    printed = run(str(script))
    assert "Paris" in printed
    assert "tokens from the cache" in printed


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_links_of_the_readme_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
