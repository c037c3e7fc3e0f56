"""`plan`, `fit` and `measure` as a user types them: what is printed, where, and what a mistake costs (one line)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.default_model import REASON, default_model_path
from tests.planner.test_hardware import PROFILE
from typer.testing import CliRunner, Result

from pellucid.cli import measure as measure_command
from pellucid.cli.measure import measure
from pellucid.cli.plan import fit, plan
from pellucid.core.errors import PellucidError
from pellucid.planner.profile import read_profile, write_profile

app = typer.Typer()
app.command("plan")(plan)
app.command("fit")(fit)
app.command("measure")(measure)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, with no profile in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "pellucid" / "machine.json"


def run(line: str) -> Result:
    return CliRunner().invoke(app, line.split())


def printed(line: str) -> str:
    result = run(line)
    assert result.exit_code == 0, result.exception or result.stderr
    return result.stdout


def document(line: str) -> dict[str, Any]:
    row = json.loads(printed(f"{line} --json"))
    assert isinstance(row, dict)
    return row


def refusal(line: str) -> str:
    """The one line that the program's entry point prints for this command."""
    error = run(line).exception
    assert isinstance(error, PellucidError), error
    assert "\n" not in str(error)
    return str(error)


def test_the_worked_example() -> None:
    text = printed("plan --params 70e9 --dtype fp16 --bandwidth 2TB/s --explain")
    assert "140 GB" in text
    assert "70 ms" in text
    assert re.search(r"\b14\.28 tokens/s", text)
    assert "14.29" not in text
    row = document("plan --params 70e9 --bandwidth 2TB/s --flops 989TF")
    assert row["weights_bytes"] == 140e9
    assert row["decode_seconds_per_token"] == 0.07
    assert row["binding"] == {"prefill": "compute", "decode": "memory bandwidth"}
    assert row["kv_bytes_per_token"] is row["max_sequences"] is None


def test_stable_names_of_the_document() -> None:
    row = document("plan llama-3.1-8b --hardware rtx4090 --concurrency 4 --prefix-hit 0.5 --slo-itl 50ms")
    assert row["kv_bytes_per_token"] == 131_072
    assert row["kv_tokens"] == pytest.approx(41_408, rel=0.1)
    assert row["single_stream_tokens_per_second"] == pytest.approx(1 / row["decode_seconds_per_token"])
    assert row["prefill_seconds"] > row["floor"]["decode_seconds_per_token"]
    assert [s["batch"] for s in row["steps"]] == [None, 1, 4, 8, 32, row["max_sequences"]]
    assert row["prefix_hit"]["num_cached"] == 512
    assert row["slo"]["largest_batch"] >= 1


def test_explain_prints_a_formula_under_every_figure() -> None:
    text = printed("plan deepseek-v3 --hardware h200 --tp 8 --explain")
    assert "61 layers" not in text  # dense and expert layers are told apart
    assert "3 layers x (512 + 64) x 2 B + 58 layers x (512 + 64) x 2 B" in text
    plain = printed("plan deepseek-v3 --hardware h200 --tp 8")
    assert len(text.splitlines()) > 1.5 * len(plain.splitlines())


def test_overrides_stand_in_for_the_hardware() -> None:
    row = document("plan llama-3.1-8b --hardware h100 --bandwidth 1TB/s --memory 24GB --link 50GB/s")
    assert row["floor"]["decode_seconds_per_token"] == pytest.approx(row["steps"][1]["bytes"] / 1e12)
    assert row["preemption"]["swap_round_trip_seconds_per_token"] == pytest.approx(2 * 131_072 / 50e9)


@pytest.mark.parametrize(
    "line",
    [
        "plan llama-3.1-8b --compare h100 h200 h20 b200 l40s rtx4090 mi300x",
        "plan --compare h100 h200 h20 llama-3.1-8b b200 l40s rtx4090 mi300x",
        "plan llama-3.1-8b --compare h100,h200,h20,b200 --compare l40s rtx4090 mi300x",
    ],
)
def test_devices_side_by_side_in_any_order(line: str) -> None:
    row = document(line)
    assert {d["hardware"] for d in row["devices"]} == {"h100", "h200", "h20", "b200", "l40s", "rtx4090", "mi300x"}
    assert "a single stream runs at" in row["paradox"]
    assert "a single stream runs at" in " ".join(printed(line).split())


