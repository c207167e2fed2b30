"""A program: starts sandboxes with busy processes in them, says so, and waits to be killed. `argv[1]`: the name of the processes."""

from __future__ import annotations

import asyncio
import sys

from millstream.env.sandbox.walled import WalledSandbox


async def main(name: str) -> None:
    sandboxes = [WalledSandbox() for _ in range(3)]
    for sandbox in sandboxes:
        await sandbox.start()
        await sandbox.write("big", bytes(1_000_000))
        await sandbox.exec(f"cp $(command -v sleep) {name}; (setsid ./{name} 600 &) ; ./{name} 600 &")
    running = asyncio.create_task(sandboxes[0].exec(f"./{name} 600", timeout_s=600))
    await asyncio.sleep(0.2)
    print(*(sandbox.keeper_id for sandbox in sandboxes), flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
