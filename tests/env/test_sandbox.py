"""The sandbox: every attack is tried, behind each kind of walls that this machine allows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.env.sandbox import programs
from millstream.env.sandbox.inside.syscalls import landlock_version
from millstream.env.sandbox.programs import (
    PROMISES,
    WALLS,
    Limits,
    ProgramSandbox,
    Ran,
    SandboxBroken,
    Walls,
    what_is_contained,
)

LIMITS = Limits(
    wall_s=60.0, cpu_s=20.0, memory_bytes=256 << 20, scratch_bytes=4 << 20, file_bytes=2 << 20, processes=16
)


@pytest.fixture(params=WALLS)
def walls(request: pytest.FixtureRequest) -> Walls:
    try:
        what_is_contained(request.param)
    except SandboxBroken as error:
        assert request.param != "none" or sys.platform != "linux", "these need nothing of the kernel"
        pytest.skip(f"walls {request.param!r} cannot be had here: {error}")
    chosen: Walls = request.param
    return chosen


def need(walls: Walls, promise: str) -> None:
    if not getattr(what_is_contained(walls), promise):
        pytest.skip(f"walls {walls!r} do not contain {promise!r} on this machine, and what_is_contained() says so")


def run(walls: Walls, program: str, *, stdin: str = "", limits: Limits = LIMITS) -> Ran:
    return asyncio.run(ProgramSandbox(limits, walls=walls).run(program, stdin=stdin))


def examine(program: str, *tests: str, walls: Walls | None = None, limits: Limits = LIMITS) -> list[str]:
    return asyncio.run(ProgramSandbox(limits, walls=walls).examine(program, tests))


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (holds := is_so()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


# ---- programs ----------------------------------------------------------------------------------------------------------------


def test_a_program_reads_its_input_and_its_output_and_exit_code_come_back(walls: Walls) -> None:
    assert run(walls, "print(int(input()) * 2)", stdin="21\n") == Ran(how="ended", code=0, output="42\n")
    failed = run(walls, "import sys\nprint('so far')\nsys.exit(3)")
    assert (failed.code, failed.output) == (3, "so far\n")
    assert "ZeroDivisionError" in run(walls, "1/0").errors


def test_a_long_input_that_nobody_reads_blocks_nothing(walls: Walls) -> None:
    assert run(walls, "print('done')", stdin="x" * 4_000_000).output == "done\n"


def test_an_infinite_loop_is_ended(walls: Walls) -> None:
    ran = run(walls, "while True: pass", limits=Limits(wall_s=0.3))
    assert (ran.how, ran.code) == ("time", None)


def test_cpu_time_is_limited_apart_from_the_time_on_the_clock(walls: Walls) -> None:
    assert run(walls, "while True: pass", limits=Limits(wall_s=120.0, cpu_s=1.0)).code == -signal.SIGXCPU


def test_infinite_output_is_cut_and_not_buffered(walls: Walls) -> None:
    limits = Limits(output_bytes=10_000, wall_s=60.0)
    ran = run(walls, "while True: print('x' * 1000)", limits=limits)
    assert ran.how == "output" and len(ran.output) == 10_000
    assert run(walls, "import os\nwhile True: os.write(2, b'x' * 1000)", limits=limits).how == "output"


def test_a_memory_hog_gets_a_memory_error(walls: Walls) -> None:
    ran = run(walls, "x = []\nwhile True: x.append(bytearray(10_000_000))")
    assert ran.code == 1 and "MemoryError" in ran.errors


def test_memory_that_address_space_does_not_count_cannot_be_had(walls: Walls) -> None:
    for program in ("import os\nos.memfd_create('x')", "import mmap\nmmap.mmap(-1, 4096)"):
        assert "PermissionError" in run(walls, program).errors
    if walls != "none":
        zeros = (
            "import mmap, os\nfile = os.open('/dev/zero', os.O_RDWR)\nprint(os.read(file, 2))\nmmap.mmap(file, 4096)"
        )
        ran = run(walls, zeros)
        assert ran.output == "b'\\x00\\x00'\n" and "OSError: [Errno 19]" in ran.errors


def test_an_interrupt_of_the_first_process_ends_nothing(walls: Walls) -> None:
    if walls == "none":
        pytest.skip("without a namespace the first process is that of the machine")
    ran = run(walls, "import os, time\ntry: os.kill(1, 2)\nexcept OSError: pass\ntime.sleep(0.3)\nprint('alive')")
    assert (ran.how, ran.output) == ("ended", "alive\n")


def test_one_large_file_and_many_small_ones_both_meet_an_end(walls: Walls) -> None:
    large = run(walls, "open('a', 'wb').write(bytes(3_000_000))")
    assert "File too large" in large.errors
    program = "i = 0\nwhile True:\n    open(f'{i}', 'wb').write(bytes(500_000))\n    i += 1"
    many = run(walls, program)
    assert many.how == "disk" or "No space left" in many.errors


def test_the_scratch_folder_is_gone_afterwards(walls: Walls, tmp_path: Path) -> None:
    ran = run(walls, "import os\nopen('mine', 'w').write('x')\nprint(os.path.abspath('mine'))")
    assert ran.code == 0 and not Path(ran.output.strip()).exists()


def test_a_fork_bomb_runs_into_its_limit_and_leaves_nothing(walls: Walls) -> None:
    need(walls, "processes")
    bomb = "import ctypes, os\nctypes.CDLL(None).prctl(15, NAME, 0, 0, 0)\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    name, program = named(bomb)
    assert run(walls, program, limits=Limits(wall_s=0.5, processes=16)).how in ("time", "processes")
    assert num_named(name) == 0


def test_a_fork_bomb_in_one_sandbox_does_not_touch_another(walls: Walls) -> None:
    need(walls, "processes")
    if walls == "none":
        pytest.skip("without a namespace or an identity of its own, the kernel counts all programs of a user together")

    name, bomb = named(
        "import ctypes, os\nctypes.CDLL(None).prctl(15, NAME, 0, 0, 0)\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    )

    async def program() -> tuple[Ran, Ran]:
        box = ProgramSandbox(Limits(wall_s=60.0, processes=16), walls=walls)
        bombing = asyncio.create_task(box.run(bomb, wall_s=3.0))
        await asyncio.to_thread(until, lambda: num_named(name) > 1 or bombing.done())
        child = await box.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0); print('well')")
        return await bombing, child

    bombed, well = asyncio.run(program())
    assert bombed.how in ("time", "processes") and well.output == "well\n"


@pytest.mark.parametrize(
    "game",
    [
        "os.kill(os.getppid(), signal.SIGKILL)",
        "os.killpg(0, signal.SIGKILL)",
        "os.kill(-1, signal.SIGKILL)",
        "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU)]; time.sleep(60)",
    ],
)
def test_signal_games_hit_nobody_else(walls: Walls, game: str) -> None:
    need(walls, "signals")
    box = ProgramSandbox(Limits(wall_s=60.0), walls=walls)
    name, waits = named("import ctypes, time\nctypes.CDLL(None).prctl(15, NAME, 0, 0, 0)\ntime.sleep(60)")

    async def program() -> tuple[Ran, bool]:
        neighbour = asyncio.create_task(box.run(waits))
        assert await asyncio.to_thread(until, lambda: num_named(name) == 1)
        ran = await box.run(f"import os, signal, time\ntry:\n    {game}\nexcept OSError: pass", wall_s=2.0)
        is_well = num_named(name) == 1 and not neighbour.done()
        neighbour.cancel()
        await asyncio.gather(neighbour, return_exceptions=True)
        return ran, is_well

    ran, is_well = asyncio.run(program())
    assert ran.is_clean and is_well


DAEMON = """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, NAME, 0, 0, 0)
        print("named", flush=True)
        open("named", "w").close()
        for descriptor in (0, 1, 2): os.close(descriptor)
        time.sleep(20)
        os._exit(0)
    os._exit(0)
