"""The commands that serve: a model with OpenAI's API, a store, and training."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.common import console, errors_shown, model_in
from millstream.engine import EngineConfig
from millstream.errors import ConfigError
from millstream.run.config import ModelConfig


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


HostOption = Annotated[
    str, typer.Option("--host", help="The address to listen on. Other than this machine's own only with a token.")
]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="The port to listen on. 0: any free port.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where the model runs. auto: on a GPU if there is one.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="The type of the weights. auto: bfloat16 on a GPU.")]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="MILLSTREAM_TOKEN",
        help="The token that clients must send. Prefer the environment variable: others may see what is typed.",
    ),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights-from",
        metavar="DIR",
        help="Load new weights from folders in DIR when a client asks for it: for training.",
    ),
]
NameOption = Annotated[str | None, typer.Option("--name", help="The name of the model for clients. Default: MODEL.")]
SlotsOption = Annotated[
    int, typer.Option("--slots", min=1, help="The number of answers that are decoded at the same time.")
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--max-length", min=2, help="Maximal tokens of a prompt and its answer. Default: the model's context."
    ),
]
RequestsOption = Annotated[
    int,
    typer.Option(
        "--max-requests", min=1, help="The number of requests at a time; further ones are refused with status 429."
    ),
]
OF_A_MODEL = (Device.AUTO, Dtype.AUTO, 32, None, None, False)  # defaults of options that --learn does not have
LearnOption = Annotated[
    bool,
    typer.Option(
        "--learn",
        help="MODEL is a run: train it while it is served, on the sessions that clients reward. Needs a token.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="With --learn: change one key of the run's config. May be repeated."
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code in MODEL's folder, where the model needs its own.")
]


def serve_command(
    path: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a name on the hub, or a run folder.")
    ],
    name: NameOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    device: DeviceOption = Device.AUTO,
    dtype: DtypeOption = Dtype.AUTO,
    slots: SlotsOption = 32,
    max_length: LengthOption = None,
    max_requests: RequestsOption = 256,
    weights_from: WeightsOption = None,
    trust_remote_code: TrustOption = False,
    learn: LearnOption = False,
    overrides: SetOption = None,
    token: TokenOption = None,
) -> None:
    """Serve a model with OpenAI's API. Completions, chats, streams, and sessions that become rollouts, over HTTP."""
    with errors_shown():
        if learn:
            if (device, dtype, slots, max_length, weights_from, trust_remote_code) != OF_A_MODEL:
                raise ConfigError(
                    "with --learn the model and the engine are those of the run's config: --set model.device=cpu, --set "
                    "engine.slots=64"
                )
            _learn(path, name or path, (host, port, max_requests), overrides or [], token)
            return
        if overrides:
            raise ConfigError("--set changes the config of a run: it goes with --learn")
        from millstream.run import serve_model as model
        from millstream.serve.openai import service as openai

        chosen = model.ServedConfig(
            name=name or path,
            max_length=max_length,
            model=ModelConfig(
                path=model_in(path, "serving"),
                device=device.value,
                dtype=dtype.value,
                trust_remote_code=trust_remote_code,
            ),
            engine=EngineConfig(slots=slots),
        )
        model.run_model_service(
            chosen,
            openai.ModelServiceConfig(
                host=host,
                port=port,
                max_requests=max_requests,
                weights_from=None if weights_from is None else str(weights_from),
            ),
            token=token,
            on_ready=lambda url, known_as: console.out(f"{known_as} is at {url}/v1", highlight=False),
        )


def _learn(path: str, name: str, where: tuple[str, int, int], changes: list[str], token: str | None) -> None:
    from millstream.run import learn, run
    from millstream.serve.openai.service import ModelServiceConfig

    host, port, max_requests = where
    endpoint = learn.LearningEndpoint(
        service=ModelServiceConfig(host=host, port=port, max_requests=max_requests),
        token=token,
        name=name,
        on_ready=lambda url: console.out(f"{name} is at {url}/v1, and learns", highlight=False),
    )
    run.learn(path, endpoint, changes=changes)


def serve_store_command(
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="NAME:COLUMNS",
            help="A task and the columns that it reads: train:tokens,reward. Append :rows for rows instead of whole groups, "
            ":after=NAME for a task that follows another. May be repeated.",
        ),
    ] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 7077,
    capacity_rows: Annotated[
        int,
        typer.Option("--capacity-rows", min=1, help="Rows of experience, and of prompts, beyond which puts wait."),
    ] = 1 << 20,
    capacity_bytes: Annotated[
        int, typer.Option("--capacity-bytes", min=1, help="The same in bytes. Writes may add as much again.")
    ] = 4 << 30,
    token: TokenOption = None,
) -> None:
    """Serve a store over HTTP. Prompts, experience and notices of new weights, for programs in any language."""
    with errors_shown():
        from millstream.serve.store import service as store

        store.run_store_service(
            tasks or [],
            store.StoreServiceConfig(host=host, port=port, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes),
            token=token,
            on_ready=lambda url: console.out(f"the store is at {url}", highlight=False),
        )


def serve_training_command(
    path: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a name on the hub, or a run folder.")
    ],
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Checkpoints and the journals of models are kept here.")
    ] = Path("training"),
    name: NameOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8100,
    device: DeviceOption = Device.AUTO,
    dtype: DtypeOption = Dtype.AUTO,
    slots: SlotsOption = 64,
    max_length: LengthOption = None,
    max_models: Annotated[
        int, typer.Option("--max-models", min=1, help="Models in memory at a time; others are kept in DIR.")
    ] = 16,
    trust_remote_code: TrustOption = False,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="MILLSTREAM_TOKEN",
            help="The keys of clients, separated by commas; each has its own models. Prefer the environment variable.",
        ),
    ] = None,
) -> None:
    """Serve training to the tinker client. Adapters on one base are trained and sampled from, call by call, over HTTP."""
    with errors_shown():
        from millstream.run import serve_training as training
        from millstream.serve.training.service import TrainingServiceConfig

        chosen = training.TrainingBaseConfig(
            name=name,
            max_length=max_length,
            model=ModelConfig(
                path=model_in(path, "training"),
                device=device.value,
                dtype=dtype.value,
                trust_remote_code=trust_remote_code,
            ),
            engine=EngineConfig(slots=slots, process=False),
        )
        training.run_training_service(
            chosen,
            TrainingServiceConfig(folder=str(folder), host=host, port=port, max_models=max_models),
            tokens=None if token is None else token.split(","),
            on_ready=lambda url, known_as: console.out(f"{known_as} is trained at {url}", highlight=False),
        )
