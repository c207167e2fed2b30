"""Decoders that several threads make at once."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
    import sys, threading
    import msgspec
    from millstream.decoding import decode_json, decode_msgpack, to_type

    sys.setswitchinterval(1e-6)

    def make(name, fields):
        found = type(msgspec.Struct)(name, (msgspec.Struct,), {"__annotations__": fields, "__module__": __name__})
        globals()[name] = found
        return found

    for round in range(60):
        for inner in range(8):
            make(f"Inner{round}_{inner}", {"value": "int | None"})
        outer = make(f"Outer{round}", {f"field{k}": f"Inner{round}_{k}" for k in range(8)})
        value = {f"field{k}": {"value": k} for k in range(8)}
        packed, text, barrier, found = msgspec.msgpack.encode(value), msgspec.json.encode(value), threading.Barrier(4), []

        def work(number):
            barrier.wait()
            ways = (
                lambda: decode_msgpack(packed, outer), lambda: decode_json(text, outer), lambda: to_type(value, outer)
            )
            found.append(ways[number % 3]())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.field7.value for one in found] == [7] * 4, found
"""


def test_threads_that_decode_a_struct_for_the_first_time_at_once_get_it_whole() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
