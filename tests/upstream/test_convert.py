"""Converted checkpoints come back bit for bit, load on any layout, and are complete or absent."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ext.upstream import convert, convert_hf, convert_target
from megatron_ext.upstream.checkpoint import load_weights, save_weights
from megatron_ext.upstream.checkpoint_folder import newest
from megatron_ext.upstream.convert_target import check_target
from megatron_ext.upstream.cpu import device_mode
from megatron_ext.upstream.model import bare
from tests.rank_report import RanksFailed
from tests.ranks import RankPool
from tests.upstream.hf_jobs import Job, save_torch_dist
from tests.weights.tiny_models import BASE, MODELS, save, tokens

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
NAMES = ["llama tied biased", "qwen3_moe", "deepseek_v3"]
LOGITS = 5e-6  # as in test_hf_parity


def to_megatron(source: Path, target: Path) -> convert_target.Conversion:
    return convert.to_megatron(source, target, implementation="local")


def there_and_back(folders: list[Path], root: Path) -> None:
    """Every folder to ``root/megatron/name`` and back to ``root/hf/name``."""
    with device_mode():
        for folder in folders:
            saved = root / "megatron" / folder.name
            to_megatron(folder, saved).run(lambda _: None)
            convert_hf.to_hf(saved, root / "hf" / folder.name).run(lambda _: None)


def loaded_logits(folders: list[Path], root: Path, flags: str, tokens: Tensor) -> list:
    """Logits of the models that Megatron builds and loads from the converted checkpoints."""
    job = Job(flags)
    results = []
    with device_mode(), torch.no_grad():
        for folder in folders:
            _, chunks = job.build(folder)
            saved = newest(root / "megatron" / folder.name)
            assert saved is not None
            load_weights([bare(chunk) for chunk in chunks], job.layout, folder=saved)
            results.append(job.logits(chunks, tokens))
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Tensor]:
    """Folders of tiny models, and the logits transformers computes."""
    root = tmp_path_factory.mktemp("models")
    return {root / name: save(MODELS[name], root / name) for name in NAMES}


@pytest.fixture(scope="module")
def converted(
    ranks: RankPool, models: dict[Path, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder that `there_and_back` has written to."""
    root = tmp_path_factory.mktemp("converted")
    ranks(1).run(there_and_back, list(models), root)
    return root


@pytest.mark.parametrize("name", NAMES)
def test_to_megatron_and_back_is_the_same_files(
    models: dict[Path, Tensor], converted: Path, name: str
):
    folder = next(folder for folder in models if folder.name == name)
    back = converted / "hf" / name
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert is_same(back, folder)
    assert filecmp.cmp(folder / "generation_config.json", back / "generation_config.json")


def is_same(folder: Path, other: Path) -> bool:
    """Whether two folders have the same tensors, types included, bit for bit."""
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, other))
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype
        for name in ours
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", [TP2, PP2])
def test_megatron_loads_it_on_any_layout(
    ranks: RankPool, models: dict[Path, Tensor], converted: Path, flags: str
):
    results = ranks(2).run(loaded_logits, list(models), converted, flags, tokens())
    for number, expected in enumerate(models.values()):
        found = [rank[number] for rank in results if rank[number] is not None]
        errors = [(f[..., : BASE["vocab_size"]] - expected).abs().max() for f in found]
        assert errors and max(errors) < LOGITS


@pytest.mark.parametrize(("name", "flags"), [("qwen3_moe", TP2), ("llama tied biased", PP2)])
def test_what_megatron_saved_on_two_ranks_comes_back(
    ranks: RankPool, models: dict[Path, Tensor], tmp_path: Path, name: str, flags: str
):
    folder = next(folder for folder in models if folder.name == name)
    ranks(2).run(save_torch_dist, folder, flags, tmp_path / "saved")
    convert_hf.to_hf(tmp_path / "saved", tmp_path / "hf", like=folder).run(lambda _: None)
    assert is_same(tmp_path / "hf", folder)


def save_diverged(folder: Path, out: Path) -> None:
    """A torch_dist checkpoint of a run whose last norm has become NaN."""
    job = Job("")
    with device_mode(), torch.no_grad():
        _, chunks = job.filled(folder)
        models = [bare(chunk) for chunk in chunks]
        models[0].decoder.final_layernorm.weight[0] = torch.nan
        save_weights(models, job.layout, folder=out)