os.wait()
while not os.path.exists("named"): time.sleep(0.01)
"""


def processes_named(name: str) -> list[Path]:
    """Processes on this machine that call themselves so."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                found += [entry] if (entry / "comm").read_text().strip() == name else []
    return found


def num_named(name: str) -> int:
    return len(processes_named(name))


def named(program: str) -> tuple[str, str]:
    """A program that gives itself a name which nothing else has, and that name."""
    name = f"box-{secrets.token_hex(4)}"
    return name, program.replace("NAME", repr(name.encode()))


def test_a_daemon_does_not_outlive_the_program_that_started_it(walls: Walls) -> None:
    name, program = named(DAEMON)
    ran = run(walls, program)
    assert (ran.how, ran.code, ran.output) == ("ended", 0, "named\n")
    assert num_named(name) == 0


def test_a_caller_that_gives_up_takes_the_program_with_it(walls: Walls) -> None:
    name, waits = named("import ctypes, time\nctypes.CDLL(None).prctl(15, NAME, 0, 0, 0)\ntime.sleep(20)")

    async def program() -> None:
        box = ProgramSandbox(Limits(wall_s=20.0), walls=walls)
        running = asyncio.create_task(box.run(waits))
        while not num_named(name):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(program())
    assert until(lambda: num_named(name) == 0)


