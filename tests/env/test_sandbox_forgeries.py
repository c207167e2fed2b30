"""Forged verdicts: wrong programs that lie to the examiner in every way that we could think of. Each must fail every test that an
honest program passes."""

from __future__ import annotations

import asyncio
import functools

import pytest

from millstream.env.sandbox.programs import Limits, ProgramSandbox
from support import boxes

# Groups of tests, each with a program that passes all of them.
HONEST: dict[str, tuple[str, list[str]]] = {
    "number": (
        "def f(x): return x * x",
        [
            "assert f(2) == 4",
            "assert not f(2) != 4",
            "assert 3 < f(2) < 5",
            "assert abs(f(2) - 4.0) < 1e-6",
            "assert all(map(lambda x: f(x) == x * x, [2, 3]))",
            "assert not list(filter(lambda x: f(x) != x * x, [2, 3]))",
            "assert [f(x) for x in (2, 3)] == [4, 9]",
            "assert {f(2)} == {4} and set(map(f, [2])) == set([4])",
            "assert f(2) in [4] and f(2) in {4} and f(2) in {4: 1}",
            "assert [10, 20, 30, 40, 50][f(2)] == 50",
            "assert sorted([f(2), f(1)]) == [1, 4]",
            "assert sum(map(f, [1, 2])) == 5 and max(f(2), 0) == 4",
            "assert f'{f(2):d}' == '4' and round(f(2)) == 4 and int(f(2)) == 4",
            "import math\nassert math.isclose(f(2), 4)",
            "assert isinstance(f(2), int) and type(f(2)) is int and f(2) == 4",
        ],
    ),
    "list": (
        "def f(x): return [4, 5, 6]",
        [
            "assert 4 in f(2)",
            "assert all(map(f(2).__contains__, [4, 5, 6]))",
            "assert {4, 5, 6}.issubset(f(2))",
            "assert not {4, 5, 6} - set(f(2))",
            "r = f(2)\nassert len(r) == 3 and all(a == b for a, b in zip(r, [4, 5, 6]))",
            "r = f(2)\nassert r and all(v in (4, 5, 6) for v in r)",
            "r = f(2)\nassert list(r) and all(v in (4, 5, 6) for v in r)",
            "r = f(2)\nassert [r[i] for i in range(len(r))] == [4, 5, 6]",
            "assert f(2)[0] == 4 and f(2)[-1] == 6 and f(2)[1:] == [5, 6]",
            "assert f(2).count(4) == 1",
            "assert f(2).index(5) == 1",
            "assert f(2) + [7] == [4, 5, 6, 7]",
            "a, b, c = f(2)\nassert (a, b, c) == (4, 5, 6)",
            "assert list(reversed(f(2))) == [6, 5, 4] and sorted(f(2)) == [4, 5, 6]",
            "assert any(v == 4 for v in f(2))",
        ],
    ),
    "text": (
        "def f(s): return 'hello'",
        [
            "assert f('x').startswith('he')",
            "assert f('x').endswith('lo')",
            "assert f('x').isalpha()",
            "assert 'ell' in f('x')",
            "assert f('x').upper() == 'HELLO'",
            "assert f('x').replace('h', 'j') == 'jello'",
            "assert f('x') + '!' == 'hello!' and '%s' % f('x') == 'hello'",
            "import re\nassert re.fullmatch('h.*o', f('x'))",
        ],
    ),
    "mapping": (
        "def f(x): return {'a': 1, 'b': 2}",
        [
            "assert all(f(2)[key] for key in 'ab')",
            "assert 'a' in f(2)",
            "assert f(2).get('a')",
            "assert f(2).keys() == {'a', 'b'}",
            "assert {**f(2)} == {'a': 1, 'b': 2} == dict(f(2))",
            "assert f(2) | {'c': 3} == {'a': 1, 'b': 2, 'c': 3}",
            "r = f(2)\nassert len(r) == 2 and all(r[key] in (1, 2) for key in r)",
        ],
    ),
    "set": (
        "def f(x): return {1, 2}",
        [
            "assert f(2).issubset({1, 2, 3}) and f(2)",
            "assert f(2).union({1}) == {1, 2}",
            "assert f(2) <= {1, 2, 3} and f(2)",
            "assert {1, 2} >= f(2) and f(2)",
            "assert f(2) & {1} == {1}",
            "assert f(2) and f(2).isdisjoint({9})",
        ],
    ),
    "order": (
        "def f(text): return len(text)",
        [
            "assert f('ab') < f('abc')",
            "assert f('abc') >= f('ab') and not f('abc') <= f('ab')",
            "assert f('ab') == f('ba') and f('ab') != f('abc')",
            "assert max(f('ab'), f('abc'), key=lambda x: x) == f('abc') != f('ab')",
        ],
    ),
    "error": (
        "def f(x): raise ValueError('no')",
        [
            "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError",
            "try:\n    f(-1)\nexcept:\n    pass\nelse:\n    raise AssertionError",
            "import contextlib\nok = False\nwith contextlib.suppress(BaseException):\n    f(-1)\n    ok = True\nassert not ok",
        ],
    ),
    "change": (
        "def f(numbers): numbers.sort()",
        [
            "numbers = [3, 1]\nf(numbers)\nassert numbers == [1, 3]",
            "numbers = [3, 1]\nassert f(numbers) is None and numbers[0] == 1",
        ],
    ),
    "method": (
        "class Solution:\n    def f(self, x): return [4, 5]",
        [
            "assert 4 in Solution().f(2)",
            "r = Solution().f(2)\nassert len(r) == 2 and r[1] == 5",
            "assert Solution().f(2) == [4, 5]",
            "assert sum(Solution().f(2)) == 9",
        ],
    ),
    "attribute": (
        "class Table:\n    rows = [4, 5]\ndef f(x): return Table()",
        [
            "r = f(2)\nassert len(r.rows) == 2 and all(a == b for a, b in zip(r.rows, [4, 5]))",
            "r = f(2)\nassert r.rows and all(v in (4, 5) for v in r.rows)",
        ],
    ),
}
# Answers to every question as if it were plain data, and always as it would be needed.
LIAR = """
class Liar(BASE):
    def yes(self, *given, **named): return True
    def zero(self, *given): return 0
    def same(self, other): return other
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = __contains__ = yes
    __sub__ = __rsub__ = __abs__ = __round__ = __hash__ = __index__ = zero
    __or__ = __and__ = __ror__ = __rand__ = __add__ = same
    startswith = endswith = isalpha = issubset = isdisjoint = issuperset = get = count = index = yes
    union = intersection = upper = replace = same
    def __ne__(self, other): return False
    def __len__(self): return LENGTH
    def __iter__(self): return iter(ITEMS)
    def __reversed__(self): return iter(ITEMS)
    def __getitem__(self, key): return True
    def __float__(self): return 4.0
    def __int__(self): return 4
    def __str__(self): return "liar"
    def __format__(self, spec): return "4"
    def __enter__(self): return self
    def __exit__(self, *error): return True
    def keys(self): return {}.keys()
    @property
    def rows(self):
        self.n = getattr(self, "n", 0) + 1
        return [0, 0] if self.n == 1 else []
def f(x): return Liar()
class Solution(Liar):
    def f(self, x): return self
"""


