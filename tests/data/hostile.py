"""Inputs that nobody should trust: tokenizer folders, chat templates, lines of data files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.data.tiny_tokenizer import byte_tokenizer

PROGRAM = """
import pathlib
pathlib.Path(__file__).with_name("ran").write_text("code of the folder ran")
from transformers import PreTrainedTokenizerFast, PretrainedConfig
class Own(PreTrainedTokenizerFast): pass
class OwnConfig(PretrainedConfig): model_type = "own"
"""
AUTO_MAPS: dict[str, tuple[str, Any]] = {
    "its own class": ("tokenizer_config.json", {"AutoTokenizer": ["program.Own", "program.Own"]}),
    "the old pair": ("tokenizer_config.json", [None, "program.Own"]),
    "of the model": ("config.json", {"AutoTokenizer": [None, "program.Own"]}),
    "of a processor": ("processor_config.json", {"AutoTokenizer": "program.Own"}),
    "of another repository": (
        "tokenizer_config.json",
        {"AutoTokenizer": [None, "someone/else--program.Own"]},
    ),
}
"""Where a folder may name a tokenizer of its own -> file and value of the auto_map."""


def tokenizer_folder(folder: Path) -> Path:
    """A folder with a tokenizer that is fine."""
    byte_tokenizer().save_pretrained(folder)
    return folder


def add_program(folder: Path, file: str, auto_map: Any, **more: Any) -> None:
    """Name a program in a JSON file of the folder, and put it beside that."""
    path = folder / file
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"auto_map": auto_map} | more))
    (folder / "program.py").write_text(PROGRAM)


def edit_tokenizer(folder: Path, **parts: Any) -> None:
    """Replace parts of the folder's tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


REFUSED_TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "items as attributes": "{{ ''['__class__'].mro }}",
    "globals of a function": "{{ cycler.__init__.__globals__ }}",
    "a macro's globals": "{% macro f() %}{% endmacro %}{{ f.__globals__.os }}",
    "a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import '/etc/passwd' as x %}",
    "a parent": "{% extends '/etc/passwd' %}",
    "its own exception": "{{ raise_exception('no' * 100000) }}",
    "no Jinja": "{% if %}",
    "a long range": "{{ range(10**9) | list }}",
    "an endless macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "deep expressions": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "changed messages": "{{ messages.append(1) }}",
}
"""Templates that are refused as the chat is written -> their texts."""
_DOUBLING = "{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}"
LARGE_TEMPLATES = {
    "a product": "{{ 'a' * 10**9 }}",
    "a format": "{{ '%999999999d' % 1 }}",
    "another format": "{{ '{:999999999}'.format(1) }}",
    "padding": "{{ 'a'.center(10**9) }}",
    "indentation": "{{ 'a\n' | indent(10**9, true) }}",
    "doubled text": "{% set ns = namespace(a='a') %}" + _DOUBLING,
    "doubled lists": "{% set ns = namespace(a=[1]) %}" + _DOUBLING,
    "replacements": "{{ ('a' * 10**6) | replace('a', 'b' * 1000) }}",
    "many lines": "{% for i in range(99999) %}" + "a" * 99 + "{% endfor %}",
}
"""Templates that write too much, or want too much memory for it."""
_LOOP = "{% for _ in range(99999) %}"
ENDLESS_TEMPLATES = {
    "loops": _LOOP * 3 + "{% endfor %}" * 3,
    "a power": "{{ 3 ** (10 ** 9) }}",
    "only for one question": "{% if messages[0].content == 'now' %}"
    + _LOOP * 3
    + "{% endfor %}" * 3
    + "{% endif %}fine",
}
"""Templates that take too long."""

DEEP = 2000
REFUSED_LINES = {
    "half a character": (rb'{"X": "\ud800"}', "half of a surrogate pair"),
    "half a character in a key": (rb'{"X": "a", "m": {"\udfff": [1]}}', "half of a surrogate"),
    "half a character, small letters": (rb'{"X": ["a", {"b": "\uDEAD"}]}', "half of a surrogate"),
    "no number": (b'{"X": "a", "m": NaN}', "holds NaN"),
    "infinity": (b'{"X": "a", "m": -Infinity}', "holds -Infinity"),
    "a large number": (b'{"X": "a", "m": 1e999}', "holds 1e999"),
    "a long number": (b'{"X": "a", "m": ' + b"9" * 5000 + b"}", "thousands of digits"),
    "a key twice": (b'{"X": "a", "m": {"b": 1, "b": 2}}', "has the key 'b' twice"),
    "depth": (b'{"X": ' + b"[" * DEEP + b"]" * DEEP + b"}", "deeper than 100 levels"),
    "much depth": (b"[" * 200_000, "deeper than 100 levels"),
    "a bare NUL": (b'{"X": "a\0"}', "is not JSON"),
    "another encoding": ('{"X": "a"}'.encode("utf-16"), "is not UTF-8"),
}
"""Lines with the key X that no reader accepts -> the line, and a part of the reason."""
