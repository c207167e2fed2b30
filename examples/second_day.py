"""A user's second day, from an installed package: own data, own reward, a run, a change, a comparison, an evaluation, a folder.

    python examples/second_day.py                 with the installed `millstream`, in a temporary folder
    python examples/second_day.py --from-wheel    builds the wheel, installs it in a clean environment, and walks there

Every step is a command as a user types it. The model is made on the spot and nothing is downloaded but packages. Each step is a
function: `STEPS` lists those that are walked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"  # one version, so that a build without CUDA can be chosen
CONFIG = """\
seed = 1

[model.tiny]
hidden = 32
layers = 1
heads = 2
context = 32

[data]
path = "sums.jsonl"
prompt_key = "question"
holdout = 16

[[reward]]
function = "near.py:near"

[rollout]
group_size = 4
max_tokens = 4

[pipeline]
steps = 4
groups_per_step = 4
max_lag = 1

[learner]
learning_rate = 1e-3

[checkpoint]
keep_every = 2

[engine]
process = false
"""
REWARD = '''\
def near(completions, answer, **columns):
    """In TRL's form: 1 for the sum itself, less for a number that is near it, 0 for what is no number."""
    rewards = []
    for completion, gold in zip(completions, answer):
        digits = "".join(character for character in completion if character.isdigit())
        rewards.append(1 / (1 + abs(int(digits) - int(gold))) if digits else 0.0)
    return rewards