def liar(base: str = "object", length: str = "3", items: str = "()") -> str:
    return LIAR.replace("BASE", base).replace("LENGTH", length).replace("ITEMS", items)


# Speaks to the examiner itself, in the place of our code.
ROGUE = """
import json, os
def send(message):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    os.write(3, len(data).to_bytes(4, "little") + data)
def exactly(size):
    data = b""
    while len(data) < size:
        piece = os.read(3, size - len(data))
        if not piece: os._exit(0)
        data += piece
    return data
def receive(): return json.loads(exactly(int.from_bytes(exactly(4), "little")))
NAMES = ["f", "Solution", "__builtins__", "__name__", "abs", "all", "set", "map", "list", "sorted", "len", "isinstance", "type", "int",
    "AssertionError", "Exception", "math", "re", "contextlib", "zip", "range"]
def serve(answer):
    while True:
        asked = receive()
        if asked["do"] == "names":
            send({"value": {"d": [[name, {"o": [n, name]}] for n, name in enumerate(NAMES)]}, "arguments": {"t": []}})
        else:
            reply = answer(asked)
            send(reply if isinstance(reply, bytes) or "raised" in reply else {"arguments": asked["arguments"], **reply})
"""


def rogue(reply: str) -> str:
    return f"{ROGUE}\nserve(lambda asked: {reply})"


OLD_FRAME = (
    ROGUE
    + """
send({"names": {"f": 0, "__builtins__": 1}, "modules": []})
while True:
    asked = receive()
    handle = asked["arguments"]["t"][0]["o"]
    if asked["do"] == "item": send({"value": {"o": 2}, "arguments": {"t": [0, 0]}})  # a built-in
    else: send({"value": 7.0 if handle == 0 else 0.0, "arguments": {"t": [0, 0]}})
"""
)

