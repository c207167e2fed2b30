"""The learner whose other end is outside: it keeps the promises of a learner through a program that claims batches and publishes
weights, and takes each version once, from a batch that was claimed, with weights that fit."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import foreign_learner
from millstream.errors import LearnerError, StoreError, StreamEnded
from millstream.learner import Learner
from millstream.learner.outside import OfferedBatches, OutsideLearner
from millstream.model.load import load_weights, model_weights
from millstream.store import TRAIN, Lease, Want
from millstream.testing.learner import LearnerSuite, flat_weights, make_rows
from millstream.types import Weights
from support.tiny import VOCABULARY, make, plain


class Folder:
    """Where weights are written, and what was announced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.announced: list[tuple[int, str]] = []

    def write(self, version: int, weights: Weights) -> str:
        where = self.path / f"{version}-{len(list(self.path.iterdir()))}.safetensors"
        save_file({name: tensor.detach().clone() for name, tensor in weights.items()}, where)
        return str(where)

    def open(self) -> tuple[OutsideLearner, OfferedBatches]:
        batches = OfferedBatches()
        learner = OutsideLearner(
            make("qwen3"),
            batches,
            offered=self.path,
            write=self.write,
            on_published=lambda *new: self.announced.append(new),
        )
        return learner, batches


async def train_outside(
    folder: Folder, learner: OutsideLearner, batches: OfferedBatches, spoil: Callable[[Lease], Lease]
) -> None:
    """The program of the example, with an optimizer that has no state: what a checkpoint does not have, it cannot restore."""
    model = plain(make("qwen3"))
    while True:
        batch = await batches.claim(TRAIN)
        load_weights(model, await learner.weights())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        metrics = foreign_learner.train(model, optimizer, spoil(batch), temperature=1.0)
        where = folder.write(batch.group_id + 1, model_weights(model))
        await learner.publish(batch.group_id + 1, where, metrics)


class TestOutsideLearner(LearnerSuite):
    vocabulary = VOCABULARY
    spoil = staticmethod(lambda batch: batch)
    # It computes no log-probabilities for the run.
    test_log_ratios_are_of_the_trained_tokens_of_the_last_step_in_their_order = None  # type: ignore[assignment]
    test_log_probabilities_are_those_of_each_row_alone_and_training_moves_them = None  # type: ignore[assignment]

    def open(self, num_steps: int | None = None) -> Learner:
        self.folders = [*getattr(self, "folders", []), tempfile.TemporaryDirectory()]
        folder = Folder(Path(self.folders[-1].name))
        learner, batches = folder.open()
        self.programs = [
            *getattr(self, "programs", []),
            asyncio.create_task(train_outside(folder, learner, batches, self.spoil)),
        ]
        return learner

    async def close(self, learner: Learner) -> None:
        await super().close(learner)
        with pytest.raises(StreamEnded):
            await self.programs.pop()


def without_mask(batch: Lease) -> Lease:
    for mask in batch["loss_mask"]:
        mask[:] = True
    return batch


def test_a_program_that_trains_what_it_should_not_is_caught_by_the_suite() -> None:
    suite = TestOutsideLearner()
    suite.spoil = without_mask  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        suite.test_what_is_not_trained_changes_nothing()


# ---- what is refused, and what dies ----------------------------------------------------------------------------------------


def run(program: Callable[[OutsideLearner, OfferedBatches, Folder], Awaitable[None]], tmp_path: Path) -> None:
    async def limited() -> None:
        folder = Folder(tmp_path)
        async with asyncio.timeout(30):
            await program(*folder.open(), folder)

    asyncio.run(limited())


async def begun(learner: OutsideLearner) -> asyncio.Task[Any]:
    await learner.begin_batch()
    await learner.accumulate(make_rows(VOCABULARY, count=3))
    return asyncio.create_task(learner.step())


def strange_paths(offered: Path, sound: Path) -> Iterator[tuple[str, str]]:
    """Paths that a program may name, and why each is refused. `sound`: weights that would be taken."""
    for name in ("empty", "pipe", "link"):
        (offered / name).mkdir()
    (offered / "torn.safetensors").write_bytes(b"torn")
    os.mkfifo(offered / "pipe" / "model.safetensors")
    outside = Path(tempfile.mkdtemp()) / "model.safetensors"
    shutil.copy(sound, outside)
    (offered / "link" / "model.safetensors").symlink_to(outside)
    (offered / "out").symlink_to(outside.parent)
    yield "nowhere", "expected an absolute path"
    yield f"{sound}\0", "expected an absolute path"
    yield str(offered / "nowhere"), "cannot be read"
    yield str(offered / "empty"), "no file ends in"
    yield str(offered / "torn.safetensors"), "cannot be read"
    yield str(offered / "pipe"), "is not a regular file"
    yield str(offered / "pipe" / "model.safetensors"), "is not a regular file"
    yield str(offered / "link"), "is not a regular file"
    for where in (outside, offered / "out", offered / ".." / outside.parent.name, Path("/dev/zero"), offered.parent):
        yield str(where), "is not within"
    shutil.rmtree(outside.parent)


