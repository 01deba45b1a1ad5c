"""The converter's command line: its flags, and 200 damaged inputs that end in one message each."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megatron_ext.data.hugging_face import load_tokenizer
from megatron_ext.upstream.checkpoint_folder import newest
from tests.ranks import RankPool
from tests.weights.folders import CONFIG as LLAMA
from tests.weights.folders import random_tensors, write_folder
from tests.weights.gguf_files import CONFIG, write_gguf
from tests.weights.tiny_models import BASE, MODELS, save
from tools import convert_checkpoint

NAMES = ["llama tied biased", "qwen3_moe", "deepseek_v3"]
NUM_DAMAGED = 200
JUNK = [None, -1, 0, 7, 1e400, "x", [], {}, True, 10**30, [[]], {"rope_type": "yarn"}, 0.5]


def call(*words: object) -> tuple[int, str, str]:
    """Exit status, output and errors of the command, in this process; other exceptions pass."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            convert_checkpoint.main([str(word) for word in words])
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), errors.getvalue()


def damage(folder: Path, chance: random.Random) -> str:
    """Damage one thing of a Hugging Face directory; which, in words."""
    kind = chance.choice(
        ["delete", "truncate", "flip", "config", "rename", "shape", "dtype", "nan"]
    )
    if kind in ("delete", "truncate", "flip"):
        file = chance.choice(sorted(folder.iterdir()))
        content = bytearray(file.read_bytes())
        if kind == "delete":
            file.unlink()
        elif kind == "truncate":
            file.write_bytes(content[: chance.randrange(len(content) + 1)])
        else:
            for _ in range(chance.randrange(1, 30)):
                content[chance.randrange(min(len(content), 3000))] = chance.randrange(256)
            file.write_bytes(content)
        return f"{kind} {file.name}"
    if kind == "config":
        config = json.loads((folder / "config.json").read_text())
        name = chance.choice(sorted(config))
        config[name] = chance.choice(JUNK)
        (folder / "config.json").write_text(json.dumps(config))
        return f"config {name}={config[name]!r}"
    tensors = load_file(folder / "model.safetensors")
    name = chance.choice(sorted(tensors))
    value = tensors.pop(name)
    if kind == "rename":
        name = chance.choice([name + "x", name.replace("layers.1", "layers.9"), "lm_head"])
    elif kind == "shape":
        value = chance.choice([torch.zeros(()), torch.zeros(0, 3), value[:-1].clone()])
    elif kind == "dtype":
        value = value.to(chance.choice([torch.int32, torch.float64, torch.bool, torch.uint8]))
    else:
        value.view(-1)[0] = chance.choice([float("nan"), float("inf")])
    tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return f"{kind} {name}"


def convert_damaged(folders: list[Path], root: Path) -> list[tuple[str, int, str, list[str]]]:
    """(what was damaged, exit status, message, what is in the output's folder) of every case."""
    found = []
    for case in range(NUM_DAMAGED):
        chance = random.Random(case)
        source, outputs = root / "damaged", root / "outputs"
        shutil.copytree(chance.choice(folders), source)
        outputs.mkdir()
        what = damage(source, chance)
        status, _, errors = call(source, outputs / "converted", "--transformer-impl", "local")
        if status == 0:
            assert newest(outputs / "converted") is not None, what
        found.append((what, status, errors, [path.name for path in outputs.iterdir()]))
        shutil.rmtree(source)
        shutil.rmtree(outputs)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_damaged_directories_end_in_one_message_and_leave_nothing(ranks: RankPool, tmp_path: Path):
    folders = [tmp_path / name for name in NAMES]
    for folder in folders:
        save(MODELS[folder.name], folder)
    [found] = ranks(1).run(convert_damaged, folders, tmp_path, timeout=240)
    assert all("NaN or infinite" in case[2] for case in found if case[0].startswith("nan "))
    refused = [case for case in found if case[1] != 0]
    assert len(refused) > NUM_DAMAGED / 2
    for what, status, errors, left in refused:
        assert status == 2 and left == [], (what, errors, left)
        assert errors.count("error:") == 1 and "Traceback" not in errors, (what, errors)


