"""Log-probabilities as transformers computes them: the reference for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


@torch.no_grad()
def transformers_logprobs(path: Path, tokens_BS: Tensor) -> Tensor:
    """log p(tokens[:, 1:]) in float32 on the CPU, [B, S - 1], for a folder or a GGUF file.

    Raises:
        ValueError: transformers cannot load it as it is: it has code of its own, weights that are
            no safetensors, or is not there.
    """
    from transformers import AutoModelForCausalLM  # takes seconds: only where it is used

    if not path.exists():
        raise ValueError(f"there is no folder or file {path}: check the path.")
    where = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(where[0]),
            gguf_file=where[1],
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,  # unset, transformers asks on stdin
            use_safetensors=True,
        )
    except (OSError, ValueError, LookupError, ImportError, RecursionError) as error:
        raise ValueError(f"transformers cannot load {path}: {error}") from error
    rows = []
    for tokens_S in tokens_BS:
        logits_SV = model.eval()(tokens_S[None]).logits[0, :-1]
        rows.append(logits_SV.log_softmax(-1).gather(1, tokens_S[1:, None])[:, 0])
    return torch.stack(rows)
