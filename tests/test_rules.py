"""The rules of the code base (rules.py) hold in every file, and each finds what breaks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import rules

ROOT = Path(__file__).resolve().parent.parent


def python_files(*places: str) -> list[str]:
    """Paths of the Python files at or under `places`, relative to the repository."""
    found = [
        path
        for place in places
        for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


PRODUCT = python_files("megatron_ext")
TESTS = python_files("tests")
EVERYTHING = [
    *PRODUCT,
    *TESTS,
    *python_files("pretrain_rl.py", "setup.py", "tools", "examples"),
]


def outside(paths: list[str], *exceptions: str) -> list[str]:
    """The paths that lie in none of the exceptions."""
    return [path for path in paths if not path.startswith(exceptions)]


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        # tests/upstream compares with Megatron itself
        (rules.megatron_imports, outside(EVERYTHING, "megatron_ext/upstream/", "tests/upstream/")),
        (rules.too_many_lines, EVERYTHING),
        (rules.long_functions, [*PRODUCT, "pretrain_rl.py"]),
        (rules.prints, PRODUCT),
        (rules.catches_all, EVERYTHING),
        (rules.mocks, TESTS),
        (rules.trusting_loads, EVERYTHING),
        (rules.loose_options, [path for path in PRODUCT if path.endswith("/config.py")]),
        # parsing itself ends in arguments.py
        (rules.assignments_into_args, outside(PRODUCT, "megatron_ext/upstream/arguments.py")),
        (rules.missing_docstrings, PRODUCT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_file_keeps(rule: Callable[[str], list[str]], paths: list[str]):
    assert paths, "no file to check"
    broken = [f"{path}:{found}" for path in paths for found in rule((ROOT / path).read_text())]
    assert not broken, "\n".join(["", *broken])


def test_rooms_import_only_what_is_below_them():
    sources = {path: (ROOT / path).read_text() for path in PRODUCT}
    broken = [f for p, s in sources.items() for f in rules.imports_of_higher_rooms(s, path=p)]
    assert not broken, "\n".join(["", *broken])
    assert not rules.circle_of_rooms(sources)


def test_no_file_or_folder_is_named_after_no_idea():
    assert not [path for path in EVERYTHING if rules.forbidden_names(path)]


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_agrees(command):
    beside_python = Path(sys.executable).with_name("ruff")
    ruff = str(beside_python) if beside_python.exists() else shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    ran = subprocess.run(
        [ruff, *command, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


in_packing = partial(rules.imports_of_higher_rooms, path="megatron_ext/packing/pack.py")
in_rl = partial(rules.imports_of_higher_rooms, path="megatron_ext/rl/loop.py")
in_upstream = partial(rules.imports_of_higher_rooms, path="megatron_ext/upstream/arguments.py")
OPTIONS = "@dataclass(frozen=True, kw_only=True)\nclass Options:\n"


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (rules.megatron_imports, "import megatron"),
        (rules.megatron_imports, "import os, megatron.core as core"),
        (rules.megatron_imports, "from megatron import core"),
        (rules.megatron_imports, "def f():\n    from megatron.training import get_args"),
        (rules.megatron_imports, "importlib.import_module('megatron.core')"),
        (rules.megatron_imports, "core = pytest.importorskip('megatron.core')"),
        (in_packing, "from megatron_ext.upstream.layout import Layout"),
        (in_packing, "from megatron_ext import upstream"),
        (in_packing, "from ..upstream import layout"),
        (in_packing, "def f():\n    import megatron_ext.rl.losses"),
        (in_rl, "from ..upstream.step import Stepper"),
        (rules.forbidden_names, "megatron_ext/utils/tensors.py"),
        (rules.forbidden_names, "tests/helpers.py"),
        (rules.too_many_lines, "x = 1\n" * 301),
        (rules.long_functions, "class A:\n    def f(self):\n" + "        x = 1\n" * 70),
        (rules.prints, "def f():\n    print('loss')"),
        (rules.catches_all, "try:\n    f()\nexcept:\n    pass"),
        (rules.catches_all, "try:\n    f()\nexcept Exception as error:\n    log(error)"),
        (rules.catches_all, "try:\n    f()\nexcept (OSError, builtins.BaseException):\n    pass"),
        (rules.catches_all, "with contextlib.suppress(Exception):\n    f()"),
        (rules.mocks, "from unittest.mock import patch"),
        (rules.mocks, "from unittest import mock"),
        (rules.mocks, "def test(mocker): ..."),
        (
            rules.mocks,
            "def test(monkeypatch):\n    monkeypatch.setattr('torch.cuda.synchronize', f)",
        ),
        (rules.mocks, "import torch.distributed as dist\nmonkeypatch.setattr(dist, 'barrier', f)"),
        (rules.mocks, "from torch import cuda\nmonkeypatch.delattr(cuda.amp, 'GradScaler')"),
        (rules.mocks, "monkeypatch.setitem(sys.modules, 'megatron.core', fake)"),
        (rules.loose_options, "@dataclass\nclass Options:\n    '''Options.'''"),
        (rules.loose_options, "@dataclasses.dataclass(frozen=True)\nclass Options: ..."),
        (rules.loose_options, "@dataclass(frozen=False, kw_only=True)\nclass Options: ..."),
        (rules.loose_options, OPTIONS + "    a: int = 0\n    b: int = 0\n    '''Second.'''"),
        (rules.loose_options, OPTIONS + "    a: int = 0\n    '''First.'''\n    b: int = 0"),
        (rules.trusting_loads, "AutoTokenizer.from_pretrained(x, local_files_only=True)"),
        (rules.trusting_loads, "A.from_pretrained(x, trust_remote_code=False)"),
        (
            rules.trusting_loads,
            "A.from_pretrained(x, trust_remote_code=True, local_files_only=True)",
        ),
        (rules.assignments_into_args, "args.seq_length = 8"),
        (rules.assignments_into_args, "self.args.seq_length += 8"),
        (rules.assignments_into_args, "args.a, b = 1, 2"),
        (rules.assignments_into_args, "setattr(args, name, value)"),
        (rules.missing_docstrings, "x = 1"),
        (rules.missing_docstrings, "'''Module.'''\ndef f(): ..."),
        (rules.missing_docstrings, "'''Module.'''\nclass A:\n    x = 1"),
    ],
)
def test_a_bad_example_is_found(rule: Callable[[str], list[str]], source: str):
    assert len(rule(source)) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (rules.megatron_imports, "import megatron_ext.packing\nfrom megatron_ext import mla"),
        (in_packing, "from megatron_ext.packing.types import Microbatch\nfrom . import balance"),
        (in_rl, "from megatron_ext.packing import pack\nfrom .losses import clipped_surrogate"),
        (in_upstream, "from megatron_ext.rl.config import RLConfig"),
        (rules.forbidden_names, "megatron_ext/packing/common_prefix.py"),
        (rules.too_many_lines, "x = 1\n" * 300),
        (rules.long_functions, "def f():\n" + "    x = 1\n" * 69 + "x = 1\n" * 9),
        (rules.prints, "def f():\n    logger.info('print(loss)')"),
        (rules.catches_all, "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
        (
            rules.mocks,
            "import torch\nmonkeypatch.setenv('RANK', '0')\nmonkeypatch.setattr(sys, 'x', 1)",
        ),
        (
            rules.loose_options,
            OPTIONS + "    '''All.'''\n    a: int = 0\n    '''Slots; 0 = none.'''",
        ),
        (
            rules.trusting_loads,
            "A.from_pretrained(x, trust_remote_code=False, local_files_only=True)",
        ),
        (rules.assignments_into_args, "x = args.seq_length\nargs = parse()\nmy_args.x = 1"),
        (rules.missing_docstrings, "'''Module.'''\ndef _f(): ...\nclass A:\n    '''A.'''"),
    ],
)
def test_a_good_example_passes(rule: Callable[[str], list[str]], source: str):
    assert rule(source) == []


def test_a_circle_of_rooms_is_found():
    down = {"megatron_ext/mla/attention.py": "from megatron_ext.packing import attention"}
    up = {"megatron_ext/packing/batch.py": "def f():\n    from ..mla import cache"}
    assert rules.circle_of_rooms(down) == []
    assert set(rules.circle_of_rooms(down | up)) == {"mla", "packing"}