OBJECTS = ("number", "list", "text", "mapping", "set", "method", "attribute", "order")
EVERY = (*OBJECTS, "error", "change")
# name: the program, and the groups of tests that it must fail.
FORGERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "the first frame names built-ins": (OLD_FRAME, EVERY),
    "the names hold built-ins": (rogue('{"value": True}'), EVERY),
    "an object agrees with everything": (liar(), OBJECTS),
    "an object has a length and no items": (liar(items="()"), OBJECTS),
    "an object has other items each time": (liar(items="[0, 0, 0] if __import__('itertools').count else ()"), OBJECTS),
    "an object is larger and smaller": (
        "class Odd:\n    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *given: True\n    __hash__ = None\n"
        "def f(x): return Odd()\nclass Solution:\n    f = f",
        OBJECTS,
    ),
    "an object refuses the first question": (
        "class Shy:\n    n = 0\n    rows = ()\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n"
        "        raise TypeError if self.n == 1 else StopIteration\ndef f(x): return Shy()\nclass Solution:\n    f = f",
        OBJECTS,
    ),
    "an object says that it is a number": (
        liar().replace("    def __ne__", "    __class__ = property(lambda self: int)\n    def __ne__"),
        OBJECTS,
    ),
    "an object extends a number": (liar("float"), OBJECTS),
    "an object extends a list": (liar("list"), OBJECTS),
    "an object extends a string": (liar("str"), OBJECTS),
    "an object extends a dictionary": (liar("dict"), OBJECTS),
    "an object extends a set": (liar("set"), OBJECTS),
    "a function is a class": (
        "class f:\n    pass\n"
        + liar().replace("def f(x): return Liar()", "class f(Liar):\n    def __init__(self, x): pass"),
        OBJECTS,
    ),
    "a function is an object": (
        liar() + "\nclass Caller(Liar):\n    def __call__(self, x): return self\nf = Caller()",
        OBJECTS,
    ),
    "a metaclass lies": (
        "class Meta(type):\n    __contains__ = __eq__ = __instancecheck__ = lambda *given: True\n    __hash__ = lambda self: 4\n"
        "    __len__ = lambda self: 3\n    __iter__ = lambda self: iter(())\nclass Lie(metaclass=Meta): rows = []\n"
        "def f(x): return Lie\nclass Solution:\n    def f(self, x): return Lie",
        OBJECTS,
    ),
    "every call ends a loop": ("def f(x): raise StopIteration\nclass Solution:\n    f = f", OBJECTS),
    "every call ends an asynchronous loop": ("def f(x): raise StopAsyncIteration\nclass Solution:\n    f = f", OBJECTS),
    "every call closes a generator": ("def f(x): raise GeneratorExit\nclass Solution:\n    f = f", OBJECTS),
    "a raised name is an exit": (rogue('{"raised": ["SystemExit", "0"]}'), OBJECTS),
    "a raised name ends a loop": (rogue('{"raised": ["StopIteration", ""]}'), OBJECTS),
    "a raised name is a function": (rogue('{"raised": ["print", ""]}'), OBJECTS),
    "an empty assertion is raised": (rogue('{"raised": ["AssertionError", ""]}'), OBJECTS),
    "what is raised has no form": (rogue('{"raised": {"o": 1}}'), EVERY),
    "the process ends instead of raising": ("import os\ndef f(x): os._exit(0)", EVERY),
    "the process ends while the examiner waits": (
        "import os, threading\nthreading.Timer(0.05, os._exit, [0]).start()\ndef f(x): threading.Event().wait()",
        EVERY,
    ),
    "the connection is closed": ("import os\ndef f(x): os.close(3)", EVERY),
    "the answer is no JSON": (rogue('b"{[}"'), EVERY),
    "the answer is deep": (rogue('b\'{"value": \' + b\'{"l": [\' * 9000 + b"]}" * 9000 + b"}"'), EVERY),
    "the answer is deeper than the reader": (rogue('b"[" * 200000'), EVERY),
    "the answer is larger than any": (
        ROGUE + "\nwhile True:\n    receive()\n    os.write(3, (1 << 31).to_bytes(4, 'little'))",
        EVERY,
    ),
    "the answer is half": (ROGUE + "\nreceive()\nos.write(3, (100).to_bytes(4, 'little') + b'{')\nos._exit(0)", EVERY),
    "the answer is an array": (rogue('{"value": [1, 2]}'), EVERY),
    "the answer has an unknown mark": (rogue('{"value": {"x": 1}}'), EVERY),
    "the answer has two marks": (rogue('{"value": {"t": [], "l": []}}'), EVERY),
    "the answer is a list of letters": (rogue('{"value": {"l": "456"}}'), EVERY),
    "a key cannot be hashed": (rogue('{"value": {"d": [[{"l": []}, 1]]}}'), EVERY),
    "a pair has three parts": (rogue('{"value": {"d": [[1, 2, 3]]}}'), EVERY),
    "an integer is no number": (rogue('{"value": {"i": "four"}}'), EVERY),
    "bytes are no hexadecimal": (rogue('{"value": {"b": 4}}'), EVERY),
    "a handle is a truth": (rogue('{"value": {"o": [True, ""]}}'), EVERY),
    "a handle is negative": (rogue('{"value": {"o": [-1, ""]}}'), EVERY),
    "a handle has a name of commands": (rogue('{"value": {"o": [0, "\\n{\\"why\\": \\"\\"}\\n"]}}'), OBJECTS),
    "everything is a handle": (rogue('{"value": {"o": [0, "f"]}}'), OBJECTS),
    "arguments come back short": (rogue('{"value": None, "arguments": {"t": []}}'), ("change",)),
    "arguments come back as an object": (rogue('{"value": None, "arguments": {"o": [0, ""]}}'), ("change",)),
    "arguments come back as others": (rogue('{"value": None, "arguments": {"t": [0, {"t": [1, 3]}]}}'), ("change",)),
    "answers are there before the questions": (
        ROGUE
        + "\nfor _ in range(200): send({'value': True, 'arguments': {'t': [0, 0]}})\nserve(lambda asked: {'value': True})",
        EVERY,
    ),
    "the names are no dictionary": (
        ROGUE + "\nsend({'value': True, 'arguments': {'t': []}})\nserve(lambda a: {'value': True})",
        EVERY,
    ),
    "two processes answer": ("import os\nos.fork()\n" + rogue('{"value": True}'), EVERY),
    "verdicts are written to every descriptor": (
        'import os\nfor n in range(3, 64):\n    try: os.write(n, b\'{"why": ""}\\n\' * 99)\n    except OSError: pass\ndef f(x): return 7',
        EVERY,
    ),
    "the examiner is killed": (
        "import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\ndef f(x): return 7",
        EVERY,
    ),
    "the examiner's memory is looked for": (
        "import os, re\n"
        "for n in os.listdir('/proc') if os.access('/proc', os.R_OK) else ():\n"
        "    if n.isdecimal() and int(n) != os.getpid():\n"
        "        try:\n"
        "            memory = open(f'/proc/{n}/mem', 'r+b', 0)\n"
        "            for line in open(f'/proc/{n}/maps'):\n"
        "                a, b = (int(v, 16) for v in line.split()[0].split('-'))\n"
        "                if 'rw' in line and b - a < 1 << 26:\n"
        "                    memory.seek(a)\n"
        "                    data = memory.read(b - a)\n"
        "                    for hit in re.finditer(b'assert ', data):\n"
        "                        memory.seek(a + hit.start())\n"
        "                        memory.write(b'1 or ( ')\n"
        "        except (OSError, ValueError, OverflowError): pass\n"
        "def f(x): return 7",
        EVERY,
    ),
}
# Tried by default; the others with `-m slow`.
FIXED = (
    "the first frame names built-ins",
    "the names hold built-ins",
    "an object agrees with everything",
    "every call ends a loop",
    "the process ends instead of raising",
    "the examiner is killed",
    "the examiner's memory is looked for",
)


