"""Recipes run as they are: each is checked without a network, the small ones are run, and the exercises can be solved."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.audit import audit
from millstream.cli.main import app
from millstream.config import load
from millstream.env.data import read
from millstream.env.rewards import CompletionScorer, prepare_rewards
from millstream.model.load import save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.run.config import RunConfig
from millstream.types import Task
from support.runs import step_rows
from support.talk import CHATML

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.toml"))}
CLUSTER = {path.stem: path for path in sorted((ROOT / "recipes/cluster").glob("*.toml"))}
NEEDS = {
    "gsm8k": "math_verify",
    "reasoning_gym": "reasoning_gym",
    "smollm2": "reasoning_gym",
    "demo_ray": "ray",
    "agent": "openai",
}
"""Libraries of the extras that a recipe says it needs."""
FEW = {
    "data.holdout": 4,
    "engine.process": "false",
    "rollout.group_size": 2,
    "pipeline.steps": 2,
    "pipeline.groups_per_step": 2,
    "pipeline.filter_zero_signal": "false",
}
"""Two steps of any recipe."""
MADE = {"data.size": 40, "warmup.max_steps": 2, "warmup.check_every": 2}
"""A small model and its tasks are made on the spot, and warmed up."""
SUPERVISED = {"data.size": 100, "warmup.epochs": 1, "warmup.check_every": 1, "pipeline.steps": 0}
"""Nothing but two supervised steps."""
READ = {"rollout.max_tokens": 16}
ASCII = "".join(map(chr, range(32, 127))) + "\n"
GSM8K = [
    {
        "question": f"Ann has {n} apples and buys {n} more. How many?",
        "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
    }
    for n in range(1, 13)
]


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their files from there."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that knows nothing, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer(ASCII)
    tokenizer.chat_template = CHATML
    shape = TinyShape(hidden=16, layers=1, heads=4, context=1024)
    save_model(tiny_model(shape, tokenizer, seed=0), tokenizer, folder)
    return folder


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in GSM8K))
    return path


def at_hand(name: str, chat_model: Path, gsm8k: Path) -> dict[str, object]:
    """What a recipe needs to do without a hub, and without a long wait for its tasks."""
    local = {"model.path": chat_model, "model.dtype": "float32"}
    match name:
        case "gsm8k":
            return {**local, "data.name": "", "data.subset": "", "data.path": gsm8k, "data.holdout": 4}
        case "code":
            return {**local}
        case "reasoning_gym":
            return {"data.size": 300, "data.holdout": 8}
        case "smollm2":
            return {**local, "data.size": 300, "data.holdout": 8}
        case _:
            return {}


def train(name: str, changes: dict[str, object], *more: str) -> str:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["train", str(RECIPES[name]), *overrides, *more])
    assert result.exit_code == 0, result.output
    return result.output


def scores(name: str, tasks: Sequence[Task], says: Sequence[str]) -> list[float]:
    """By the recipe's own rewards."""

    async def program() -> list[float]:
        scorer = CompletionScorer(prepare_rewards(load(RECIPES[name], RunConfig).reward))
        return list(await asyncio.gather(*map(scorer.score, tasks, says)))

    return asyncio.run(program())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_its_dry_run(name: str, chat_model: Path, gsm8k: Path) -> None:
    said = train(name, at_hand(name, chat_model, gsm8k), "--dry-run")
    assert "checked: " in said and "not checked" not in said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ray] if NEEDS.get(name) == "ray" else []) for name in RECIPES]
)
def test_every_recipe_runs_two_steps_and_passes_the_audit(
    name: str, chat_model: Path, gsm8k: Path, tmp_path: Path
) -> None:
    local = at_hand(name, chat_model, gsm8k)
    made = SUPERVISED if name == "sft" else MADE
    few = {**FEW, **(READ if "model.path" in local else made)}
    if NEEDS.get(name) == "ray":
        few["engine.process"] = ""  # every engine has one there
    train(name, {**local, **few, "run_dir": tmp_path / "run"}, "--quiet")
    assert len(step_rows(tmp_path / "run")) == few["pipeline.steps"]
    report = audit(tmp_path / "run")
    assert report.is_clean and report.checks > 20, report


def _words(path: Path, changes: dict[str, object]) -> list[str]:
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return ["train", str(path), *overrides, "--dry-run"]


def dry_run(path: Path, changes: dict[str, object], *more: str) -> str:
    result = CliRunner().invoke(app, [*_words(path, changes), *more])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


PLACED = {
    "one_gpu": "1 learner rank (1 CPU, 0.5 GPU each) and 1 engine (1 CPU, 0.5 GPU each), engine i and rank i on one GPU: "
    "2 CPU, 1 GPU in all",
    "two_gpus": "the learner on GPU 0, 1 engine on GPU 1",
    "eight_gpus": "2 learner ranks (1 CPU, 1 GPU each) and 6 engines (1 CPU, 1 GPU each): 8 CPU, 8 GPU in all, on one node; Ray "
    "is started here, on loopback",
    "four_nodes": "16 learner ranks (1 CPU, 1 GPU each) and 4 engines (1 CPU, 4 GPU each): 20 CPU, 32 GPU in all",
    "kuberay": "16 CPU, 16 GPU in all",
    "ray_up": "16 CPU, 16 GPU in all, on as few nodes as they fit on; the Ray cluster at auto",
    "slurm": "16 CPU, 16 GPU in all",
}
MACHINES = {"one_gpu": "1xH100", "two_gpus": "2xH100", "eight_gpus": "8xH100", "four_nodes": "4x8xH100"}
"""What each is for; the others are for two nodes with eight GPUs."""