def test_the_kernel_kills_a_program_and_its_children_before_anything_else(walls: Walls) -> None:
    name, program = named(
        "import ctypes, os, time\nos.fork()\nctypes.CDLL(None).prctl(15, NAME, 0, 0, 0)\n"
        "try: open('/proc/self/oom_score_adj', 'w').write('0')\nexcept OSError: pass\ntime.sleep(60)"
    )

    async def scores() -> list[int]:
        running = asyncio.create_task(ProgramSandbox(LIMITS, walls=walls).run(program))
        assert await asyncio.to_thread(until, lambda: len(processes_named(name)) == 2)
        found = [int((process / "oom_score_adj").read_text()) for process in processes_named(name)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return found

    assert asyncio.run(scores()) == [1000, 1000]


# ---- what it must not see --------------------------------------------------------------------------------------------------


def test_our_environment_cannot_be_read(walls: Walls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret-42")
    program = f"""
import os
print(os.environ)
for process in ({os.getpid()}, os.getppid(), "self", 1):
    try: print(open(f"/proc/{{process}}/environ").read())
    except OSError: pass
"""
    ran = run(walls, program)
    assert ran.code == 0 and "secret-42" not in ran.output
    need(walls, "environment")
    assert (
        "PermissionError" in (errors := run(walls, f"open('/proc/{os.getpid()}/environ')").errors)
        or "No such" in errors
    )


def test_nothing_of_ours_is_open_in_it(walls: Walls, tmp_path: Path) -> None:
    with (tmp_path / "ours").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        program = "import os\nfound = []\nfor n in range(3, 256):\n    try: os.fstat(n); found.append(n)\n    except OSError: pass\nprint(found)"
        assert run(walls, program).output == "[]\n"


def test_files_outside_the_scratch_folder_are_neither_written_nor_read(walls: Walls, tmp_path: Path) -> None:
    need(walls, "writes")
    need(walls, "reads")
    tmp_path.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_text("secret-42")
    places = [str(tmp_path / "new"), "/usr/new", "/etc/new", "/new", "/dev/new", str(Path(os.__file__).parent / "new")]
    for place in places:
        assert "Error" in run(walls, f"open({place!r}, 'w')").errors, place
    assert not (tmp_path / "new").exists()
    ran = run(walls, f"print(open({str(secret)!r}).read())")
    assert ran.code == 1 and "secret-42" not in ran.output
    assert "Error" in run(walls, f"import os\nos.unlink({str(secret)!r})").errors and secret.exists()


def test_a_socket_that_listens_on_this_machine_cannot_be_reached(walls: Walls) -> None:
    need(walls, "network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run(walls, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)")
        assert ran.code == 1 and "Error" in ran.errors
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_rights_cannot_be_had_back(walls: Walls) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000 | 0x20000), libc.mount(b"none", b"/", None, 32 | 4096, None), libc.umount2(b"/tmp", 2))
try: os.setuid(0) if os.getuid() else print("was root")
except OSError as error: print("refused")
"""
    lines = run(walls, program).output.splitlines()
    assert lines[0] == "-1 -1 -1" and lines[1] in ("refused", "was root")


# ---- examinations ----------------------------------------------------------------------------------------------------------


def test_tests_pass_or_say_why_not(walls: Walls) -> None:
    tests = ["assert f(2) == 4", "assert f(2) == 5, 'no'", "assert g(1)", "assert f('a') == 1", "def"]
    reasons = examine("def f(x): return x ** 2", *tests, walls=walls)
    assert reasons[0] == "" and reasons[1] == "AssertionError: no" and "NameError" in reasons[2]
    assert "TypeError" in reasons[3] and "SyntaxError" in reasons[4]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import os\nos._exit(0)", id="ends with 0"),
        pytest.param("import sys\nsys.exit(0)", id="ends politely"),
        pytest.param('print(\'{"why": ""}\\n\' * 9)\ndef f(x): return 7', id="prints the verdict"),
        pytest.param(
            'import os\nfor n in range(3, 99):\n    try: os.write(n, b\'{"why": ""}\\n\' * 9)\n    except OSError: pass\ndef f(x): return 7',
            id="writes it to every descriptor",
        ),
        pytest.param(
            "class Liar:\n"
            + "".join(f"    def __{n}__(self, *other): return True\n" for n in ("eq", "lt", "gt", "le", "ge", "bool"))
            + "".join(f"    def __{n}__(self, *other): return 0\n" for n in ("sub", "rsub", "abs", "round"))
            + "    def __ne__(self, other): return False\n    def __float__(self): return 3.0\ndef f(x): return Liar()",
            id="returns what equals everything",
        ),
        pytest.param(
            "import builtins\nbuiltins.abs = lambda x: 0\ndef abs(x): return 0\ndef set(x): return 1\n"
            "class math:\n    isclose = lambda *a: True\ndef f(x): return 7",
            id="redefines what tests use",
        ),
        pytest.param("def f(x):\n    import os\n    os._exit(0)", id="ends in the call"),
        pytest.param("def f(x): raise SystemExit(0)", id="raises an exit"),
        pytest.param("def f(x): raise KeyboardInterrupt", id="raises an interrupt"),
        pytest.param(
            "import gc, sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in list(frame.f_locals.values()):\n"
            "            if type(v) is list: v.clear()\n        frame = frame.f_back\n    return 7",
            id="looks into frames",
        ),
        pytest.param(
            "import os, json\ndef send(m):\n    b = json.dumps(m).encode()\n    os.write(3, len(b).to_bytes(4, 'little') + b)\n"
            "send({'names': {'f': 0, 'abs': 1, 'set': 2}, 'modules': []})\n"
            "for _ in range(9): send({'value': True, 'arguments': {'t': [0, 0]}})",
            id="speaks for the answers",
        ),
        pytest.param("def f(x):\n    x = x\n    raise AssertionError('')", id="raises an empty assertion"),
    ],
)
def test_a_verdict_cannot_be_forged(program: str) -> None:
    tests = [
        "assert f(1) == 3",
        "assert 3 == f(1)",
        "assert abs(f(1) - 3) < 1e-6",
        "assert set([f(1)]) == {3}",
        "assert 2 < f(1) < 4",
        "assert not f(1) != 3",
        "assert math.isclose(f(1), 3)",
    ]
    assert all(examine(program, *tests))


def test_a_function_cannot_change_what_its_result_is_compared_with() -> None:
    cheat = "def f(numbers):\n    numbers.clear()\n    return []"
    assert examine(cheat, "numbers = [3, 1]\nassert f(numbers) == sorted(numbers)") != [""]
    honest = "def f(numbers): numbers.sort()"
    assert examine(honest, "numbers = [3, 1]\nf(numbers)\nassert numbers == [1, 3]") == [""]


def test_classes_errors_generators_and_odd_types_are_examined_as_if_they_were_here() -> None:
    program = """
