"""The examples of packing and loss normalisation print what their READMEs say."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ENVIRONMENT, ROOT


def run_example(name: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The JSON that an example left, and its README; the interpreter is the tests' own."""
    command = ["bash", f"examples/{name}/run.sh"]
    environment = os.environ | ENVIRONMENT | {"OUTPUT_DIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / f"{name}.png").stat().st_size > 0
    found = json.loads((folder / f"{name}.json").read_text())
    return found, (ROOT / f"examples/{name}/README.md").read_text()


@pytest.mark.e2e
def test_packing_numbers(tmp_path: Path) -> None:
    found, readme = run_example("packing_numbers", tmp_path)
    for way in found["agents"]["ways"].values():
        size = f"{way['largest'] / 1e3:.0f}k tokens"
        assert (
            f"| {way['microbatches']} | {way['padding']:.1%} | {size} |".replace("%", " %")
            in readme
        )
    assert f"{found['agents']['fewest_rows']:.2f}" == "45.47"
    for name in ("fixed count", "padded budget"):
        assert " | ".join(f"{row[name]:.2f}" for row in found["replicas"]) in readme
    assert f"{found['episodes']['padding']:.0%}" == "74%"
    assert found["episodes"]["rows"] == 10


@pytest.mark.e2e
def test_loss_normalization(tmp_path: Path) -> None:
    found, readme = run_example("loss_normalization", tmp_path)
    for split in found.values():
        local, exact = split["local"], split["global"]
        weights = ", ".join(f"{weight:.2f}" for weight in split["token_weights"])
        tokens = ", ".join(map(str, split["policy_tokens"]))
        error = f"{local['relative_error']:.1e}"
        assert f"local | {tokens} | {error} | {local['cosine']:.4f} | {weights} |" in readme
        assert exact["relative_error"] < 1e-6
        assert exact["cosine"] > 0.999999