def test_publications_that_are_wrong_are_refused_by_name_and_change_nothing(tmp_path: Path) -> None:
    async def program(learner: OutsideLearner, batches: OfferedBatches, folder: Folder) -> None:
        await learner.ready()
        assert folder.announced == [(0, folder.announced[0][1])]
        before, sound = flat_weights(await learner.weights()), folder.write(1, await learner.weights())
        with pytest.raises(StoreError, match="not claimed"):
            await learner.publish(1, sound, {})
        stepping = await begun(learner)
        await asyncio.sleep(0)
        with pytest.raises(StoreError, match="not claimed"):
            await learner.publish(1, sound, {})
        lease = await batches.claim(TRAIN)
        assert lease.group_id == 0 and len(lease) == 3 and "advantages" in lease.columns
        weights = dict(await learner.weights())
        name = next(iter(weights))
        short = {key: tensor for key, tensor in weights.items() if key != name}
        for wrong, why in (
            (short, f"malformed: .* has no {name}"),
            (weights | {name: weights[name][:1].clone()}, f"malformed: {name} .* expected"),
            (weights | {name: weights[name].to(torch.int32)}, f"malformed: {name} .* I32"),
            (weights | {name: weights[name].to(torch.float8_e4m3fn)}, "F8_E4M3 .*, expected F64, F32, F16 or BF16 of"),
            (weights | {name: weights[name].clone().fill_(float("nan"))}, "not finite"),
        ):
            with pytest.raises(StoreError, match=why):
                await learner.publish(1, folder.write(9, wrong), {})
        for where, why in strange_paths(tmp_path, Path(sound)):
            with pytest.raises(StoreError, match=f"malformed: .*{why}"):
                await learner.publish(1, where, {})
        for metrics, why in (
            ({"micro_batch_tokens": float("nan")}, "is the run's own"),
            (dict.fromkeys(map(str, range(300)), 0.0), "300 metrics"),
        ):
            with pytest.raises(StoreError, match=f"malformed: .*{why}"):
                await learner.publish(1, sound, metrics)
        for version, why in ((0, "twice"), (2, "wrong version: 2, expected 1")):
            with pytest.raises(StoreError, match=why):
                await learner.publish(version, sound, {})
        with pytest.raises(StoreError, match="not published"):
            await batches.acknowledge(lease)
        assert not stepping.done() and (flat_weights(await learner.weights()) == before).all()
        await learner.publish(1, sound, {"loss": 0.5})
        assert await stepping == {"loss": 0.5} and folder.announced[-1] == (1, sound)
        await batches.acknowledge(lease)  # it is
        with pytest.raises(StoreError, match="twice: version 1 is there, the next one is 2"):
            await learner.publish(1, sound, {})
        with pytest.raises(LearnerError):
            await learner.logprobs([])

    run(program, tmp_path)


async def claimed(batches: OfferedBatches, expires_s: float) -> Lease:
    return await batches.claim(TRAIN, Want(groups=1, expires_s=expires_s))


def test_the_batch_of_a_learner_that_dies_goes_to_the_next_and_is_trained_once(tmp_path: Path) -> None:
    async def program(learner: OutsideLearner, batches: OfferedBatches, folder: Folder) -> None:
        stepping = await begun(learner)
        dead = await claimed(batches, 0.05)
        again = await claimed(batches, 60)
        assert dead.row_ids == again.row_ids and dead.lease_id != again.lease_id
        where = folder.write(1, await learner.weights())
        await asyncio.gather(*(learner.publish(1, where, {"by": by}) for by in (0.0, 1.0)), return_exceptions=True)
        assert await stepping == {"by": 0.0}, "one of them counts"
        assert learner.version == 1 and (await batches.stats()).rows == 0

        stepping = await begun(learner)
        slow = await claimed(batches, 0.05)
        await asyncio.sleep(0.1)
        await learner.publish(2, where, {})  # no other program has claimed it meanwhile
        await stepping
        assert slow.group_id == 1 and (await batches.stats()).rows == 0

    run(program, tmp_path)


def test_a_publication_whose_batch_cannot_be_ended_changes_nothing(tmp_path: Path) -> None:
    async def program(learner: OutsideLearner, batches: OfferedBatches, folder: Folder) -> None:
        stepping = await begun(learner)
        await batches.claim(TRAIN)
        before = flat_weights(await learner.weights())
        other = {name: tensor + 1 for name, tensor in (await learner.weights()).items()}

        async def fails(version: int) -> None:
            raise StreamEnded("the run is over")

        batches.end = fails  # type: ignore[method-assign]
        with pytest.raises(StreamEnded):
            await learner.publish(1, folder.write(1, other), {})
        assert learner.version == 0 and not stepping.done()
        assert (flat_weights(await learner.weights()) == before).all()
        stepping.cancel()

    run(program, tmp_path)