def convert_in_all_ways(folder: Path, gguf: Path, root: Path) -> dict[str, tuple[int, str, str]]:
    """Results of the command with each of its flags."""
    megatron, local = root / "megatron", ("--transformer-impl", "local")
    return {
        "dry run": call(folder, root / "never", "--dry-run"),
        "bf16": call(folder, megatron, "--dtype", "bf16", "--peak", *local),
        "back": call(megatron, root / "back", "--max-shard-size", "20KB"),
        "again": call(folder, megatron, *local),
        "no size": call(folder, root / "never", "--max-shard-size", "5 bananas"),
        "no input": call(root / "nothing", root / "never"),
        "gguf": call(gguf, root / "from gguf", *local),
        "gguf back": call(root / "from gguf", root / "gguf back"),
    }


def test_flags(ranks: RankPool, tmp_path: Path):
    folder = tmp_path / "llama"
    save(MODELS["llama tied biased"], folder)
    gguf = tmp_path / "tiny.gguf"
    values = write_gguf(gguf, random_tensors(CONFIG))
    [found] = ranks(1).run(convert_in_all_ways, folder, gguf, tmp_path)
    assert {name: status for name, (status, _, _) in found.items() if status} == {
        "again": 2,
        "no size": 2,
        "no input": 2,
    }
    assert not (tmp_path / "never").exists()
    lines = found["dry run"][1].splitlines()
    tensors = load_file(folder / "model.safetensors")
    padding = (128 - BASE["vocab_size"]) * BASE["hidden_size"] * 4
    size = sum(tensor.nbytes for tensor in tensors.values()) + padding
    assert lines[-1].endswith(f"{size} bytes")
    assert "GiB" in found["bf16"][1]
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        back = load_file(tmp_path / "back" / file)[name]
        torch.testing.assert_close(back, tensors[name].bfloat16(), rtol=0, atol=0)
    assert "exists" in found["again"][2]
    assert "'5 BANANAS'" in found["no size"][2].upper()
    assert "does not exist" in found["no input"][2]
    back = load_file(tmp_path / "gguf back" / "model.safetensors")
    assert back.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(back[name], value, rtol=0, atol=0)


def refused_by(config: dict[str, Any], *words: object, root: Path) -> str:
    """The message of the command for a folder whose config.json has been changed."""
    write_folder(root / "source", tensors=random_tensors(LLAMA))
    (root / "source" / "config.json").write_text(json.dumps(LLAMA | config))
    status, _, errors = call(root / "source", root / "out", *words)
    assert status == 2 and not (root / "out").exists()
    return errors


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': only silu is built"),
        ({"attention_dropout": 1.5}, "attention_dropout is 1.5, not a number from 0 to 1"),
    ],
)
@pytest.mark.parametrize("to_mla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_refusals_are_this_tools(
    tmp_path: Path, config: dict[str, Any], problem: str, to_mla: bool
):
    """R14: in its own words, without flags that it does not have."""
    (tmp_path / "text.txt").write_text("some words " * 200)
    text = ("--calibration-data", tmp_path / "text.txt", "--calibration-context", 16)
    words = ("--to", "mla", "--layout", "deepseek", "--cache-ratio", 0.5, *text) if to_mla else ()
    errors = refused_by(config, *words, root=tmp_path)
    assert problem in errors
    assert "convert_checkpoint.py: error:" in errors
    assert "torchrun" not in errors and "--num-layers" not in errors


def test_gguf_to_hugging_face_in_one_step(tmp_path: Path):
    """R14: config.json, weights, tokenizer and stop ids; transformers reads the folder."""
    gguf = tmp_path / "tiny.gguf"
    values = write_gguf(gguf, random_tensors(CONFIG), has_tokenizer=True)
    status, out, errors = call(gguf, tmp_path / "hf", "--to", "hf", "--peak")
    assert status == 0 and "peak memory" in out, errors
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == values.keys()
    assert all(torch.equal(back[name], value) for name, value in values.items())
    config = AutoConfig.from_pretrained(
        tmp_path / "hf", trust_remote_code=False, local_files_only=True
    )
    assert (config.hidden_size, config.eos_token_id) == (32, [2, 92])
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 92]
    ours, theirs = (load_tokenizer(path)("ab a").input_ids for path in (tmp_path / "hf", gguf))
    assert ours == theirs == [1, 90, 65, 90]


def test_hugging_face_again_as_plain_safetensors(tmp_path: Path):
    """N25: a wrapper's names come out without their prefix."""
    tensors = random_tensors(LLAMA)
    write_folder(tmp_path / "in", tensors={f"module.{name}": t for name, t in tensors.items()})
    status, _, errors = call(tmp_path / "in", tmp_path / "hf", "--to", "hf", "--dtype", "bf16")
    assert status == 0, errors
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], value.bfloat16()) for name, value in tensors.items())