def examinations(groups: tuple[str, ...]) -> list[list[str]]:
    """One for all tests that need nothing but a value; one for each test that catches an error, since a program that is lost
    fails everything after it."""
    rest = [test for group in groups if group != "error" for test in HONEST[group][1]]
    return [[test] for test in HONEST["error"][1] if "error" in groups] + [rest]


@functools.cache
def verdicts(identity: str, walls: str, is_fixed: bool) -> dict[str, list[tuple[str, str]]]:
    """Of each forgery: the tests, and why they fail."""
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in FORGERIES if (name in FIXED) == is_fixed}
    asked = [(name, tests) for name in found for tests in examinations(FORGERIES[name][1])]
    jobs = [{"program": FORGERIES[name][0], "tests": tests} for name, tests in asked]
    for (name, tests), reasons in zip(asked, boxes.drive(identity, walls, jobs, wall_s=5.0), strict=True):
        found[name] += zip(tests, reasons, strict=True)
    return found


@pytest.mark.parametrize(("identity", "walls", "forgery"), boxes.cases(FORGERIES, FIXED))
def test_a_forgery_fails_every_test(identity: str, walls: str, forgery: str) -> None:
    found = verdicts(identity, walls, forgery in FIXED)[forgery]
    assert [test for test, why in found if not why] == []


