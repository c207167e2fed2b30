"""The structure of the package may get better, not worse: see `bench/house.py` for what exactly is counted."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable

import pytest

import house

MAX_FUNCTION_LINES = 60
MAX_METHODS = 30
"""Of a class outside `testing/`."""
MAX_FILE_LINES = 500


@pytest.fixture(scope="module")
def tree() -> house.Tree:
    return house.read_tree(house.SOURCE)


def listed(rule: str, offenders: Iterable[object]) -> str:
    return rule + "".join(f"\n  {one}" for one in offenders)


def test_no_public_top_level_name_is_defined_in_two_modules(tree: house.Tree) -> None:
    found = house.duplicate_names(tree, with_aliases=True)
    names = [f"{name}: {', '.join(paths)}" for name, paths in found.items()]
    assert not names, listed(f"{len(names)} names are defined in several modules:", names)


def test_attributes_are_assigned_one_at_a_time(tree: house.Tree) -> None:
    found = house.parallel_assignments(tree, of_attributes=True)
    assert not found, listed(f"{len(found)} statements assign to attributes in parallel:", found)


def test_no_function_is_longer_than_the_limit(tree: house.Tree) -> None:
    found = house.functions_over(tree, MAX_FUNCTION_LINES)
    assert not found, listed(f"{len(found)} functions have more than {MAX_FUNCTION_LINES} lines:", found)


def test_no_class_outside_testing_has_more_methods_than_the_limit(tree: house.Tree) -> None:
    found = house.classes_over(tree, MAX_METHODS, outside_testing=True)
    assert not found, listed(f"{len(found)} classes have more than {MAX_METHODS} methods:", found)


def test_no_file_is_longer_than_the_limit(tree: house.Tree) -> None:
    found = house.files_over(tree, MAX_FILE_LINES)
    assert not found, listed(f"{len(found)} files have more than {MAX_FILE_LINES} lines:", found)


def test_the_path_of_a_group_can_be_read_in_one_sitting() -> None:
    """`Pipeline` has the loops and nothing else: what builds, captures or decides is in files of its own."""
    text = (house.SOURCE / "pipeline/pipeline.py").read_text()
    pipeline = next(node for node in house.parsed(text).body if isinstance(node, ast.ClassDef))
    methods = [node for node in pipeline.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    attributes = set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", text))
    assert len(text.splitlines()) <= 400 and len(methods) <= 25 and len(attributes) <= 20, sorted(attributes)


def test_no_test_imports_from_a_test(tree: house.Tree) -> None:
    """What tests share is in `tests/support`; that holds for the programs in strings that tests start, too."""
    found = house.tests_that_import_tests(tree)
    assert not found, listed(f"{len(found)} files import from a test file:", found)
    texts = {path.name: path.read_text() for path in sorted((house.ROOT / "tests").rglob("*.py"))}
    programs = [name for name, text in texts.items() if re.search(r"^\s*(?:from|import) test_", text, flags=re.M)]
    assert not programs, listed(f"{len(programs)} files have a program that imports from a test file:", programs)


def test_the_calls_to_a_decode_step_and_to_an_optimizer_step_are_those_that_are_counted(tree: house.Tree) -> None:
    _, broken = house.call_depths(tree, house.layout_of(house.SOURCE))
    assert not broken, listed("bench/house_paths.py does not fit the code:", broken)


def test_a_finalizer_that_parses_does_not_disturb_the_parser() -> None:
    def parse_more(phase: str, info: dict[str, int]) -> None:
        ast.parse("1")

    gc.callbacks.append(parse_more)
    thresholds = gc.get_threshold()
    gc.set_threshold(10)
    try:
        house.parsed((house.SOURCE / "run/check.py").read_text())
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parse_more)
    assert gc.isenabled()