import math
from collections import Counter
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def bad(): raise ValueError("no")
def count(text): return Counter(text)
def numbers():
    yield 1
    yield 2
def odd(): return {(1, 2): {3.5, None}, b"x": [1j, frozenset({1})], "big": 10 ** 50}
"""
    tests = [
        "s = Stack(); s.push(4); s.push((1, 2))\nassert len(s) == 2 and s.pop() == (1, 2) and isinstance(s, Stack)",
        "assert Stack() == Stack()",
        "try:\n    bad()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
        "assert list(numbers()) == [1, 2]",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "def check(candidate):\n    assert candidate('a') == {'a': 1}\ncheck(count)",
        "assert odd() == {(1, 2): {3.5, None}, b'x': [1j, frozenset({1})], 'big': 10 ** 50}",
        "assert math.sqrt(4) == 2",
    ]
    assert examine(program, *tests) == [""] * len(tests)


def test_tests_before_the_one_that_hangs_count() -> None:
    program = "def f(x):\n    while x: pass\n    return 1"
    tests = ["assert f(0) == 1", "f(1)", "assert f(0) == 1"]
    for wall_s in (0.4, 4.0, 40.0):  # until the machine is quick enough for the first one
        first, *rest = examine(program, *tests, limits=Limits(wall_s=wall_s, cpu_s=60.0))
        if not first:
            break
    assert [first, *rest] == ["", *[f"the program took longer than {wall_s:g} s"] * 2]


# ---- the machinery -----------------------------------------------------------------------------------------------------------


def test_what_the_walls_are_made_of_contains_what_it_should(walls: Walls) -> None:
    """So that the tests above are not all skipped one day."""
    contained = what_is_contained(walls)
    expected = set(PROMISES)
    if walls == "none" and landlock_version() < 6:
        expected -= {"signals", "writes", "reads", "environment"}
    assert {name for name in PROMISES if getattr(contained, name)} >= expected


def test_what_is_contained_is_said_in_words() -> None:
    contained = what_is_contained()
    assert contained.walls in WALLS and contained.words().startswith("a program runs ")
    assert all(name in contained.words() for name in PROMISES if not getattr(contained, name))


def test_a_zygote_that_was_killed_is_replaced() -> None:
    async def program() -> str:
        box = ProgramSandbox(LIMITS)
        await box.run("pass")
        assert box._keepers._zygote is not None
        box._keepers._zygote.process.kill()
        box._keepers._zygote.process.wait()
        return (await box.run("print('again')")).output

    assert asyncio.run(program()) == "again\n"


def test_many_at_once_all_come_to_their_end() -> None:
    async def program() -> list[Ran]:
        box = ProgramSandbox(LIMITS)
        return list(await asyncio.gather(*(box.run(f"print({number})") for number in range(40))))

    assert [ran.output for ran in asyncio.run(program())] == [f"{number}\n" for number in range(40)]


def test_importing_the_sandbox_starts_nothing() -> None:
    assert programs.ProgramSandbox()._keepers._zygote is None
