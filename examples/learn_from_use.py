"""A client of `millstream serve RUN --learn`: it asks, looks at the answers, and rewards them. The model learns while it runs.

    millstream train recipes/demo.toml --set run_dir=runs/demo
    export MILLSTREAM_TOKEN=$(openssl rand -hex 16)
    millstream serve runs/demo --learn --name policy --set algorithm.name=reinforce_plus_plus --set rollout.group_size=1 \\
        --set pipeline.filter_zero_signal=false --set pipeline.max_lag=4
    python examples/learn_from_use.py

The demo's model sorts digits. This user wants the largest digit alone. Needs the package `openai`.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
from openai import OpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000/v1")
TOKEN = os.environ.get("MILLSTREAM_TOKEN", "")
HTTP = httpx.Client(base_url=URL, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)


def use_once(number: int) -> float:
    """One session: a question, an answer, and what the user thinks of it."""
    digits = "".join(random.Random(number).choices("123456789", k=5))
    session_id = HTTP.post("/sessions").raise_for_status().json()["id"]
    client = OpenAI(base_url=URL, api_key=TOKEN, default_headers={"X-Session-Id": session_id})
    answer = client.completions.create(model="policy", prompt=f"{digits}>", max_tokens=8).choices[0].text
    reward = float(answer.strip()[:1] == max(digits)) - 0.1 * (len(answer.strip()) > 1)
    answered = HTTP.post(f"/sessions/{session_id}/reward", json={"reward": reward})
    if answered.status_code not in (200, 409):  # 409: too old to be trained
        answered.raise_for_status()
    return reward


def main(num_sessions: int = 2000, every: int = 200) -> None:
    with ThreadPoolExecutor(16) as users:
        for begin in range(0, num_sessions, every):
            rewards = list(users.map(use_once, range(begin, begin + every)))
            print(f"sessions {begin} to {begin + every}: mean reward {sum(rewards) / every:.2f}")


if __name__ == "__main__":
    main()