@pytest.mark.parametrize("name", CLUSTER)
def test_every_recipe_for_a_cluster_passes_its_dry_run_and_says_what_is_placed_where(
    name: str, chat_model: Path, gsm8k: Path
) -> None:
    """With neither a cluster nor a GPU at hand: the machine is described."""
    pytest.importorskip("math_verify")
    changes = {**at_hand("gsm8k", chat_model, gsm8k), "run_dir": chat_model.parent / "run"}
    fits, too_small = MACHINES.get(name, "2x8xH100"), {"one_gpu": "cpu", "two_gpus": "1xH100"}.get(name, "7xH100")
    said = dry_run(CLUSTER[name], changes, "--machine", fits)
    assert PLACED[name] in said, said
    is_near = name in ("one_gpu", "two_gpus", "eight_gpus")
    assert ("weights reach engines by ipc" in said) is (name == "one_gpu")
    assert ("shared on its node, nccl from GPU to GPU, broadcast to other nodes" in said) is (not is_near)
    unknown = "not checked: whether the cluster has that"
    assert unknown not in said
    if not is_near and name != "four_nodes":  # which needs vLLM here, where no machine is described
        assert unknown in dry_run(CLUSTER[name], changes)
    if name != "two_gpus":  # which is then a run on one GPU
        there = CliRunner().invoke(app, [*_words(CLUSTER[name], changes), "--machine", too_small])
        assert there.exit_code == 1 and "engines and ranks need" in " ".join(there.output.split()), there.output


def test_the_files_that_start_clusters_give_each_recipe_the_gpus_that_it_asks_for() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "recipes/cluster"
    config = {name: load(path, RunConfig) for name, path in CLUSTER.items()}
    asked = {name: one.resources.gpus for name, one in config.items()}
    (gpus,) = yaml.safe_load((folder / "kuberay.yaml").read_text())["spec"]["workerGroupSpecs"]
    (container,) = gpus["template"]["spec"]["containers"]
    assert gpus["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == asked["kuberay"]
    nodes = yaml.safe_load((folder / "ray_up.yaml").read_text())["provider"]
    assert 8 * (1 + len(nodes["worker_ips"])) == asked["ray_up"]
    script = (folder / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", str(folder / "slurm.sbatch")]).returncode == 0
    found = {key: int(script.partition(f"--{key}=")[2].split()[0]) for key in ("nodes", "gpus-per-node")}
    assert found["nodes"] * found["gpus-per-node"] == asked["slurm"]
    assert f"RUN={config['slurm'].run_dir}" in script


def test_the_documentation_of_clusters_names_every_recipe_and_every_file_for_it() -> None:
    text = (ROOT / "docs/cluster.md").read_text()
    assert [path.name for path in (ROOT / "recipes/cluster").iterdir() if f"cluster/{path.name}" not in text] == []


def test_gold_solutions_of_gsm8k_earn_all_that_its_recipe_gives(gsm8k: Path) -> None:
    pytest.importorskip("math_verify")
    changes = ["data.name=", "data.subset=", f"data.path={gsm8k}", "data.holdout=0"]
    config = load(RECIPES["gsm8k"], RunConfig, changes)
    tasks = read(config.data, seed=0).train
    roles = [message.role for message in tasks[0].prompt if not isinstance(message, str)]
    assert roles == ["system", "user"] and str(tasks[0].answer).endswith("#### 2")
    says = ["One and one is 2.\n#### 3", "\\boxed{2}", "So it is\n\n#### $2.00", "I do not know"]
    earned = scores("gsm8k", [*tasks, *[tasks[0]] * 4], [*(str(task.answer) for task in tasks), *says])
    assert earned == pytest.approx([1.1] * len(tasks) + [0.1, 1.0, 1.1, 0.0])


def test_every_exercise_is_solved_by_its_answer_and_by_no_answer_that_is_wrong() -> None:
    config = load(RECIPES["code"], RunConfig, ["data.holdout=0"])
    tasks = read(config.data, seed=0).train
    assert len(tasks) >= 40 and all(len(task.data["tests"]) >= 3 for task in tasks)
    assert scores("code", tasks, [str(task.answer) for task in tasks]) == [1.0] * len(tasks)
    wrong = [f"```python\ndef {task.id}(*args):\n    return None\n```" for task in tasks]
    assert scores("code", tasks, wrong) == [0.0] * len(tasks)
    others = [str(task.answer) for task in (*tasks[1:], tasks[0])]
    assert scores("code", tasks, others) == [0.0] * len(tasks)


def test_the_readme_names_every_recipe() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in RECIPES if f"[{name}](recipes/{name}.toml)" not in readme] == []
