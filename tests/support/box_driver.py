"""A program: runs programs in the sandbox, as another user than the one that starts it. See `support.boxes`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

if "BOX_INSIDE" in os.environ:
    sys.path.append(os.environ["BOX_INSIDE"])  # without the package, which takes long to import

ORDINARY = 54_321
CAP_SYS_ADMIN = 21


def become(identity: str) -> None:
    """Then start again, with the rights of that identity and no others."""
    from inside import syscalls

    if identity == "bare root":
        syscalls.control(syscalls.PR_CAPBSET_DROP, CAP_SYS_ADMIN)
    elif identity == "user" and os.geteuid() == 0:
        show([sys.base_prefix, sys.prefix, *os.environ["PYTHONPATH"].split(":")])
        os.setgroups([])
        os.setresgid(ORDINARY, ORDINARY, ORDINARY)
        os.setresuid(ORDINARY, ORDINARY, ORDINARY)
    os.execv(sys.executable, [sys.executable, __file__])


def show(paths: list[str]) -> None:
    """In a mount namespace of our own, folders that only root can enter are replaced by ones that hold these paths alone."""
    from inside import syscalls

    hidden = {path: top for path in map(os.path.realpath, paths) if (top := _hidden_at(Path(path)))}
    syscalls.unshare(syscalls.NEWNS)
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    places = {path: os.open(path, os.O_PATH) for path in hidden}
    for top in set(hidden.values()):
        syscalls.mount("tmpfs", str(top), "tmpfs", 0, "mode=755")
    for path, place in places.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        syscalls.mount(f"/proc/self/fd/{place}", path, None, syscalls.MS_BIND | syscalls.MS_REC)


def _hidden_at(path: Path) -> Path | None:
    return next((place for place in reversed((path, *path.parents)) if not place.stat().st_mode & 0o001), None)


async def main(jobs: list[dict[str, Any]], at_once: int) -> list[Any]:
    from millstream.env.sandbox.programs import Limits, ProgramSandbox

    free = asyncio.Semaphore(at_once)

    async def one(job: dict[str, Any]) -> Any:
        async with free:
            box = ProgramSandbox(Limits(**job["limits"]), walls=job["walls"])
            if "tests" in job:
                return await box.examine(job["program"], job["tests"])
            ran = await box.run(job["program"].replace("PID", str(os.getpid())))
            return {
                "how": ran.how,
                "code": ran.code,
                "output": ran.output,
                "errors": ran.errors,
                "is_clean": ran.is_clean,
            }

    return list(await asyncio.gather(*map(one, jobs)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        become(sys.argv[1])
    sys.stdout.write(json.dumps(asyncio.run(main(**json.load(sys.stdin)))))
