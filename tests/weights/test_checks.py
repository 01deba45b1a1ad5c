"""A checkpoint that is not what its config.json says is refused, with the names and a remedy."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_ext.weights.checks import MAX_MISSING, FiniteReader, open_checkpoint, open_source
from megatron_ext.weights.sources import CheckpointError, TensorSource, blocks_of
from tests.weights.folders import CONFIG, random_tensors, write_folder
from tests.weights.tiny_models import BASE, LATENT

DEEPSEEK = {
    "model_type": "deepseek_v3",
    **BASE,
    **LATENT,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
}


def refused(path: Path, **options: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, **options)
    return str(caught.value)


def test_a_good_checkpoint_opens(tmp_path: Path):
    write_folder(tmp_path, num_files=2)
    assert open_checkpoint(tmp_path).architecture.family == "llama"


def test_missing_extra_misshapen_and_untyped_at_once(tmp_path: Path):
    tensors = random_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 8)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(6, 8)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    write_folder(tmp_path, tensors=tensors)
    text = refused(tmp_path)
    assert "model.norm.weight: missing." in text
    assert "model.layers.1.mlp.up_proj.weight is [3, 8], not [6, 8]" in text
    assert "model.layers.2.mlp.up_proj.weight: not part of a llama" in text
    assert "lm_head.weight (F8_E4M3): types that are not plain numbers" in text


def test_long_lists_are_cut(tmp_path: Path):
    write_folder(tmp_path, config=CONFIG | {"num_hidden_layers": 2})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 10_000}))
    text = refused(tmp_path)
    assert f"and {MAX_MISSING - 8} more: missing" in text
    assert len(text) < 1000


def test_config_of_another_family(tmp_path: Path):
    write_folder(tmp_path)
    other = CONFIG | {"model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert "the tensor names are those of a llama, but config.json says qwen2" in refused(tmp_path)


def test_harmless_extra_tensors(tmp_path: Path):
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_folder(tmp_path, tensors={**random_tensors(), extra: torch.ones(2)})
    open_checkpoint(tmp_path)


def test_multi_token_prediction_is_dropped_only_on_request(tmp_path: Path):
    extra = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    write_folder(tmp_path, config=DEEPSEEK, tensors=random_tensors(DEEPSEEK) | extra)
    text = refused(tmp_path)
    assert "model.layers.2.eh_proj.weight: multi-token-prediction layers" in text
    assert "--drop-mtp-layers" in text
    open_checkpoint(tmp_path, drop_mtp=True)


def non_finite(source: TensorSource) -> list[str]:
    """The problem of all values of a source."""
    read = FiniteReader(source)
    for name, info in source.tensors.items():
        if not isinstance(info.dtype, str):
            for block in blocks_of(name, info):
                read(block)
    return read.problems()


def test_values_that_are_no_numbers(tmp_path: Path):
    tensors = random_tensors()
    tensors["lm_head.weight"][3, 4] = float("nan")
    tensors["model.norm.weight"][0] = float("-inf")
    write_folder(tmp_path, tensors=tensors)
    (problem,) = non_finite(open_source(tmp_path))
    assert problem.startswith("lm_head.weight, model.norm.weight: NaN or infinite values.")


def mutate(folder: Path, chance: random.Random) -> None:
    """Damage one thing of a folder."""
    file = chance.choice(sorted(folder.iterdir()))
    content = bytearray(file.read_bytes())
    kind = chance.choice(["truncate", "flip", "config", "tensor", "delete"])
    if kind == "delete":
        file.unlink()
    elif kind == "truncate":
        file.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == "flip":
        for _ in range(chance.randrange(1, 30)):
            content[chance.randrange(min(len(content), 3000))] = chance.randrange(256)
        file.write_bytes(content)
    elif kind == "config":
        junk = [None, -1, 0, 7, 1e400, "x", [], {}, True, 10**30, [[]], {"rope_type": "yarn"}]
        name = chance.choice(
            [*CONFIG, "rope_parameters", "rope_scaling", "hidden_act", "rope_theta"]
        )
        broken = CONFIG | {name: chance.choice(junk)}
        (folder / "config.json").write_text(json.dumps(broken))
    else:
        tensors = random_tensors()
        name = chance.choice(sorted(tensors))
        damaged = chance.choice([torch.zeros(()), torch.zeros(0, 3), torch.ones(2).int()])
        tensors[name] = damaged
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("seed", range(8))
def test_damaged_folders_end_in_one_message(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    for case in range(25):
        folder = tmp_path / str(case)
        write_folder(folder, num_files=chance.choice([1, 2]))
        mutate(folder, chance)
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError:
            continue
        non_finite(checkpoint.source)
