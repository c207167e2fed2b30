"""The pages for users of TRL and verl: their programs run, and every option that they name exists on both sides."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.config import load
from millstream.model.load import save_model
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.run.check import check_config
from millstream.run.config import RunConfig
from support.talk import CHATML

ROOT = Path(__file__).parents[2]
TRL, VERL = ((ROOT / f"docs/coming-from-{name}.md").read_text() for name in ("trl", "verl"))


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page, flags=re.S)


def options(page: str) -> Iterator[tuple[str, str]]:
    """The rows of the table of options: theirs, ours."""
    table = page.partition("## Options")[2].partition("\n\n`")[0].partition("\n## ")[0]
    yield from re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|", table, flags=re.M)


def is_key(name: str, kind: Any = RunConfig) -> bool:
    first, _, rest = name.partition(".")
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    if first not in fields:
        return False
    if not rest:
        return True
    parts = getattr(fields[first], "__args__", (fields[first],))
    return any(hasattr(part, "__struct_fields__") and is_key(rest, part) for part in parts)


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a small model in it."""
    monkeypatch.chdir(tmp_path)
    tokenizer = character_tokenizer("0123456789+= abcdefghijklmnopqrstuvwxyz|_<>\n")
    tokenizer.chat_template = CHATML
    model = tiny_model(TinyShape(hidden=16, layers=1, heads=2, context=1024), tokenizer, seed=0)
    save_model(model, tokenizer, tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("page", [TRL, VERL], ids=["trl", "verl"])
def test_every_option_of_the_tables_is_a_key_of_ours(page: str) -> None:
    found = list(options(page))
    assert len(found) > 20 and [ours for _, ours in found if not is_key(ours)] == []


def test_the_program_for_trl_runs_here(in_a_folder: Path) -> None:
    pytest.importorskip("datasets")
    names: dict[str, Any] = {}
    both, _, ours = blocks(TRL, "python")
    exec(both, names)
    exec(ours, names)
    assert names["result"].summary.steps == 2


def test_the_program_for_trl_runs_there_and_has_these_options(in_a_folder: Path) -> None:
    trl = pytest.importorskip("trl")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert [theirs for theirs, _ in options(TRL) if theirs not in known] == []
    names: dict[str, Any] = {}
    both, theirs, _ = blocks(TRL, "python")
    exec(both, names)
    exec(theirs.replace("max_steps=2", 'max_steps=1, use_cpu=True, report_to=[], save_strategy="no"'), names)
    assert names["trainer"].state.global_step == 1


def test_the_config_for_verl_is_read_with_verls_own_record(in_a_folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "2+2="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row] * 80), "train.parquet")
    Path("my_reward.py").write_text(blocks(VERL, "python")[0])
    Path("run.toml").write_text(blocks(VERL, "toml")[0])
    checked = check_config(load(Path("run.toml"), RunConfig))
    assert checked.data is not None and checked.data.train[0].answer == "4"


def test_the_options_of_verl_exist_there() -> None:
    yaml = pytest.importorskip("yaml")
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not here")
    folder = Path(found.submodule_search_locations[0])
    known = yaml.safe_load((folder / "trainer/config/_generated_ppo_trainer.yaml").read_text())
    command = re.findall(r"^    ([\w.]+)=", blocks(VERL, "bash")[0], flags=re.M)
    for name in (*command, *(theirs for theirs, _ in options(VERL))):
        value = known
        for key in name.split("."):
            assert isinstance(value, dict) and key in value, name
            value = value[key]
