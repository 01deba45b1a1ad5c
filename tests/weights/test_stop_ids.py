"""Stop ids: transformers' order of the files, llama.cpp's set of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.weights.gguf_config import end_ids
from megatron_ext.weights.stop_ids import stop_ids_of


def write(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"eos_token_id": [256, 257]}}, {256, 257}),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"config": {"eos_token_id": [2, 3]}, "generation_config": {}}, {2, 3}),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": None}}, {2}),
        ({"generation_config": {"eos_token_id": [None]}}, set()),
        ({"config": {}}, set()),
        ({}, set()),
    ],
)
def test_order_of_the_files(tmp_path: Path, files: dict[str, Any], ids: set[int]):
    """N5: generation_config.json, then config.json; one id or a list."""
    write(tmp_path, **files)
    assert stop_ids_of(tmp_path) == ids
    (tmp_path / "model.safetensors").touch()
    assert stop_ids_of(tmp_path / "model.safetensors") == ids


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1], "generation_config.json is not a JSON object"),
        ({"eos_token_id": "2"}, "generation_config.json: eos_token_id has '2', which is no token"),
        ({"eos_token_id": [2, True]}, "eos_token_id has True"),
    ],
)
def test_files_that_name_no_ids(tmp_path: Path, value: Any, problem: str):
    write(tmp_path, generation_config=value)
    with pytest.raises(ValueError, match=problem):
        stop_ids_of(tmp_path)


def test_llama_cpp_ends_at_keys_and_at_texts():
    """N4"""
    keys = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}
    assert end_ids(keys) == [5, 6]
    assert end_ids(keys | {"tokenizer.ggml.eom_token_id": 6}) == [5, 6]
    tokens = ["a", "<|eot_id|>", "</s>", "<|im_end|>", "b", "c", "d"]
    assert end_ids(keys | {"tokenizer.ggml.tokens": tokens}) == [5, 6, 1, 3]
    assert end_ids({}) == []
