"""Conformance tests of `millstream.env.sandbox.base.Sandbox`, for any driver. Needs pytest.

    from millstream.testing.sandbox import SandboxSuite

    class TestMyCloud(SandboxSuite):
        def make_sandbox(self, limits):
            return MyCloud(limits)             # not started

A fake that neither isolates nor limits commands says so (`is_isolated = False`): tests of that are then skipped."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, ClassVar

import pytest

from millstream.env.sandbox.base import MAX_COMMAND_BYTES, Limits, Sandbox
from millstream.errors import SandboxLost

LIMITS = Limits(
    wall_s=30.0,
    cpu_s=20.0,
    memory_bytes=256 << 20,
    scratch_bytes=8 << 20,
    file_bytes=4 << 20,
    processes=24,
    open_files=64,
    output_bytes=100_000,
)
BOMB = ":(){ :|:& };:; wait; sleep 60"


def sandbox_test(
    *needs: str, limits: Limits = LIMITS
) -> Callable[[Callable[[Any, Sandbox], Awaitable[None]]], Callable[[Any], None]]:
    """A test of a started sandbox, which is closed after it."""

    def decorate(test: Callable[[Any, Sandbox], Awaitable[None]]) -> Callable[[Any], None]:
        @wraps(test)
        def run(self: Any) -> None:
            for need in needs:
                if not getattr(self, need):
                    pytest.skip(f"{need} = False")
            asyncio.run(program(self))

        async def program(self: Any) -> None:
            sandbox = self.make_sandbox(limits)
            await sandbox.start()
            try:
                await test(self, sandbox)
            finally:
                await sandbox.close()

        del run.__wrapped__  # pytest would ask for its arguments
        return run

    return decorate


async def said(sandbox: Sandbox, command: str) -> str:
    """What a command prints that ends with 0."""
    done = await sandbox.exec(command)
    assert (done.how, done.code) == ("ended", 0), done
    return done.output.decode()


class SandboxSuite:
    is_isolated: ClassVar[bool] = True

    def make_sandbox(self, limits: Limits) -> Sandbox:
        raise NotImplementedError

    def run(self, program: Callable[[Callable[[], Sandbox]], Coroutine[Any, Any, None]]) -> None:
        """A test of several sandboxes."""
        made: list[Sandbox] = []

        def make() -> Sandbox:
            made.append(self.make_sandbox(LIMITS))
            return made[-1]

        async def closing() -> None:
            try:
                await program(make)
            finally:
                for sandbox in made:
                    await sandbox.close()

        asyncio.run(closing())

    # ---- commands

    @sandbox_test()
    async def test_a_command_prints_and_its_exit_code_comes_back(self, s: Sandbox) -> None:
        assert await said(s, "echo out; echo error >&2") == "out\nerror\n"
        done = await s.exec("echo so far; exit 3")
        assert (done.how, done.code, done.output) == ("ended", 3, b"so far\n")
        assert (await s.exec("no-such-program")).code == 127

    @sandbox_test()
    async def test_files_stay_between_commands_and_variables_do_not(self, s: Sandbox) -> None:
        await said(s, "echo 7 > number; export x=1; cd /")
        assert await said(s, 'cat number; echo "[$x]"') == "7\n[]\n"

    @sandbox_test()
    async def test_a_command_reads_an_empty_input(self, s: Sandbox) -> None:
        assert await said(s, "cat; wc -c") == "0\n"

    @sandbox_test()
    async def test_a_command_that_hangs_is_stopped_and_the_sandbox_continues(self, s: Sandbox) -> None:
        done = await s.exec("echo begun; sleep 60", timeout_s=0.5)
        assert (done.how, done.code, done.output) == ("time", None, b"begun\n")
        assert await said(s, "echo well") == "well\n"

    @sandbox_test()
    async def test_a_command_that_prints_too_much_is_stopped(self, s: Sandbox) -> None:
        done = await s.exec("head -c 50000000 /dev/zero")
        assert done.how == "output" and len(done.output) == LIMITS.output_bytes
        assert await said(s, "echo well") == "well\n"

    @sandbox_test()
    async def test_output_is_bytes_also_if_it_is_no_text(self, s: Sandbox) -> None:
        assert (await s.exec(r"printf '\377\376\000'")).output == b"\xff\xfe\x00"

    @sandbox_test()
    async def test_a_command_that_kills_its_shell_has_failed(self, s: Sandbox) -> None:
        done = await s.exec("kill -9 $$")
        assert done.how == "ended" and done.code not in (0, None)
        assert await said(s, "echo well") == "well\n"

    @sandbox_test()
    async def test_a_process_in_the_background_does_not_hold_a_command_up(self, s: Sandbox) -> None:
        assert await said(s, "(sleep 60; echo late) >/dev/null 2>&1 & echo now") == "now\n"

    @sandbox_test()
    async def test_a_command_with_a_nul_character_or_a_megabyte_is_refused(self, s: Sandbox) -> None:
        with pytest.raises(ValueError, match="NUL"):
            await s.exec("echo \0")
        with pytest.raises(ValueError, match="bytes: expected at most"):
            await s.exec("#" * (MAX_COMMAND_BYTES + 1))

    @sandbox_test()
    async def test_a_cancelled_command_is_killed(self, s: Sandbox) -> None:
        task = asyncio.create_task(s.exec("sleep 1; touch ended"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await said(s, "sleep 1; ls") == ""

    # ---- files

    @sandbox_test()
    async def test_what_is_written_is_read_and_seen_by_commands(self, s: Sandbox) -> None:
        data = bytes(range(256)) * 100
        await s.write("a/b/data", data)
        await s.write("empty", b"")
        assert await s.read("a/b/data") == data and await s.read("empty") == b""
        assert await said(s, "wc -c < a/b/data") == "25600\n"
        await s.write("a/b/data", b"short")
        assert await s.read("a/b/data") == b"short"

    @sandbox_test()
    async def test_paths_that_cannot_be_read_or_written_are_errors_of_the_system(self, s: Sandbox) -> None:
        await said(s, "mkdir folder; ln -s nowhere link; ln -s loop loop")
        for path in ("missing", "folder", "link", "loop", "/dev/zero"):
            with pytest.raises(OSError):
                await s.read(path)
        with pytest.raises(OSError):
            await s.write("folder", b"x")

    @sandbox_test("is_isolated")
    async def test_no_path_and_no_link_leads_to_our_own_files(self, s: Sandbox) -> None:
        await said(s, f"ln -s {__file__} link; ln -s / root")
        for path in (
            __file__,
            "link",
            f"root{__file__}",
            f"../../../../../../../..{__file__}",
            f"/proc/1/root{__file__}",
        ):
            with pytest.raises(OSError):
                await s.read(path)

    # ---- snapshots

    def test_a_snapshot_is_a_copy_that_later_writes_do_not_change(self) -> None:
        async def program(make: Callable[[], Sandbox]) -> None:
            first, second, third = make(), make(), make()
            await first.start()
            await said(first, "echo one > a; ln a same; mkdir -p d/e; echo x > d/e/f; chmod 750 d; ln -s a link")
            await said(first, "echo run > s; chmod +x s")
            snapshot = await first.snapshot()
            await said(first, "echo two > a; rm -r d")
            await second.start(snapshot)
            await third.start(snapshot)
            await said(second, "echo three >> a")
            assert [await said(one, "cat a same") for one in (first, second, third)] == [
                "two\ntwo\n",
                "one\nthree\none\nthree\n",
                "one\none\n",
            ]
            assert await said(third, "cat d/e/f link; stat -c %a d; test -x s && echo x") == "x\none\n750\nx\n"
            await second.start(snapshot)
            assert await said(second, "cat a") == "one\n"

        self.run(program)

    def test_a_started_sandbox_starts_again_empty(self) -> None:
        async def program(make: Callable[[], Sandbox]) -> None:
            sandbox = make()
            await sandbox.start()
            await said(sandbox, "mkdir -p a/b; echo x > a/b/c; touch .hidden; sleep 60 >/dev/null 2>&1 &")
            await sandbox.start()
            assert await said(sandbox, "ls -A") == ""

        self.run(program)

    @sandbox_test()
    async def test_a_snapshot_is_a_tar_archive_of_the_folder(self, s: Sandbox) -> None:
        await s.write("a/b", b"x")
        with tarfile.open(fileobj=io.BytesIO(await s.snapshot())) as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
        assert names - {"."} == {"a", "a/b"}

    # ---- the end

    def test_a_closed_sandbox_is_lost_and_can_be_closed_again(self) -> None:
        async def program(make: Callable[[], Sandbox]) -> None:
            sandbox, never = make(), make()
            await sandbox.start()
            await asyncio.gather(sandbox.close(), sandbox.close())
            await sandbox.close()
            with pytest.raises(SandboxLost):
                await sandbox.exec("true")
            with pytest.raises(SandboxLost):
                await sandbox.read("a")
            with pytest.raises(SandboxLost):
                await never.exec("true")

        self.run(program)

    # ---- limits

    @sandbox_test("is_isolated")
    async def test_a_full_disk_is_an_error_of_the_command(self, s: Sandbox) -> None:
        done = await s.exec("for i in 1 2 3 4 5 6 7 8 9; do head -c 1000000 /dev/zero > $i || exit 9; done")
        assert done.code == 9 and b"No space left" in done.output
        with pytest.raises(OSError):
            await s.write("more", bytes(1_000_000))
        assert await said(s, "rm *; echo well") == "well\n"

    @sandbox_test("is_isolated")
    async def test_a_fork_bomb_is_stopped_and_the_sandbox_continues(self, s: Sandbox) -> None:
        assert (await s.exec(BOMB, timeout_s=1.0)).how in ("time", "processes")
        assert await said(s, "echo well") == "well\n"

    @sandbox_test("is_isolated")
    async def test_memory_is_limited_over_all_processes(self, s: Sandbox) -> None:
        hog = "x=$(head -c 80000000 /dev/zero | tr '\\0' x); sleep 60"
        done = await s.exec(f"({hog}) & ({hog}) & ({hog}) & ({hog}) & wait")
        assert done.how == "memory" or done.code != 0, done
        assert await said(s, "echo well") == "well\n"

    @sandbox_test("is_isolated")
    async def test_there_is_no_network(self, s: Sandbox) -> None:
        done = await s.exec("cat /proc/net/dev | grep -v lo: | grep -c :; exec 3<>/dev/tcp/127.0.0.1/22")
        assert done.code != 0 and done.output.startswith(b"0\n")