def test_values_that_are_no_numbers_are_not_exported(
    ranks: RankPool, models: dict[Path, Tensor], tmp_path: Path
):
    folder = next(iter(models))
    ranks(1).run(save_diverged, folder, tmp_path / "saved")
    conversion = convert_hf.to_hf(tmp_path / "saved", tmp_path / "hf", like=folder)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: NaN or infinite values"):
        conversion.run(lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_without_a_config_the_saved_flags_describe_the_model(converted: Path, tmp_path: Path):
    for name in NAMES:
        saved = tmp_path / "megatron" / name
        shutil.copytree(converted / "megatron" / name, saved)
        shutil.rmtree(saved / convert_target.HF_FOLDER)
        convert_hf.to_hf(saved, tmp_path / "hf" / name).run(lambda _: None)
        assert is_same(tmp_path / "hf" / name, converted / "hf" / name)


def interrupted(folder: Path, target: Path, how: str) -> list[str]:
    """What is left of a conversion that ends after two parameters."""
    calls = []

    def interrupt(size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt if how == "Ctrl-C" else OSError(28, "No space left on device")

    with device_mode(), pytest.raises((KeyboardInterrupt, ValueError)):
        to_megatron(folder, target).run(interrupt)
    return [path.name for path in target.parent.iterdir()]


@pytest.mark.slow
def test_an_interrupted_conversion_leaves_nothing_that_looks_complete(
    ranks: RankPool, models: dict[Path, Tensor], tmp_path: Path
):
    folder, target = next(iter(models)), tmp_path / "out" / "llama"
    assert ranks(1).run(interrupted, folder, target, "Ctrl-C") == [[]]
    assert ranks(1).run(interrupted, folder, target, "full disk") == [[]]
    with pytest.raises(RanksFailed):
        ranks(1).run(interrupted, folder, target, "kill")
    (partial,) = target.parent.iterdir()
    assert newest(target) is None
    assert newest(partial) is None
    assert [path.name for path in partial.rglob("*") if path.is_file()] == ["__0_0.distcp"]
    ranks(1).run(there_and_back, [folder], tmp_path)
    assert is_same(tmp_path / "hf" / folder.name, folder)


def refused(folder: Path, existing: Path) -> list[str]:
    """The error of an existing target, and the names that a plan without a run leaves."""
    with device_mode():
        conversion = to_megatron(folder, existing.parent / "new")
        assert conversion.num_bytes > 0
        with pytest.raises(ValueError, match="exists and is not empty"):
            to_megatron(folder, existing)
    return [path.name for path in existing.parent.iterdir()]


def test_a_plan_writes_nothing_and_an_existing_target_is_refused(
    ranks: RankPool, models: dict[Path, Tensor], tmp_path: Path
):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    assert ranks(1).run(refused, next(iter(models)), tmp_path / "old") == [["old"]]


def test_errors_say_what_is_wrong(models: dict[Path, Tensor], converted: Path, tmp_path: Path):
    llama, other = converted / "megatron" / NAMES[0], next(f for f in models if f.name == NAMES[1])
    with pytest.raises(ValueError, match="is no checkpoint"):
        convert_hf.to_hf(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=r"q_layernorm.*missing in the checkpoint"):
        convert_hf.to_hf(llama, tmp_path / "out", like=other)
    with pytest.raises(ValueError, match="is missing in"):
        convert_hf.to_hf(llama, tmp_path / "out", like=tmp_path)
    with pytest.raises(ValueError, match=r"GB free\. Free some space"):
        check_target(tmp_path / "out", num_bytes=10**18)
    shutil.copytree(llama, tmp_path / "cut")
    release = tmp_path / "cut" / "release"
    with (release / "__0_0.distcp").open("r+b", buffering=0) as file:
        file.write(bytes(3000))
        with pytest.raises(ValueError, match=r"release is damaged: __0_0.distcp is damaged \("):
            convert_hf.to_hf(tmp_path / "cut", tmp_path / "out")
        (release / "checksums.json").unlink()  # as Megatron writes it
        with pytest.raises(ValueError, match=r"__0_0.distcp cannot be read .*embeddings.weight is"):
            convert_hf.to_hf(tmp_path / "cut", tmp_path / "out").run(lambda _: None)
        file.truncate(30000)
    with pytest.raises(
        ValueError, match=r"release is damaged: __0_0\.distcp has 30000 bytes of at"
    ):
        convert_hf.to_hf(tmp_path / "cut", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]
