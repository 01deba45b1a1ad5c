"""The token ids that end a response, as a checkpoint names them.

transformers' order: generation_config.json, and config.json where that one names none.  A GGUF file
has them in its metadata.  The tokenizer's own end-of-text token is not looked at here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.weights.weight_files import CONFIG

GENERATION_CONFIG = "generation_config.json"


def stop_ids_of(checkpoint: Path) -> frozenset[int]:
    """The ids that a folder, a file of weights in it, or a GGUF file names; none if it names none.

    Raises:
        ValueError: a file is no JSON object, or has something else than ids there.
    """
    if checkpoint.suffix == ".gguf" and checkpoint.is_file():
        from megatron_ext.weights.gguf_source import gguf_end_ids  # takes a second to import

        return frozenset(gguf_end_ids(checkpoint))
    folder = checkpoint.parent if checkpoint.is_file() else checkpoint
    for name in (GENERATION_CONFIG, CONFIG):
        if ids := _ids(folder / name):
            return ids
    return frozenset()


def _ids(file: Path) -> frozenset[int]:
    if not file.is_file():
        return frozenset()
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON object: {error}.") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"{file} is not a JSON object: it is a {type(value).__name__}.")
    return ids_in(value, file=file)


def ids_in(config: Mapping[str, Any], *, file: Path | str) -> frozenset[int]:
    """``eos_token_id`` of a config: one id, several, or none."""
    value = config.get("eos_token_id")
    found = [id for id in (value if isinstance(value, list) else [value]) if id is not None]
    wrong = [id for id in found if type(id) is not int or id < 0]
    if wrong:
        raise ValueError(f"{file}: eos_token_id has {wrong[0]!r}, which is no token id.")
    return frozenset(found)
