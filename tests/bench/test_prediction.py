"""bench/prediction.py: what it predicts of runs whose costs are known, and how it counts."""

from __future__ import annotations

from pathlib import Path

from internals import DrawConfig, load, simulate
from millstream import RunConfig
from millstream.run.simulate import costs_of
from prediction import BASE, Index, Measured, Prediction, Trial, pairs, predict, rows_of, trials

ONE_GPU = Path(__file__).parents[2] / "recipes/sim/one_gpu.toml"
QUICK = ("sim.lengths.mean=100", "sim.driver_s=1e-3", "rollout.max_tokens=400", "sim.train_tokens_per_s=30000")
SLOW = DrawConfig(kind="lognormal", mean=3.0, sigma=1.0)
WARM_STEPS = 4


def test_runs_on_the_virtual_clock_are_predicted_from_one_of_them(tmp_path: Path) -> None:
    wanted = [
        Trial(name=BASE),
        Trial(name="max_lag 0", changes=("pipeline.max_lag=0", "pipeline.lockstep=false")),
        Trial(name="slow", changes=("pipeline.max_lag=1",), latency_s=SLOW),
    ]
    index = Index()
    for number, trial in enumerate(wanted):
        changes = (*QUICK, "pipeline.max_lag=2", "pipeline.steps=24", *trial.changes)
        latency = () if trial.latency_s is None else ("sim.environment.latency_s={kind='lognormal',mean=3,sigma=1}",)
        config = load(ONE_GPU, RunConfig, [*changes, *latency])
        simulate(config, costs_of(config), out=tmp_path / str(number))
        index.runs.append(Measured(trial=trial, folder=str(number), warm_steps=WARM_STEPS, device="cpu"))
    found = predict(tmp_path, index, 24)
    assert [one.name for one in found] == [trial.name for trial in wanted]
    assert all(abs(one.error) < 0.15 for one in found), found
    assert pairs(found)[1] == [] and rows_of(found, index, "sim")[-2].ours == 2


def test_only_pairs_that_are_apart_must_be_in_order() -> None:
    def one(name: str, real: float, predicted: float) -> Prediction:
        return Prediction(name=name, rollouts=8, real_per_s=[real], predicted_per_s=predicted)

    found = [one("a", 10, 12), one("b", 11, 10), one("c", 20, 11.5)]
    assert pairs(found) == (2, [("a", "c")]), "a and b are near each other"


def test_there_are_six_configs_beside_the_base_on_both_devices() -> None:
    for device in ("cpu", "gpu"):
        found = trials(device, is_smoke=False)
        assert found[0] == Trial(name=BASE) and len({trial.name for trial in found}) == 7
