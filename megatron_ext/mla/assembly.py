"""The target of a conversion: a checkpoint of converted layers and what the source has beside them.

Its config.json and tensors are all that a model needs: no rotary pairs, frequencies or factors are
found again when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from safetensors import safe_open
from torch import Tensor

from megatron_ext.mla.checkpoint import CheckpointConversion
from megatron_ext.mla.read import attention_prefix
from megatron_ext.weights.checks import FiniteReader
from megatron_ext.weights.converted_json import converted_config
from megatron_ext.weights.operators import Block
from megatron_ext.weights.sources import CheckpointError
from megatron_ext.weights.writer import CheckpointWriter


def assemble(
    conversion: CheckpointConversion,
    *,
    progress: Callable[[int], object],
) -> None:
    """Write the target from the work folder, in which every layer is done.

    progress: told of the bytes of each tensor.

    Raises:
        ValueError: the source has a NaN or an infinity, or the target cannot be written; nothing
            is left of it then.
    """
    source, announced = conversion.source.source, conversion.announced()
    architecture = conversion.architecture
    assert architecture.converted is not None, "the target's"
    layer_of = {
        name: layer
        for layer in range(architecture.num_layers)
        for name in announced
        if name.startswith(attention_prefix(layer))
    }
    read = FiniteReader(source)

    def values_of(name: str) -> Tensor:
        if name not in layer_of:
            return read(Block(name=name, rows=slice(0, announced[name].shape[0])))
        with safe_open(conversion.layer_file(layer_of[name]), framework="pt") as file:
            return file.get_tensor(name)

    writer = CheckpointWriter(
        conversion.target,
        tensors=announced,
        config=converted_config(conversion.source.config, architecture.converted),
        tokenizer=source.location if source.location.is_dir() else None,
    )
    with writer:
        for name, info in announced.items():
            writer.add(name, values_of(name))
            progress(info.num_bytes)
        if problems := read.problems():
            raise CheckpointError(source.location, problems)
    source.close()