'''


class Day:
    """The folder of the day, and the program that is typed."""

    def __init__(self, folder: Path, program: list[str]) -> None:
        self.folder = folder
        self.program = program

    def type(self, *words: str, code: int = 0) -> str:
        """Run one command; its output. Ends the day where its exit code is another."""
        began = time.monotonic()
        out = subprocess.run([*self.program, *words], cwd=self.folder, capture_output=True, text=True, timeout=600)
        print(f"$ millstream {' '.join(words)}    # {time.monotonic() - began:.1f} s", flush=True)
        if out.returncode != code:
            sys.exit(f"exit code {out.returncode}, expected {code}\n{out.stdout}\n{out.stderr}")
        return out.stdout

    def expect(self, found: object, what: str) -> None:
        if not found:
            sys.exit(f"not so: {what}")


# ---- the steps -------------------------------------------------------------------------------------------------------------


def own_data_and_reward(day: Day) -> None:
    """Files of the user's own, and a config that names them."""
    records = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10)]
    (day.folder / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (day.folder / "near.py").write_text(REWARD)
    day.expect("demo" in day.type("recipes"), "recipes are in the package")
    day.type("init", "--recipe", "demo", "from_a_recipe.toml")
    (day.folder / "run.toml").write_text(CONFIG)
    day.expect(
        "84 tasks to train on, 16 held out" in day.type("train", "run.toml", "--dry-run"), "the config is checked"
    )


def train(day: Day) -> None:
    """The first run, and the folder that it leaves."""
    result = json.loads(day.type("train", "run.toml", "--set", "run_dir=first", "--json"))
    day.expect(result["summary"]["steps"] == 4, "four steps are trained")
    day.type("audit", "first")


def change_and_train_again(day: Day) -> None:
    """The same run with another setting, in a folder of its own."""
    words = ("--set", "learner.learning_rate=3e-3", "--set", "run_dir=second", "--json")
    result = json.loads(day.type("train", "run.toml", *words))
    day.expect(result["summary"]["steps"] == 4, "the second run has trained")


def stop_and_resume(day: Day) -> None:
    """Ctrl-C in the middle, and the rest with two engines."""
    words = ["train", "run.toml", "--quiet", "--set", "run_dir=third", "--set", "pipeline.steps=200"]
    metrics = day.folder / "third/metrics.jsonl"
    process = subprocess.Popen(
        [*day.program, *words], cwd=day.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None and not (metrics.is_file() and b'"reward"' in metrics.read_bytes()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    print("$ millstream " + " ".join(words) + "    # Ctrl-C", flush=True)
    day.expect(process.returncode == 130 and b"train --resume third" in said, f"it says how to resume: {said.decode()}")
    result = json.loads(day.type("train", "--resume", "third", "--set", "engine.replicas=2", "--json"))
    day.expect(result["summary"]["steps"] == 200, "the run is complete")
    day.type("audit", "third")


def evaluate(day: Day) -> None:
    """The saved model, on the records that were never trained."""
    found = json.loads(day.type("eval", "first", "--json", "--show", "2"))
    day.expect(len(found["samples"]) == 2 and 0 <= found["accuracy"] <= 1, "the model is measured, with samples")


def export_a_folder(day: Day) -> None:
    """What transformers loads, of any checkpoint."""
    day.type("export", "first", "published")
    day.type("export", "first", "halfway", "--step", "2")
    for name in ("published", "halfway"):
        files = {path.name for path in (day.folder / name).iterdir()}
        day.expect({"config.json", "model.safetensors", "tokenizer.json"} <= files, f"{name} is a model's folder")


# ---- steps that need commands of their own ---------------------------------------------------------------------------------


def resume_with_a_change(day: Day) -> None:
    """A finished run is trained further, with a lower learning rate."""
    words = ("--set", "pipeline.steps=6", "--set", "learner.learning_rate=1e-4", "--json")
    result = json.loads(day.type("train", "--resume", "second", *words))
    day.expect(result["summary"]["steps"] == 6, "two more steps are trained")
    day.type("audit", "second")


def compare(day: Day) -> None:
    """What differs between two runs."""
    day.expect("learning_rate" in day.type("diff", "first", "second"), "the changed setting is named")


def read_rollouts(day: Day) -> None:
    """What the model wrote."""
    out = day.type("rollouts", "first", "--step", "3", "--sort", "reward", "--worst", "2")
    day.expect("+" in out and "=" in out, "prompts and completions are shown")


def evaluate_a_checkpoint(day: Day) -> None:
    """Several samples a task, of one checkpoint."""
    day.type("eval", "first@2", "--samples", "4")


STEPS: list[Callable[[Day], None]] = [
    own_data_and_reward,
    train,
    change_and_train_again,
    stop_and_resume,
    resume_with_a_change,
    compare,
    read_rollouts,
    evaluate,
    evaluate_a_checkpoint,
    export_a_folder,
]


# ---- a clean environment ---------------------------------------------------------------------------------------------------


def install_wheel(folder: Path) -> list[str]:
    """Build the wheel, install it where nothing else is; the program that was installed."""
    pip = [sys.executable, "-m", "pip"]
    run = subprocess.run
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "dist"), str(ROOT)], check=True)
    (wheel,) = (folder / "dist").glob("millstream-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    for packages in ([TORCH], [str(wheel)]):
        run([python, "-m", "pip", "install", "--quiet", "--no-compile", *constraint, *packages], check=True)
    where = run(
        [python, "-c", "import millstream; print(millstream.__file__)"], check=True, capture_output=True, text=True
    )
    if str(folder) not in where.stdout:
        sys.exit(f"millstream comes from {where.stdout.strip()}, not from the wheel")
    if not (Path(where.stdout.strip()).parent / "py.typed").is_file():
        sys.exit("the wheel has no py.typed")
    return [str(folder / "venv/bin/millstream")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-wheel", action="store_true", help="build and install the wheel first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millstream-second-day-") as name:
        folder = Path(name)
        if options.from_wheel:
            os.environ.pop("PYTHONPATH", None)
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles nothing: the first command does
            program = install_wheel(folder)
        else:
            program = [sys.executable, "-m", "millstream"]
        (folder / "day").mkdir()
        day = Day(folder / "day", program)
        for step in STEPS:
            print(f"\n# {step.__name__.replace('_', ' ')}: {textwrap.shorten(step.__doc__ or '', 100)}", flush=True)
            step(day)
        print(f"\n{len(STEPS)} passed, 0 failed")


if __name__ == "__main__":
    main()
