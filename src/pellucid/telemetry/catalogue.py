"""Every metric of `/metrics`, once: name, type, labels, buckets and what it means. `docs/metrics.md` is made from here.

Names follow Prometheus' conventions: base units (seconds, bytes), `_total` for counters, no colons. Buckets are close
where this engine lives: a decode step takes milliseconds on a small model and a tenth of a second on a large one, and a
first token anything from that to minutes in a queue.
"""

from __future__ import annotations

from pellucid.telemetry.families import Metric

_TO_A_MINUTE = (0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
_STEP_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.1, 0.2, 0.4, 0.8, 1.6)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, *_TO_A_MINUTE, 102.4, 204.8)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_PROFILE = "a machine profile (`pellucid measure`)"

INFO = Metric("pellucid_info", "gauge", "Always 1: which version serves which model.", ("version", "model"))

# What clients see.
HTTP_REQUESTS = Metric(
    "pellucid_http_requests_total", "counter", "Replies, by route and HTTP status.", ("route", "status")
)
CHOICES = Metric(
    "pellucid_choices_finished_total",
    "counter",
    "Choices that ended, by reason: stop, length, deadline, disconnect, rejected or error.",
    ("reason",),
)
TTFT = Metric(
    "pellucid_time_to_first_token_seconds",
    "histogram",
    "From the arrival of a request, queue and tokenizing included, to its first token.",
    buckets=_TTFT_BUCKETS,
)
ITL = Metric(
    "pellucid_inter_token_latency_seconds",
    "histogram",
    "Time between two tokens of a choice; tokens that arrive together share it equally.",
    buckets=_ITL_BUCKETS,
)
TPOT = Metric(
    "pellucid_time_per_output_token_seconds",
    "histogram",
    "Per choice of two or more tokens: from its first to its last token, over the tokens after the first.",
    buckets=_ITL_BUCKETS,
)
E2E = Metric(
    "pellucid_e2e_seconds",
    "histogram",
    "From the arrival of a request to the last byte of a choice, however it ended unless it was refused.",
    buckets=(0.05, 0.1, 0.2, 0.4, *_TO_A_MINUTE, 102.4, 204.8, 409.6),
)
QUEUE = Metric(
    "pellucid_queue_seconds",
    "histogram",
    "Per choice: the seconds that its ledger has under queue causes.",
    buckets=(0.001, 0.01, 0.05, 0.1, 0.2, 0.4, *_TO_A_MINUTE, 102.4, 204.8),
)
CAUSES = Metric(
    "pellucid_cause_seconds_total",
    "counter",
    "Seconds that ended requests spent, by tenant and ledger cause; a request's causes sum to its end-to-end time.",
    ("tenant", "cause"),
)
TOKENS = Metric(
    "pellucid_tokens_total",
    "counter",
    "Tokens of ended requests by tenant and source: output; of prompts that were read to their end computed, "
    "cached_device and cached_host; recomputed after a preemption.",
    ("tenant", "source"),
)
TTFT_PREDICTION = Metric(
    "pellucid_time_to_first_token_prediction_ratio",
    "histogram",
    "Time to first token over the one predicted when the request was accepted; less 1 it is the relative error. "
    "Requests without a prediction are left out.",
    buckets=_RATIO_BUCKETS,
)
REJECTIONS = Metric(
    "pellucid_rejections_total",
    "counter",
    "Requests refused, by whose limit it was (tenant, machine; request: it could never be served) and error code.",
    ("limit", "code"),
)

