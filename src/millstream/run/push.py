"""Push: an exported folder to a repository on the Hugging Face hub, or on the server of HF_ENDPOINT."""

from __future__ import annotations

from pathlib import Path

from millstream.config import load
from millstream.errors import OutputError
from millstream.paths import kind_of
from millstream.run.config import RunConfig
from millstream.run.export import Exported
from millstream.run.folder import RunFolder

CARD = "README.md"


def push_to_hub(exported: Exported, run_dir: str | Path, repo: str, *, is_private: bool = True) -> str:
    """Upload an exported folder, with a model card, as one commit; the repository is created if it is not there. Returns its
    address. Raises `OutputError`; the folder stays as it is."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    folder = Path(exported.folder)
    if kind_of(folder / CARD) is None:
        (folder / CARD).write_text(model_card(exported, load(RunFolder.of_run(Path(run_dir)).config, RunConfig)))
    api = HfApi()
    try:
        created = api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message=f"{exported.what}, trained with Millstream"
        )
    except (HfHubHTTPError, HFValidationError, httpx2.HTTPError, OSError) as error:
        status = (
            error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
        )
        login = " Log in first: hf auth login, or export HF_TOKEN=..." if status in (401, 403) else ""
        raise OutputError(f"cannot push to {repo} at {api.endpoint}: {error}.{login}") from error
    return str(created)


def model_card(exported: Exported, config: RunConfig) -> str:
    """What the hub shows: the model that training began with, and how it was trained."""
    is_adapter = (Path(exported.folder) / "adapter_config.json").is_file()
    base, sort = config.model.path, f"{config.algorithm.advantage} advantages, {config.algorithm.loss} loss"
    lines = [
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        *([f"base_model: {base}"] if base is not None and not Path(base).exists() else []),
        "tags:\n- millstream\n- reinforcement-learning",
        "---",
        f"# {exported.what} of a run of Millstream",
        "",
        f"{'An adapter' if is_adapter else 'A model'} trained by reinforcement learning: {sort}, "
        f"max_lag = {config.pipeline.max_lag:g}, groups of {config.rollout.group_size}, "
        f"{config.pipeline.groups_per_step} groups a step, learning rate {config.learner.learning_rate:g}.",
        "",
    ]
    return "\n".join(lines)
