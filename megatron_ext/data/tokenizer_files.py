"""The files of a tokenizer, looked at before transformers opens them.

A folder's tokenizer may name code of its own (`auto_map`), which is never run, and parts that the
installed tokenizers does not know, for which that raises a bare `Exception`.
Invariant the tests check: such folders are refused by name, and nobody is asked anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

from megatron_ext.data.json_lines import shown

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 2**20
"""Ten times the longest template that is in use."""
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pre_tokenizers",
    "model": "models",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""Keys of tokenizer.json -> the module of tokenizers that has a class for each type."""


class TemplateOptions(TypedDict, total=False):
    """What --chat-template gives to a tokenizer; empty without that."""

    chat_template: str
    template_name: str


def read_template(value: str | None) -> TemplateOptions:
    """The template of --chat-template: a Jinja template, or the path of one.

    Raises:
        ValueError: the file cannot be read.
    """
    if value is None:
        return {}
    if "{" in value:
        return {"chat_template": value, "template_name": "--chat-template"}
    try:
        with Path(value).open("rb") as file:
            text = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(text) > MAX_TEMPLATE_BYTES:
            raise OSError(f"it is longer than {MAX_TEMPLATE_BYTES >> 20} MiB")
        source = text.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {value} cannot be read: {error}") from error
    return {"chat_template": source, "template_name": f"--chat-template {value}"}


def template_file(model: str) -> str:
    """The file that holds the chat template of a tokenizer which was read from `model`."""
    folder = Path(model)
    names = (TEMPLATE, "tokenizer_config.json")
    return str(next((folder / name for name in names if (folder / name).is_file()), folder))


def check_tokenizer_files(path: Path) -> None:
    """Refuse a folder or GGUF file that is not there, wants to run code, or is too new to be read.

    Raises:
        ValueError: names the file and the remedy.
    """
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"--tokenizer-model {path} is no file: check the path.")
        return
    if not path.is_dir():
        raise ValueError(
            f"--tokenizer-model {path} is no folder: give that of a Hugging Face tokenizer, or a "
            "GGUF file (nothing is downloaded)."
        )
    for file in sorted(path.glob("*.json")):
        values = _read(file)
        if _names_code(values):
            raise ValueError(
                f"--tokenizer-model {path}: {file.name} has an auto_map, so this tokenizer is a "
                "program of its own, and code from a checkpoint folder is never run. Save it as "
                f"{TOKENIZER} (where you trust it), or use another tokenizer."
            )
        if file.name == TOKENIZER:
            _check_parts(values, file)


def _read(file: Path) -> Any:
    """The JSON of a file; nothing where it is none, which its reader says better."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _names_code(values: Any) -> bool:
    """Whether an `auto_map` names a tokenizer: as a class of its own, or as the old pair."""
    found = values.get("auto_map") if isinstance(values, dict) else None
    return isinstance(found, list | str) or (isinstance(found, dict) and "AutoTokenizer" in found)


def _check_parts(values: Any, file: Path) -> None:
    import tokenizers  # takes a second: only where it is used

    for key, module in _PARTS.items():
        for kind in _types(values.get(key) if isinstance(values, dict) else None):
            if not isinstance(getattr(getattr(tokenizers, module), kind, None), type):
                raise ValueError(
                    f"{file} has a {key} of type {shown(kind)}, which tokenizers "
                    f"{tokenizers.__version__} does not know: install a newer one (pip install -U "
                    "tokenizers transformers), or use another tokenizer."
                )


def _types(part: Any) -> Iterator[str]:
    """Types of a part of tokenizer.json, and of the parts of a Sequence."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for inner in part.values() if part.get("type") == "Sequence" else ():
            for item in inner if isinstance(inner, list) else ():
                yield from _types(item)


class Unreadable:
    """Turns what tokenizers raises for a file that it cannot read into a `ValueError` with advice.

    It raises `Exception` itself, of no class of its own, and its panics derive from nothing else
    that could be caught; all other errors pass.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            file = self._path / TOKENIZER
            raise ValueError(
                f"{file if file.is_file() else self._path} cannot be read by tokenizers "
                f"{version('tokenizers')} ({error}): it is damaged, or was written by a newer "
                "one. Download it again, or pip install -U tokenizers transformers."
            ) from error
