"""A source reads what safetensors wrote, and says what is wrong with a folder, all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import (
    CheckpointError,
    SafetensorsSource,
    TensorInfo,
    blocks_of,
)
from megatron_ext.weights.weight_files import INDEX
from tests.weights.folders import CONFIG, write_folder

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("num_files", [1, 3])
def test_rectangles_are_those_of_the_tensor(tmp_path: Path, num_files: int):
    tensors = write_folder(tmp_path, num_files=num_files)
    source = SafetensorsSource(tmp_path)
    assert source.config == CONFIG
    assert source.tensors == {
        name: TensorInfo(shape=tuple(tensor.shape), dtype=torch.float32)
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        for rows in (slice(0, len(tensor)), slice(1, 3), slice(2, 2)):
            assert torch.equal(source.read(Block(name=name, rows=rows)), tensor[rows])
        if tensor.ndim == 2:
            block = Block(name=name, rows=slice(1, 4), columns=slice(2, 5))
            assert torch.equal(source.read(block), tensor[1:4, 2:5])
    source.close()


def test_one_file_beside_its_config(tmp_path: Path):
    tensors = write_folder(tmp_path)
    source = SafetensorsSource(tmp_path / "model.safetensors")
    assert source.tensors.keys() == tensors.keys()


def test_row_blocks_make_up_the_tensor():
    info = TensorInfo(shape=(10, 4), dtype=torch.float32)
    blocks = list(blocks_of("w", info, max_bytes=50))
    assert [(b.rows.start, b.rows.stop) for b in blocks] == [
        (i, min(i + 3, 10)) for i in (0, 3, 6, 9)
    ]


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(path)
    return str(caught.value)


def test_all_problems_of_a_folder_at_once(tmp_path: Path):
    write_folder(tmp_path, num_files=2)
    (tmp_path / "config.json").write_text("{")
    content = (tmp_path / FIRST).read_bytes()
    (tmp_path / FIRST).write_bytes(content[:-10])
    (tmp_path / SECOND).unlink()
    text = refused(tmp_path)
    assert "config.json is no readable JSON" in text
    assert f"{FIRST} is truncated or corrupt ({len(content) - 10} bytes" in text
    assert f"{SECOND} is missing" in text


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({}, "has no weight_map"),
        ({"a": 3}, "has no weight_map"),
        ({"a": "../model.safetensors"}, "are not files beside it"),
        ({"a": ""}, "are not files beside it"),
        ({"lm_head.weight": FIRST, "other": FIRST}, f"other: not in {FIRST} although the index"),
    ],
)
def test_wrong_index(tmp_path: Path, weight_map: dict[str, object], problem: str):
    write_folder(tmp_path, num_files=2)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert problem in refused(tmp_path)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([], "no model.safetensors and no"),
        (["pytorch_model.bin"], "only pickled weights"),
        (["a.safetensors", "b.safetensors"], "2 safetensors files but no"),
        (["model.gguf"], "Give the path of that file itself"),
        (["adapter_config.json", "adapter_model.safetensors"], "this is an adapter"),
    ],
)
def test_folders_without_weights_to_read(tmp_path: Path, files: list[str], problem: str):
    for name in ("config.json", *files):
        (tmp_path / name).write_text("{}")
    assert problem in refused(tmp_path)


def test_no_such_folder(tmp_path: Path):
    text = refused(tmp_path / "nowhere")
    assert "there is no such file or folder" in text
    assert "config.json is missing" in text
