"""Which widths of a head turn together, and how fast: rotary pairs as complex numbers.

RoPE (Su et al. 2021) turns pair l of the query at position i by the angle i * f_l, and of the key
at j by j * f_l.  With x_l = x[first_l] + 1j * x[second_l] that is a product with exp(1j * angle),
and pair l adds Re(conj(q_l) k_l exp(1j f_l (j - i))) to the logit of i and j.  So whatever is done
to complex pairs does not depend on the layout (halves or neighbours).
Invariant the tests check: frequencies and the scale are those of transformers, bit for bit.
Not covered: frequencies that depend on the length of the sequence (dynamic, longrope).

Legend: P pairs of a head, W width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.weights.architecture import Rope

KNOWN_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RotaryPairs:
    """The rotary embedding of one head; widths in no pair are not turned."""

    head_size: int
    first_P: Tensor
    """Width of each pair's real part."""
    second_P: Tensor
    """Width of each pair's imaginary part."""
    frequencies_P: Tensor
    """Radians per position, float32 as the model itself computes them."""
    scale: float = 1.0
    """YaRN's factor on cosine and sine, so its square is on the logits of turned widths."""

    @property
    def count(self) -> int:
        """P."""
        return len(self.first_P)

    @property
    def plain(self) -> Tensor:
        """Widths that no pair has, ascending."""
        is_plain = torch.ones(self.head_size, dtype=torch.bool)
        is_plain[self.first_P] = False
        is_plain[self.second_P] = False
        return is_plain.nonzero().flatten()

    def as_complex(self, x: Tensor, *, dim: int = -1) -> Tensor:
        """The pairs of `x` as complex numbers: dimension `dim` goes from W to P."""
        real, imaginary = (x.index_select(dim, i) for i in (self.first_P, self.second_P))
        return torch.complex(real, imaginary)

    def put(self, x: Tensor, pairs: Tensor, *, dim: int = -1) -> Tensor:
        """`x` with its pairs replaced by complex ones: the inverse of `as_complex`."""
        out = x.clone()
        out.index_copy_(dim, self.first_P, pairs.real.to(x.dtype))
        out.index_copy_(dim, self.second_P, pairs.imag.to(x.dtype))
        return out

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE of x [..., W] at positions that broadcast to [...]; without the scale."""
        angles = positions.to(x.dtype)[..., None] * self.frequencies_P.to(x.dtype)
        turned = self.as_complex(x) * torch.polar(torch.ones_like(angles), angles)
        return self.put(x, turned)


def rotary_pairs(rope: Rope, *, head_size: int) -> RotaryPairs:
    """The pairs of a head of that size under a checkpoint's rotary embedding.

    Raises:
        ValueError: the kind of scaling is not known, or the turned widths are odd in number.
    """
    if rope.kind not in KNOWN_KINDS:
        raise ValueError(
            f"rope_type {rope.kind!r}: its frequencies depend on more than the position. Known "
            f"here are {', '.join(KNOWN_KINDS)}."
        )
    width = int(head_size * rope.rotated_share)
    if width % 2 or not 0 < width <= head_size:
        raise ValueError(
            f"partial_rotary_factor {rope.rotated_share:g} of a head_dim of {head_size} turns "
            f"{width} widths, which do not form pairs. Correct config.json."
        )
    count = width // 2
    index_P = torch.arange(count)
    first_P, second_P = (
        (2 * index_P, 2 * index_P + 1) if rope.is_interleaved else (index_P, index_P + count)
    )
    return RotaryPairs(
        head_size=head_size,
        first_P=first_P,
        second_P=second_P,
        frequencies_P=frequencies(rope, width=width),
        scale=(rope.attention_factor or rope.yarn_scale) if rope.kind == "yarn" else 1.0,
    )


def frequencies(rope: Rope, *, width: int) -> Tensor:
    """Radians per position [width / 2] in float32, by the operations of transformers."""
    powers = rope.theta ** (torch.arange(0, width, 2).to(torch.float32) / width)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return _yarn(powers, rope, width=width) if rope.kind == "yarn" else plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: slow pairs are slowed down by the factor, fast ones kept, a ramp between."""
    lengths = 2 * math.pi / plain
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    slowed = torch.where(lengths > longest, plain / rope.factor, plain)
    share = (rope.original_positions / lengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - share) * slowed / rope.factor + share * slowed
    return torch.where((lengths >= shortest) & (lengths <= longest), ramp, slowed)


def _yarn(powers: Tensor, rope: Rope, *, width: int) -> Tensor:
    """Peng et al. 2023, section 3.2."""

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns in the original length, as a fraction."""
        length = math.log(rope.original_positions / (turns * 2 * math.pi))
        return width * length / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
