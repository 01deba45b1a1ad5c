"""What the writer wrote is read back bit for bit; what it did not finish is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_ext.weights.checks import open_checkpoint
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import TensorInfo
from megatron_ext.weights.writer import CheckpointWriter
from tests.weights.folders import CONFIG, random_tensors


def infos(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {n: TensorInfo(shape=tuple(t.shape), dtype=t.dtype) for n, t in tensors.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], **options) -> None:
    with CheckpointWriter(folder, tensors=infos(tensors), config=CONFIG, **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)


@pytest.mark.parametrize("max_file_bytes", [10**9, 700])
def test_reads_back_bit_for_bit(tmp_path: Path, max_file_bytes: int):
    tensors = random_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    folder = tmp_path / "new" / "model"
    write(folder, tensors, max_file_bytes=max_file_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1 if max_file_bytes == 700 else len(files) == 1
    found = {name: t for file in files for name, t in load_file(file).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    source = open_checkpoint(folder).source
    for name, tensor in tensors.items():
        assert torch.equal(source.read(Block(name=name, rows=slice(0, len(tensor)))), tensor)
    assert json.loads((folder / "config.json").read_text()) == CONFIG | {"dtype": "float32"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    assert all(torch.equal(model.state_dict()[n], t.float()) for n, t in tensors.items())
    assert sorted(p.name for p in folder.parent.iterdir()) == ["model"]


def test_every_value_starts_at_a_multiple_of_its_size(tmp_path: Path):
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.arange(2.0)}
    write(tmp_path / "m", tensors)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 2
    assert torch.equal(
        load_file(tmp_path / "m/model-00002-of-00002.safetensors")["b"], tensors["b"]
    )


def test_values_are_converted_to_the_announced_type(tmp_path: Path):
    tensors = random_tensors()
    announced = {
        n: TensorInfo(shape=tuple(t.shape), dtype=torch.bfloat16) for n, t in tensors.items()
    }
    with CheckpointWriter(tmp_path / "m", tensors=announced, config=CONFIG) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    found = load_file(tmp_path / "m/model.safetensors")
    assert all(torch.equal(found[n], t.bfloat16()) for n, t in tensors.items())
    assert json.loads((tmp_path / "m/config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_files_go_along(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    write(tmp_path / "m", random_tensors(), tokenizer=tmp_path)
    assert (tmp_path / "m/tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "m/notes.txt").exists()


def test_interruption_leaves_nothing(tmp_path: Path):
    tensors = random_tensors()
    writer = CheckpointWriter(tmp_path / "m", tensors=infos(tensors), config=CONFIG)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.add(*next(iter(tensors.items())))
        assert not (tmp_path / "m").exists()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_writer_do_not_matter(tmp_path: Path):
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial/model.safetensors").write_text("half")
    write(tmp_path / "m", random_tensors())
    open_checkpoint(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path):
    (tmp_path / "m").mkdir()
    write(tmp_path / "m", random_tensors())
    with pytest.raises(ValueError, match="exists and is not empty"):
        write(tmp_path / "m", random_tensors())


def test_too_little_space_is_said_before_writing(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    huge = {"a": TensorInfo(shape=(free, 2), dtype=torch.float32)}
    with pytest.raises(ValueError, match="GB free"):
        CheckpointWriter(tmp_path / "m", tensors=huge, config=CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(.*\): nothing is left of it"):
        write(tmp_path / "file" / "m", random_tensors())
