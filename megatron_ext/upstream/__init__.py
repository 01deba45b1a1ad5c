"""The only room that imports Megatron: it turns our values into Megatron's objects and back."""

import os
import warnings

import torch

# Megatron wraps small functions in torch.compile while it is imported.  Without a GPU they stay
# plain: compiling them would take a C++ compiler, and importing torch's compiler takes 2 s.
_compiles = torch.cuda.is_available() or "TORCHDYNAMO_DISABLE" in os.environ
if not _compiles:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
try:
    with warnings.catch_warnings():
        # Megatron warns once per optional package and per own deprecation while it is imported.
        warnings.simplefilter("ignore")
        import megatron.core
        import megatron.training.training  # noqa: F401
finally:
    if not _compiles:
        del os.environ["TORCHDYNAMO_DISABLE"]