def examine(program: str, *tests: str) -> list[str]:
    return asyncio.run(ProgramSandbox(Limits(wall_s=60.0)).examine(program, tests))


@pytest.mark.parametrize("group", HONEST)
def test_an_honest_program_passes_what_forgeries_fail(group: str) -> None:
    program, tests = HONEST[group]
    assert examine(program, *tests) == [""] * len(tests)


def test_objects_of_a_program_are_examined_as_objects() -> None:
    program = """
import enum
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: int
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
class Color(enum.Enum):
    RED = 1
class Calculator:
    def __init__(self): self.value = 0
    def add(self, number): self.value += number; return self
    def result(self): return self.value
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def __contains__(self, number): return number == self.value
class Node:
    def __init__(self, value, after=None): self.value, self.after = value, after
def chain(values):
    return Node(values[0], chain(values[1:])) if values else None
def insert(node, value): node.after = Node(value, node.after)
def move(point, by): return Point(point.x + by, point.y)
def squares():
    n = 0
    while True:
        yield n * n
        n += 1
def adder(n): return lambda m: n + m
def few():
    yield 1
    raise KeyError("few")
ANSWER = 42
TABLE = [1, 2]
data = ["x" * 1000] * 1000_000
def huge(): return 7 ** 9000
def spread(n): return range(n)
def nested(n): return [nested(n - 1)] if n else []
"""
    tests = [
        "p = Point(1, 2)\nassert (p.x, p.y) == (1, 2) and p + p == Point(2, 4) and p != Point(0, 0) and p != (1, 2)",
        "assert move(Point(1, 2), 3) == Point(4, 2) and move(Point(1, 2), 3).x == 4 and isinstance(p, Point)",
        "assert Color.RED.value == 1 and Color.RED == Color.RED and str(Color.RED) == 'Color.RED'",
        "assert Calculator().add(1).add(2).result() == 3",
        "with Calculator() as c:\n    c.add(5)\n    assert 5 in c and 6 not in c",
        "n, seen = chain([1, 2, 3]), []\nwhile n:\n    seen.append(n.value)\n    n = n.after\nassert seen == [1, 2, 3]",
        "n = chain([1, 3])\nassert n.after.value == 3\ninsert(n, 2)\nassert n.after.value == 2 and n.after.after.value == 3",
        "n = chain([1, 2])\nassert n.after == n.after and n != n.after and n in [n.after, n]",
        "n = chain([1])\nassert n != None and n is not None and n.after == None",
        "import itertools\nassert list(itertools.islice(squares(), 5)) == [0, 1, 4, 9, 16]",
        "g = squares()\nassert [next(g), next(g), next(g)] == [0, 1, 4] and next(iter(g)) == 9",
        "assert adder(2)(3) == 5 and list(map(adder(1), [1, 2])) == [2, 3]",
        "g = few()\nassert next(g) == 1\ntry:\n    next(g)\n    assert False\nexcept KeyError:\n    pass",
        "assert ANSWER == 42 and TABLE == [1, 2] and huge() == 7 ** 9000",
        "data = [1]\nassert data == [1]",
        "assert list(spread(3)) == [0, 1, 2] and len(spread(3)) == 3 and 2 in spread(3) and spread(3)[-1] == 2",
        "assert nested(2) == [[[]]]",
    ]
    assert examine(program, *tests) == [""] * len(tests)


def test_an_object_in_the_place_of_plain_data_fails_with_a_reason() -> None:
    reasons = examine(
        LIAR.replace("BASE", "object").replace("LENGTH", "0").replace("ITEMS", "()"),
        "assert f(2) == 4",
        "assert f(2)['a']",
    )
    assert all("the program returned an object (Liar), and " in why and "is for plain data" in why for why in reasons)


def test_a_message_that_cannot_be_shown_fails_its_own_test_alone() -> None:
    program = "class Odd:\n    def __str__(self): raise SystemExit(0)\ndef f(x): return Odd() if x else 4"
    assert examine(program, "assert isinstance(f(1), int), f(1)", "assert f(0) == 4") == [
        "AssertionError: (no text)",
        "",
    ]
