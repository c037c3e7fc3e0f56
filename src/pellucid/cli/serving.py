"""What `pellucid serve` does once its libraries are loaded. This process speaks HTTP; the engine has one of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path

import uvloop

from pellucid import __version__
from pellucid.assembly import engine_builder
from pellucid.build import LoadedModel, give_tenants, load_model, machine_use, plan_engine
from pellucid.cli.keeping import keep_ledgers
from pellucid.cli.progress import Loading, loading, stderr
from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import ConfigError
from pellucid.engine.process import EngineProcess
from pellucid.engine.remote import RemoteClient
from pellucid.planner.profile import state_directory
from pellucid.server.app import create_app, make_server
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.tenancy import Tenancy, reload_on_hangup
from pellucid.settings import EngineSettings
from pellucid.telemetry.spans import connect


def run(model: str, settings: EngineSettings, config: ServerConfig, process: EngineProcess) -> None:
    """Serve `model` until interrupted, with the engine in `process`."""
    listener = _listen(config)
    with loading(f"reading {model}") as progress:
        loaded = load_model(model)
        limits = plan_engine(settings, loaded)
        uvloop.run(_serve(loaded, limits, settings, config, listener, process, progress))


def _listen(config: ServerConfig) -> socket.socket:
    """Take the port before anything slow, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {reason}; choose another with --host or --port"
        ) from None
    return listener


async def _serve(
    model: LoadedModel,
    limits: SchedulerConfig,
    settings: EngineSettings,
    config: ServerConfig,
    listener: socket.socket,
    process: EngineProcess,
    progress: Loading,
) -> None:
    """Answer HTTP from the start (health says "starting"), announce the model when the engine is ready."""
    served = ServedModel(
        name=config.served_model_name or model.files.name,
        tokenizer=model.tokenizer,
        limits=limits,
        chat_template=model.chat_template,
        created=int(time.time()),
    )
    tenancy = _tenancy(served, config)
    spans = None if config.otlp_endpoint is None else connect(config.otlp_endpoint)
    machine = machine_use(settings, model)
    if config.tenants is not None:
        limits = give_tenants(limits, settings, tenancy.roster.tenants)
    engine = RemoteClient(engine_builder(settings, model.files.path, limits), process=process, on_progress=progress)
    if config.tenants is not None:
        reload_on_hangup(tenancy, engine, lambda line: stderr.print(line, soft_wrap=True, markup=False))
    app = create_app(engine, served, config, tenancy, machine=machine, spans=spans)
    with keep_ledgers(app.state.ledgers, config, served):
        server = make_server(app, config)
        listening = asyncio.create_task(server.serve(sockets=[listener]))
        ready = asyncio.ensure_future(engine.wait_ready())
        try:
            await asyncio.wait((ready, listening), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():  # else it was interrupted while the engine loaded
                await ready
                progress.stop()
                _announce(served, engine.description, listener, tenancy)
            await listening
        finally:
            ready.cancel()
            server.should_exit = True
            await asyncio.gather(listening, ready, return_exceptions=True)
            await engine.close()


def _tenancy(served: ServedModel, config: ServerConfig) -> Tenancy:
    if config.tenants is None:
        return Tenancy.single(config.api_key)
    directory = state_directory(os.environ)
    return Tenancy.of_file(config.tenants, served, api_key=config.api_key, state_directory=directory)


def _announce(served: ServedModel, description: str, listener: socket.socket, tenancy: Tenancy) -> None:
    """What is served, with what, and a line to try."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    limits = served.limits
    stderr.print(
        f"Pellucid {__version__} serves {served.name}: {description}; ready {_age_seconds():.1f} s after start"
    )
    stderr.print(
        f"KV pool of {limits.pool_tokens:,} tokens in {limits.num_blocks:,} blocks of {limits.block_size}; "
        f"context of up to {limits.max_length:,}"
    )
    if tenancy.roster.entries:
        stderr.print(str(tenancy.roster))
    path, body = "/v1/completions", {"model": served.name, "prompt": "The capital of France is", "max_tokens": 16}
    if served.chat_template is not None:
        question = {"role": "user", "content": "What is the capital of France?"}
        path, body = "/v1/chat/completions", {"model": served.name, "messages": [question]}
    print(url, flush=True)
    data = json.dumps(body | {"temperature": 0})
    key = " -H 'Authorization: Bearer KEY'" if tenancy.access.asks_for_keys else ""
    stderr.print(f"try: curl {url}{path}{key} -H 'Content-Type: application/json' \\\n  -d '{data}'", soft_wrap=True)


def _age_seconds() -> float:
    """Seconds since this process was started, its interpreter's own start included (Linux: /proc/self/stat)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