def test_stages_beside_this_machine(state: Path) -> None:
    text = printed("plan llama-3.1-8b --stages --hardware h100")
    assert "has not been measured" in text
    assert {"GEMM", "GEMV", "TTFT", "ITL"} <= set(re.findall(r"[A-Z]{3,4}", text))
    write_profile(PROFILE, state)
    assert "a machine: 2 TFLOP/s bf16, 22 GB/s" in printed("plan llama-3.1-8b --stages --hardware h100")


def test_users_replicas_and_cost() -> None:
    row = document("plan llama-3.1-8b --hardware h100 --users 200 --think-time 30s --price-per-hour 2.5")
    assert row["fleet"]["replicas"] == row["fleet"]["replicas_needed"] + 1
    assert row["fleet"]["dollars_per_hour"] == 2.5 * row["fleet"]["replicas"]
    assert "spare" in printed("plan llama-3.1-8b --hardware h100 --users 200")


@pytest.mark.parametrize(("suffix", "head"), [("html", b"<!doctype html>"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_plots(tmp_path: Path, suffix: str, head: bytes) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"roofline.{suffix}"
    result = run(f"plan llama-3.1-8b --hardware h100 --plot {file}")
    assert result.exit_code == 0
    assert f"wrote {file}" in result.stderr
    assert file.read_bytes().startswith(head)
    if suffix == "html":
        assert b"decode x 128" in file.read_bytes()
        assert not re.search(rb"(src|href)=['\"]https?:", file.read_bytes())


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "pip install pellucid[plot]" in refusal("plan llama-3.1-8b --hardware h100 --plot out.png")


def test_a_directory_needs_no_more_than_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert document(f"plan {tmp_path} --hardware h100")["num_params"] == 8_030_261_248
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    assert "config has no 'hidden_size'" in refusal(f"plan {tmp_path} --hardware h100")
    (tmp_path / "config.json").write_text("[]")
    assert "holds a list" in refusal(f"plan {tmp_path} --hardware h100")


def test_the_default_model_is_counted_byte_for_byte() -> None:
    path = default_model_path()
    if path is None:
        pytest.skip(REASON)
    row = document(f"plan {path} --hardware xeon-8480")
    assert (row["num_params"], row["weights_bytes"], row["kv_bytes_per_token"]) == (134_515_008, 96_576_768, 23_040)


def test_a_file_of_devices(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[a]\nbandwidth = 1e12\n[b]\nbandwidth = 2e12\n")
    assert document(f"plan --params 7B --hardware {file}#b")["decode_seconds_per_token"] == 0.007
    assert "describes 2 devices" in refusal(f"plan --params 7B --hardware {file}")
    assert "no device 'c'" in refusal(f"plan --params 7B --hardware {file}#c")


def test_without_hardware_this_machine_is_meant(state: Path) -> None:
    assert "run `pellucid measure`" in refusal("plan llama-3.1-8b")
    write_profile(PROFILE, state)
    assert document("plan llama-3.1-8b")["hardware"] == "this-machine"
    # The kernels of the profile were measured with a bf16 model; a 4-bit one gets the roofline, and says so.
    assert document("plan llama-3.1-8b")["predicted_from"] == "measured kernels"
    assert document("plan llama-3.1-8b --dtype q4_0")["predicted_from"] == "roofline"


def test_names_are_listed() -> None:
    text = printed("plan --list")
    assert "qwen3-30b-a3b" in text
    assert "mi300x" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --hardware h100", "no model"),
        ("plan nothing-7b --hardware h100", "'nothing-7b' is not a directory"),
        ("plan llama-3.1-8b --hardware h1000", "nearest: h100"),
        ("plan llama-3.1-8b --hardware h100 --tp 3", "--tp 3 does not divide the 32 query heads"),
        ("plan llama-3.1-8b --hardware a100 --dtype fp8", "a100 has no known fp8 rate"),
        ("plan llama-3.1-8b --hardware h100 --dtype int3", "number format 'int3' is unknown"),
        ("plan llama-3.1-8b --hardware h100 --kv-dtype q4_0", "a KV cache is kept in"),
        ("plan llama-3.1-8b --hardware h100 --bandwidth 2TB", "--bandwidth: '2TB' is not a rate"),
        ("plan llama-3.1-8b --hardware h100 --context many", "--context: 'many' is not a count"),
        ("plan llama-3.1-8b --hardware h100 --prefix-hit 2", "--prefix-hit is 2.0"),
        ("plan llama-3.1-8b --hardware h100 --memory-fraction 0", "memory fraction is 0.0"),
        ("plan llama-3.1-8b --hardware h100 --plot out.pdf", "must end in .html, .svg, .png"),
        ("plan llama-3.1-8b --hardware h100 --users 0", "--users is 0"),
        ("plan llama-3.1-8b --hardware h100 --think-time 3s", "need --users"),
        ("plan llama-3.1-8b qwen3-8b --hardware h100", "'qwen3-8b' is one model too many"),
        ("plan llama-3.1-8b --compare h100 h999", "'h999' is neither a device"),
        ("plan llama-3.1-8b --compare h999", "hardware 'h999' is not this-machine"),
        ("plan no-such-folder/x.gguf --hardware h100", "cannot read"),
        ("plan llama-3.1-8b --hardware this-machine", "has not been measured yet"),
        ("plan --params 0 --hardware h100", "--params is 0"),
        ("plan llama-3.1-8b --bandwidth 0TB/s", "--bandwidth is 0"),
        ("plan llama-3.1-8b --hardware h100 --memory 0GB", "--memory is 0"),
        ("plan llama-3.1-8b --hardware h100 --chunk 0", "--chunk is 0"),
        ("plan llama-3.1-8b --hardware h100 --prompt 1e9 --chunk 1", "a --chunk of more tokens"),
        ("plan llama-3.1-8b --hardware h100 --context 10", "does not fit a --context of 10"),
        ("plan llama-3.1-8b --hardware h100 --users 5 --price-per-hour nan", "--price-per-hour is nan"),
        ("plan llama-3.1-8b --compare h100 --hardware h200", "--compare has no place for --hardware"),
        ("plan llama-3.1-8b --hardware h100 --stages --explain", "--stages has no place for --explain"),
        ("plan llama-3.1-8b --hardware h100 --json --explain", "--json has no place for --explain"),
        ("fit smollm2-135m --memory 1GB --kv-memory 1GB", "pass one of them"),
        ("fit llama-3.1-8b --memory 4GB", "do not hold llama-3.1-8b"),
        ("fit smollm2-135m --context 0", "--context is 0"),
        ("fit smollm2-135m --kv-memory 1", "--kv-memory is 1 B, and one block"),
        ("fit smollm2-135m --memory 2GB --context 1e6", "a sequence of 1,000,000 tokens needs"),
    ],
)
def test_mistakes_get_one_line(line: str, message: str) -> None:
    assert message in refusal(line)


def test_advice_is_a_command_that_serve_accepts() -> None:
    command = printed("fit smollm2-135m --memory 2GiB").splitlines()[-1].split()
    assert command[:3] == ["pellucid", "serve", "smollm2-135m"]
    from pellucid.cli.app import build_app

    serve = typer.main.get_command(build_app(["serve"])).commands["serve"]  # type: ignore[attr-defined]
    flags = {flag for parameter in serve.params for flag in parameter.opts}
    assert {word for word in command if word.startswith("--")} <= flags
    row = document("fit smollm2-135m --kv-memory 1GiB")
    assert row["kv_memory_bytes"] == 2**30


def test_measuring_the_machine_alone(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(PROFILE, linear=(), attention=())
    monkeypatch.setattr(measure_command, "_machine", lambda bar, device: bare)
    text = printed("measure none")
    assert "22 GB/s" in text
    assert read_profile(state) == bare
    elsewhere = state.with_name("other.json")
    assert document(f"measure none --output {elsewhere}")["machine"] == "a machine"
    assert read_profile(elsewhere) == bare
