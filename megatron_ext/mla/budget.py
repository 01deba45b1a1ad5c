"""How a cache of a given size is best divided between rotary pairs and latent.

More pairs keep more of what rotation does, and leave less for keys and values.  What a division
loses is measured: a few layers are converted without refits, and their outputs compared on the
kept calibration sequences.  (A sum of second-order losses of both is no substitute: errors of the
pairs of a head add up, and it keeps too few.)
Invariants the tests check: every division fills the cache, and the choice is the least of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_ext.mla.config import MLAConfig
from megatron_ext.mla.convert import convert_layer
from megatron_ext.mla.layers import AttentionLayer
from megatron_ext.mla.sizes import divisions, latent_rank
from megatron_ext.mla.statistics import LayerStatistics
from megatron_ext.weights.architecture import Architecture


def best_division(
    layers: Iterable[tuple[AttentionLayer, LayerStatistics]],
    *,
    config: MLAConfig,
    architecture: Architecture,
) -> tuple[MLAConfig, dict[tuple[int, int], float]]:
    """The config with the pairs and stride of the least output error, summed over some layers.

    Also the sum of every choice, by (pairs, stride).

    Raises:
        ValueError: no choice leaves a latent, or no sequences were kept.
    """
    choices = divisions(config, architecture)
    if not choices:
        raise ValueError(
            f"--cache-ratio {config.cache_ratio:g} leaves no latent beside any number of rotary "
            "pairs. Use a larger ratio."
        )
    losses = {(c.rope_pairs, c.rope_stride): 0.0 for c in choices}
    for layer, statistics in layers:
        if not len(statistics.inputs_STD):
            raise ValueError(
                "the best --rope-pairs are found on kept sequences, and the statistics have none. "
                "Calibrate with --calibration-kept 1 or more, or give --rope-pairs."
            )
        for choice in choices:
            plain = replace(
                choice, query_refit_steps=0, output_refit=False, q_rank=0, recalibrate=False
            )
            rank = latent_rank(choice, architecture)
            _, report = convert_layer(layer, config=plain, rank=rank, statistics=statistics)
            assert report.output_error is not None, "measured on kept sequences"
            losses[choice.rope_pairs, choice.rope_stride] += report.output_error
    pairs, stride = min(losses, key=lambda division: losses[division])
    return replace(config, rope_pairs=pairs, rope_stride=stride), losses
