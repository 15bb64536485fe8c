"""`tidemill serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from tidemill.cli.frame import RESULTS, app

KEY = "TIDEMILL_API_KEY"


@app.command(rich_help_panel=RESULTS)
def serve(
    where: Annotated[
        str, typer.Argument(help="a run's folder, a Hugging Face folder, a known model's name, or org/name")
    ],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0: any free one", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="the model's name for clients; none: WHERE's last part")] = None,
    model: Annotated[list[str] | None, typer.Option(help="serve one more model: NAME=WHERE")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="serve the model with a LoRA adapter: NAME=FOLDER")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="switch to new checkpoints while the run goes on")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or npu; auto: the best there is")] = "auto",
    concurrent: Annotated[int, typer.Option(help="limit of sequences at once; others wait", min=1)] = 256,
    window: Annotated[int | None, typer.Option(help="longest sequence in tokens; none: the model's own", min=2)] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(help="size of the KV cache in tokens; none: by the two above", min=16)
    ] = None,
    cache_on_host_gb: Annotated[
        float, typer.Option(help="host memory for caches that found no room on the device, in GB", min=0)
    ] = 0.0,
    max_body: Annotated[int, typer.Option(help="largest request body in bytes", min=1024)] = 8 << 20,
    max_connections: Annotated[int, typer.Option(help="limit of connections at once", min=1)] = 4096,
) -> None:
    """Serve a model to OpenAI clients. TIDEMILL_API_KEY holds the key; without one, only this machine is served."""
    from tidemill.errors import ConfigError, MissingExtra

    try:
        from tidemill.run.serving import ModelServer, ServeOptions
        from tidemill.run.serving import serve as run
        from tidemill.serve.server import LOOPBACK
    except ImportError as missing:
        raise MissingExtra("tidemill serve", str(missing.name), "serve") from missing
    key = os.environ.get(KEY, "")
    if not key and host not in LOOPBACK:
        raise ConfigError(f"without a key everybody who reaches {host} could use the model", f"set {KEY}")
    options = ServeOptions(
        where,
        name,
        tuple(model or ()),
        tuple(adapter or ()),
        device,
        concurrent,
        cache_tokens,
        window,
        follow,
        key,
        host,
        port,
        max_body,
        max_connections,
        cache_on_host_gb=cache_on_host_gb,
    )

    def told(server: ModelServer) -> None:
        names = ", ".join(served.name for served in server.served)
        print(f"{server.http.address}/v1 serves {names}; Ctrl-C ends it", flush=True)

    run(options, told)