# What the engine holds.
RUNNING = Metric("pellucid_running", "gauge", "Requests being computed.")
WAITING = Metric(
    "pellucid_waiting",
    "gauge",
    "Requests waiting to be admitted, by reason: the causes of the ledger; unspecified for those that came just now.",
    ("reason",),
)
SWAPPED = Metric(
    "pellucid_swapped",
    "gauge",
    "Of the waiting requests those that were preempted and have their blocks in host memory.",
)
BLOCKS = Metric(
    "pellucid_blocks",
    "gauge",
    "KV cache blocks, by tier (device, host) and state; host without a tier is 0.",
    ("tier", "state"),
)
PREEMPTIONS = Metric(
    "pellucid_preemptions_total",
    "counter",
    "Times a running request lost its blocks, by fate: copied to host memory (swap) or forgotten (recompute).",
    ("fate",),
)
PROMPT_TOKENS = Metric("pellucid_prompt_tokens_total", "counter", "Prompt tokens of admitted requests.")
CACHED_TOKENS = Metric("pellucid_cached_tokens_total", "counter", "Those of them that came from the prefix cache.")
GENERATED_TOKENS = Metric("pellucid_generated_tokens_total", "counter", "Output tokens generated.")
FINISHED = Metric("pellucid_finished_total", "counter", "Requests that ended in the engine, for whatever reason.")
LEDGER_RESIDUE = Metric(
    "pellucid_ledger_residue_seconds_total",
    "counter",
    "What the causes of ended requests missed of their time. Anything but 0 is a bug of ours.",
)

# Steps.
STEP_SECONDS = Metric(
    "pellucid_step_seconds",
    "histogram",
    "Measured wall time of steps in the executor.",
    buckets=_STEP_BUCKETS,
)
STEP_PREDICTED = Metric(
    "pellucid_step_predicted_seconds",
    "histogram",
    "What the scheduler's cost model predicted for the same steps.",
    buckets=_STEP_BUCKETS,
)
STEP_PREDICTION = Metric(
    "pellucid_step_prediction_ratio",
    "histogram",
    "Measured over predicted step time; less 1 it is the relative error.",
    buckets=_RATIO_BUCKETS,
)
STEP_TOKENS = Metric(
    "pellucid_step_tokens",
    "histogram",
    "Tokens computed in a step.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
)
STEP_PARTS = Metric(
    "pellucid_step_part_seconds_total",
    "counter",
    "Where the time of steps went: gap (before the step, while there was work), schedule, commit, and the executor's "
    "phases.",
    ("part",),
)
STEP_STOLEN = Metric(
    "pellucid_step_stolen_seconds_total",
    "counter",
    "How long other processes kept the threads of steps from their cores.",
)

# The machine.
FLOPS = Metric(
    "pellucid_flops_total",
    "counter",
    "Floating-point operations of the steps, counted from the model's shape (a multiply-add is 2).",
)
BYTES = Metric(
    "pellucid_memory_bytes_total",
    "counter",
    "Bytes that the steps had to move between memory and processor, counted from the model's shape: weights, KV cache, "
    "residual stream.",
)
FLOPS_RATE = Metric("pellucid_flops_per_second", "gauge", "FLOP rate achieved over the last 10 seconds.")
BYTES_RATE = Metric("pellucid_memory_bytes_per_second", "gauge", "Bandwidth achieved over the last 10 seconds.")
FLOPS_LIMIT = Metric(
    "pellucid_flops_limit_per_second",
    "gauge",
    "The machine's measured FLOP rate in the model's format.",
    needs=_PROFILE,
)
BYTES_LIMIT = Metric(
    "pellucid_memory_bytes_limit_per_second", "gauge", "The machine's measured memory bandwidth.", needs=_PROFILE
)
ROOFLINE = Metric(
    "pellucid_roofline_seconds_total",
    "counter",
    "Time of steps by what bound them: compute or memory at the machine's measured rates, whichever takes longer for a "
    "step; other is what the step took beyond that (kernels below the rates, Python, gaps).",
    ("resource",),
    needs=_PROFILE,
)
BINDING = Metric(
    "pellucid_binding_resource",
    "gauge",
    "1 for what bound the last 10 seconds: compute, memory, other, or idle where no step ran.",
    ("resource",),
    needs=_PROFILE,
)

ALL = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))
