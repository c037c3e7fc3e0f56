"""What `/metrics` counts for a step is what the planner says it costs, beside what was measured of the machine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.build import machine_use, step_work
from pellucid.core.cost import StepFeatures
from pellucid.planner.hardware import Device
from pellucid.planner.named_shapes import shape_by_name
from pellucid.planner.profile import MachineProfile, MatrixPeak, ReadBandwidth, state_directory, write_profile
from pellucid.planner.roofline import Roofline
from pellucid.settings import EngineSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
DEVICE = Device("d", "d", flops={"bf16": 1e12, "fp32": 1e12}, bandwidth=1e10)
LLAMA = shape_by_name("llama-3.1-8b")
FEATURES = st.builds(
    StepFeatures,
    num_tokens=st.integers(1, 4096),
    num_attended=st.integers(1, 10**8),
    num_context=st.integers(4096, 10**6),
    num_sequences=st.integers(1, 64),
    num_samples=st.integers(0, 64),
    copied_bytes=st.just(0),
)


@given(FEATURES, st.sampled_from([LLAMA, LLAMA.stored_as("q4_1"), LLAMA.cached_as("fp32")]))
def test_it_is_the_planners_cost(features, shape):
    cost, work = Roofline(shape, DEVICE).cost(features), step_work(shape)
    assert work.flops(features) == pytest.approx(cost.flops)
    assert work.bytes(features) == pytest.approx(cost.bytes)


def test_the_limits_are_those_of_the_profile_in_the_models_format(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = SimpleNamespace(files=SimpleNamespace(path=tmp_path))
    settings = EngineSettings(dtype="float32")
    unmeasured = machine_use(settings, model)
    assert unmeasured.limits is None
    assert unmeasured.work.bytes_per_context == 2 * 3 * 2 * 16 * 4, "K and V, layers, heads, their size, fp32"
    peaks = (MatrixPeak("bf16", 2, 9e12), MatrixPeak("fp32", 2, 3e12))
    profile = MachineProfile("m", "today", {}, 2, 1 << 30, (ReadBandwidth(2, 1 << 29, 6e9),), peaks)
    write_profile(profile, state_directory({"XDG_STATE_HOME": str(tmp_path)}) / "machine.json")
    limits = machine_use(settings, model).limits
    assert (limits.flops, limits.bandwidth) == (3e12, 6e9)
