"""Which files of a folder hold the weights: exactly one set, or the folder is refused.

A second set beside the first (old shards and a newer single file, another format) may be the one
that was meant, so both are named and the user decides.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
SHOWN = 8
"""Names listed of a group of like problems; the rest are counted."""
_OTHER_FORMATS = ("pytorch_model*.bin", "tf_model*.h5", "flax_model*.msgpack", "*.gguf")
"""Weights that transformers, or we, read under other names."""
_ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"(.+)-\d+-of-(\d+)\.(\w+)")
_NOT_A_SET = re.compile(r"consolidated.*")
"""Mistral publishes its own format beside Hugging Face's; transformers never reads it."""

Files = dict[Path, set[str] | None]
"""The files to read, and the tensors that an index expects in each (None = all it has)."""


def files_of(path: Path, problems: list[str]) -> Files:
    """The files of a folder or of a single file; {} and a problem if there is no single set."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        problems.append("there is no such file or folder. Check the path.")
        return {}
    chosen = _safetensors(path, problems)
    if chosen:
        problems += _second_set(path, chosen)
    return chosen


def _safetensors(path: Path, problems: list[str]) -> Files:
    if (path / INDEX).is_file():
        return _files_of_index(path, problems)
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not (path / _ADAPTER).is_file():
        return {files[0]: None}
    problems.append(_why_no_files(path, num_files=len(files)))
    return {}


def _second_set(path: Path, chosen: Files) -> list[str]:
    """The problem of weights that do not belong to the chosen files."""
    if (path / _ADAPTER).is_file():
        return [
            f"an adapter ({_ADAPTER}) beside the weights: merge it into the model, or move it to "
            "another folder."
        ]
    found = [*path.glob("*.safetensors"), *path.glob("*.safetensors.index*.json")]
    found += [file for pattern in _OTHER_FORMATS for file in path.glob(pattern)]
    mine = {file.name for file in chosen}
    mine |= {INDEX} if _expects_names(chosen) else set()
    others = sorted(
        file.name for file in found if file.name not in mine and not _NOT_A_SET.match(file.name)
    )
    if not others:
        return []
    return [
        f"two sets of weights: {_shown(sorted(mine))}; and {_shown(others)}. Move the ones that "
        "are not meant to another folder (and their index)."
    ]


def _expects_names(files: Files) -> bool:
    return any(expected is not None for expected in files.values())


def _shown(names: list[str]) -> str:
    """Names in a few words: shards of one set as one pattern."""
    matches = [(name, _SHARD.fullmatch(name)) for name in names]
    short = dict.fromkeys(f"{m[1]}-*-of-{m[2]}.{m[3]}" if m else name for name, m in matches)
    more = f" and {len(short) - SHOWN} more" if len(short) > SHOWN else ""
    return ", ".join(list(short)[:SHOWN]) + more


def _why_no_files(path: Path, *, num_files: int) -> str:
    if (path / _ADAPTER).is_file():
        return "this is an adapter (LoRA), not a model. Merge it into its base model first."
    if num_files:
        return f"{num_files} safetensors files but no {INDEX}. Download the index too."
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        return (
            "only pickled weights (.bin, .pt), which can run code when read. Save the model again "
            "as safetensors with transformers."
        )
    if any(path.glob("*.gguf")):
        return "no safetensors but a GGUF file. Give the path of that file itself."
    return f"no {SINGLE} and no {INDEX}. Check the path, or download the weights."


def _files_of_index(path: Path, problems: list[str]) -> Files:
    weight_map = read_json(path / INDEX, problems).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values())
    if not is_map or not weight_map:
        problems.append(f"{INDEX} has no weight_map. Download it again.")
        return {}
    outside = sorted({f for f in weight_map.values() if Path(f).name != f or f in ("", ".", "..")})
    if outside:
        problems += listed(outside, f"named in {INDEX}, are not files beside it; correct the index")
        return {}
    files: Files = {}
    for name, file in sorted(weight_map.items(), key=lambda item: (item[1], item[0])):
        expected = files.setdefault(path / file, set())
        assert expected is not None
        expected.add(name)
    return files


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object from a file; {} and a problem if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing in {path.parent}. Copy it there.")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} is no readable JSON ({error}). Download it again.")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object. Download it again.")
        return {}
    return value


def listed(names: list[str], what: str) -> list[str]:
    """One line for any number of names with the same problem; none for no names."""
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{', '.join(names[:SHOWN])}{more}: {what}."]
