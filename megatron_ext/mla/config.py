"""What can be chosen about the conversion to latent attention; every field becomes a flag.

`--low-rank-method` names a row of `presets.py`, which sets the other options of the latent; a flag
of the user wins.
No `from __future__ import annotations`: Megatron's ArgumentGroupFactory needs the field types
themselves.
"""

from dataclasses import dataclass, field
from typing import Literal

from megatron_ext.mla.selection import NormScore
from megatron_ext.options.ranges import Ranged, ranged
from megatron_ext.weights.architecture import MlaLayout

RopeStrategy = Literal["high", "low", "uniform", "2-norm", "residual"]
LowRankMethod = Literal["paper-joint", "paper-split", "whitened", "transmla", "best"]
KvBalance = Literal["none", "energy", "channel-rms"]
RidgeOn = Literal["inputs", "outputs"]

FOUND = -1
"""A number that calibration finds (`budget`)."""
CALIBRATED_STRATEGIES = ("2-norm", "residual")


@dataclass(frozen=True, kw_only=True)
class MLAConfig(Ranged):
    """Options of the conversion of multi-head or grouped-query attention to latent attention."""

    mla_layout: MlaLayout = "paper"
    """Rotary keys of converted layers: paper = each KV head keeps its own pairs (MHA2MLA), deepseek
    = one rotary key for all heads, the shape that stock inference engines serve."""

    rope_strategy: RopeStrategy = "residual"
    """Which rotary pairs stay rotary: the fastest (high), the slowest (low), every n-th (uniform),
    those with the largest norms (2-norm) or those whose rotation matters most for the attention
    weights (residual). Layout deepseek: directions across heads by energy (2-norm) or by what the
    rotation does (residual)."""

    rope_pairs: int = ranged(FOUND, at_least=0, also=(FOUND,), note="-1 finds it")
    """Rotary pairs (two numbers each) that a KV head keeps, or that the shared key of layout
    deepseek has. -1 = the best division of --cache-ratio; the paper keeps 1/8 of a head's pairs."""

    rope_norm_score: NormScore = "product"
    """Score of strategy 2-norm: mean norm of query pairs times that of key pairs, as in the paper,
    or their sum, as in the authors' first code."""

    rope_uniform_start: int = ranged(0, at_least=0)
    """First pair of strategy uniform."""

    rope_compensation: bool = True
    """With strategy residual, give the queries of pairs that lose their rotation the factor that
    restores most of it."""

    rope_stride: int = ranged(FOUND, at_least=1, also=(FOUND,), note="-1 finds it")
    """Layout deepseek: neighbouring pairs that share a slot of the rotary key; 2 with half as many
    slots as pairs covers all frequencies. -1 = 1 or 2, the better."""

    rope_fold: int = ranged(0, at_least=0)
    """Layout deepseek, strategy 2-norm: neighbouring pairs whose directions are found together.
    0 = as many as share a slot."""

    kv_rank: int = ranged(0, at_least=0)
    """Numbers of the latent per token; 0 = by --kv-dims-per-head or --cache-ratio."""

    kv_dims_per_head: int = ranged(0, at_least=0)
    """Numbers of the latent per token and KV head, the paper's d_kv; 0 = not given."""

    cache_ratio: float = ranged(0.0, at_least=0)
    """Share of the original KV cache that rotary keys and latent may take; the latent gets what the
    rotary keys leave. 0 = not given."""

    q_rank: int = ranged(0, at_least=0)
    """Rank of a latent for queries; it saves parameters, not cache. 0 = none."""

    low_rank_method: LowRankMethod = "best"
    """How keys and values become a latent: joint or separate singular values of the weights
    (paper-), of the activations (whitened), balanced (transmla), or all below (best). Sets
    the options below; a flag given beside it wins."""

    kv_split: bool = False
    """Separate latents of half the rank for keys and for values. Off: one for both."""

    whitening: bool = True
    """Minimise the error of keys and values on calibration text. Off: of the weights."""

    recalibrate: bool = False
    """Minimise it for the inputs that layers have once rotation is partial everywhere: a second
    pass over --calibration-data. Off: for the inputs in the original model."""

    token_weight: float = ranged(0.95, at_least=0, at_most=1)
    """Share, from 0 to 1, of the calibration that counts tokens by the attention they receive."""

    kv_balance: KvBalance = "energy"
    """What is made equal between keys and values before their error is minimised: nothing, the
    energy, or the mean size of a channel (layout deepseek, strategy 2-norm: of a rotated one)."""

    kv_balance_factor: float = ranged(1.0, above=0)
    """With --kv-balance: energy of the keys in units of that of the values."""

    metric_exponent: float = ranged(0.5, at_least=0, at_most=1)
    """Power, from 0 to 1, of the metric that says what an error of each key and value channel does
    to the output; 0 = all the same."""

    query_refit_steps: int = ranged(8, at_least=0)
    """Steps of conjugate gradients that fit the queries to the new keys. 0 = off."""

    output_refit: bool = True
    """Fit the output projection to the outputs of the converted heads, as far as that helps on
    sequences that were not fitted."""

    refit_ridge: float = ranged(1.0, at_least=0)
    """Pull of fitted queries towards where they start, in units of the mean curvature."""

    sequential_compensation: bool = False
    """Convert layers in order, each fitted to the inputs that the converted ones before it leave on
    kept sequences. Off: each as it is, for its original inputs."""

    compensation_ridge: float = ranged(1e-2, at_least=0)
    """Pull of such layers towards the original weights, in units of the inputs' mean moment."""

    moment_ridge: float = ranged(1e-3, at_least=0)
    """Share of the mean second moment of activations that is added to all directions."""

    ridge_on: RidgeOn = "inputs"
    """Activations that --moment-ridge is added to: the inputs, or keys and values (outputs), where
    it changes no direction and so nothing."""

    metric_ridge: float = ranged(1e-3, at_least=0)
    """The same for the metric."""

    calibration_data: list[str] = field(default_factory=list)
    """UTF-8 texts to calibrate on, a sequence of each in turn: mix all kinds that the model is
    wanted for. Default: those of --calibration-statistics."""

    calibration_statistics: str = ""
    """File of statistics: read if it exists, else written from --calibration-data."""

    calibration_tokens: int = ranged(65536, at_least=1)
    """Tokens to calibrate on."""

    calibration_context: int = ranged(2048, at_least=1)
    """Tokens of a calibration sequence; use the context that the model is wanted for, because pairs
    that hardly turn within a short one turn many times within a long one."""

    calibration_queries: int = ranged(256, at_least=0)
    """Queries of each sequence from which it is found what rotation does, and to which queries are
    refitted; 0 = all."""

    calibration_kept: int = ranged(4, at_least=0)
    """Sequences of which every layer's inputs are kept for the refits; 0 = none."""

    @property
    def needs_statistics(self) -> bool:
        """Whether the conversion looks at activations."""
        return self.rope_strategy in CALIBRATED_STRATEGIES or self.whitening or self.needs_inputs

    @property
    def needs_inputs(self) -> bool:
        """Whether it looks at kept sequences."""
        return self.query_refit_steps > 0 or self.output_refit or self.sequential_compensation

    @property
    def is_compensated(self) -> bool:
        """Whether queries without rotation get a factor."""
        return self.rope_compensation and self.rope_strategy == "residual"
