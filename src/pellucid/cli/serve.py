"""`pellucid serve`: a model over the OpenAI protocol. The engine's process is started before anything else is imported
here, because its libraries take the longest to load; what the server needs follows in `serving.py`.
"""

from __future__ import annotations

from pellucid.cli.fetch import ModelArgument
from pellucid.cli.options import settings_options
from pellucid.engine.process import EngineProcess
from pellucid.models.sources import DEFAULT_MODEL
from pellucid.runtime.loading import load_libraries
from pellucid.server.config import ServerConfig
from pellucid.settings import EngineSettings


@settings_options(EngineSettings, ServerConfig)
def serve(model: ModelArgument = DEFAULT_MODEL, *, settings: EngineSettings, config: ServerConfig) -> None:
    """Serve MODEL over the OpenAI protocol until interrupted."""
    with EngineProcess(load_libraries) as engine:
        from pellucid.cli.serving import run

        run(model, settings, config, engine)
