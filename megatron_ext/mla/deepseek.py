"""The layout of DeepSeek: one rotary key that all heads share, and every key width plain as well.

Slot c of the shared key turns at one model frequency and carries one direction across the KV heads
(and a few neighbouring pairs): z_c = a_c^H k, with queries b_c^H q.  What it does not carry,
k - b_c z_c, goes to the latent without position, so nothing but the rotation of the rest is lost.
A unitary a_c = b_c is RoRoPE (TransMLA, arXiv 2502.07864).  Here directions may be complex, which
also commutes with the rotation, and oblique: they are principal directions of keys weighted by what
RoPE does for each pair (`logit_residual`), not by energy.
The stock engines turn slot c at theta'^(-2c / 2K): with theta' = theta^(stride K / P) that is the
frequency of pair stride * c.
Invariants the tests check: one pair a slot and one KV head, nothing dropped, is the original; so is
any unitary rotation that keeps all directions; at zero frequencies every direction is exact.
Not covered: norms of queries and keys, whose divisors differ between KV heads.

Legend: as in `layers`; P pairs of a head, n = G * F channels of a fold of F pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.mla.layers import AttentionLayer
from megatron_ext.mla.logit_residual import FOLD_STRIDE, LogitResiduals
from megatron_ext.mla.split import RotarySplit, complex_maps
from megatron_ext.mla.statistics import LayerStatistics
from megatron_ext.weights.architecture import Rope

_SMALLEST_WEIGHT = 1e-9
"""Of a channel's weight against the largest: directions divide by its root."""


@dataclass(frozen=True, kw_only=True)
class SharedKey:
    """K slots of a rotary key that all heads share."""

    read_KGP: Tensor
    """a, complex: slot c holds the sum of conj(a) k over KV heads and pairs."""
    write_KGP: Tensor
    """b, complex, with a^H b = 1 for each slot."""
    pairs_K: Tensor
    """The pair at whose frequency each slot turns."""
    rest_XGP: Tensor | None = None
    """Real orthonormal directions that no slot has; None = not made."""
    loss: float | None = None
    """Expected loss of all pairs, in the units of `LogitResiduals`; None = not known."""


def engine_theta(rope: Rope, *, num_pairs: int, num_slots: int, stride: int) -> float:
    """Base at which an engine that knows nothing but a base gives every slot its frequency.

    Raises:
        ValueError: the model's frequencies are scaled, so no base gives them.
    """
    if rope.kind != "default":
        raise ValueError(
            f"rope_type {rope.kind!r}: the slots of a shared key turn at scaled frequencies, and "
            "engines that serve DeepSeek's layout compute theirs from a base alone. Serve this "
            "model with its own frequencies."
        )
    return rope.theta ** (stride * num_slots / num_pairs)


def split_shared(
    layer: AttentionLayer,
    *,
    shared: SharedKey,
    residuals: LogitResiduals | None = None,
    is_compensated: bool = False,
) -> RotarySplit:
    """Queries and keys with a shared rotary key.

    residuals: of the layer's heads; None = not known, and no compensation.

    Raises:
        ValueError: the layer normalises queries and keys.
    """
    if layer.has_qk_norm:
        raise ValueError(
            "queries and keys are normalised (qk-norm) by head, so a key that heads share cannot "
            "be made from hidden states. Use --mla-layout paper."
        )
    pairs, width = layer.pairs, layer.pairs.head_size
    num_slots = len(shared.read_KGP)
    grow = ((width + 2 * num_slots) / width) ** 0.5
    read_KGP, write_KGP = (v.to(_complex(layer)) for v in (shared.read_KGP, shared.write_KGP))
    key_GPD = pairs.as_complex(layer.key_GWD, dim=1)
    slot_KD = torch.einsum("kgp,gpd->kd", read_KGP.conj(), key_GPD)
    rest_GPD = key_GPD - torch.einsum("kgp,kd->gpd", write_KGP, slot_KD)
    bias_BC = None
    if layer.key_bias_GW is not None:
        bias_GP = pairs.as_complex(layer.key_bias_GW)
        slot_bias_K = torch.einsum("kgp,gp->k", read_KGP.conj(), bias_GP)
        bias_BC = torch.cat((slot_bias_K.real, slot_bias_K.imag))[None]
    query_GPK = write_KGP.conj().permute(1, 2, 0)
    loss = None
    if residuals is not None and shared.loss is not None:
        loss = shared.loss / float(residuals.total_HP.sum())
    return RotarySplit(
        query_rotary_HWC=grow * _on_widths(query_GPK, layer),
        query_plain_HWN=grow * _plain_maps(layer, residuals if is_compensated else None),
        key_rotary_BCD=torch.cat((slot_KD.real, slot_KD.imag))[None],
        key_rotary_bias_BC=bias_BC,
        key_plain_GND=pairs.put(layer.key_GWD, rest_GPD, dim=1),
        frequencies_BK=pairs.frequencies_P[shared.pairs_K][None],
        softmax_scale=(width + 2 * num_slots) ** -0.5,
        rotary_loss=loss,
        channels_XM=None if shared.rest_XGP is None else _channels(shared.rest_XGP, layer),
    )


def _channels(rest_XGP: Tensor, layer: AttentionLayer) -> Tensor:
    """Real and imaginary parts of directions, and the widths in no pair, as rows over G * W."""
    pairs, count = layer.pairs, len(rest_XGP)
    rows_YGW = rest_XGP.new_zeros(2 * count, layer.num_groups, pairs.head_size)
    rows_YGW[:count][..., pairs.first_P] = rest_XGP
    rows_YGW[count:][..., pairs.second_P] = rest_XGP
    eye_MM = torch.eye(layer.num_groups * pairs.head_size, dtype=rest_XGP.dtype)
    plain_MM = eye_MM.view(layer.num_groups, pairs.head_size, -1)[:, pairs.plain].flatten(0, 1)
    return torch.cat((rows_YGW.flatten(1), plain_MM))


def _complex(layer: AttentionLayer) -> torch.dtype:
    return layer.query_HWD.dtype.to_complex()


def _on_widths(query_GPK: Tensor, layer: AttentionLayer) -> Tensor:
    """Complex maps of pairs as real maps [H, W, C] of the widths of a head."""
    maps_GXC = complex_maps(query_GPK)
    widths_X = torch.cat((layer.pairs.first_P, layer.pairs.second_P))
    maps_GWC = maps_GXC.new_zeros(len(maps_GXC), layer.pairs.head_size, maps_GXC.shape[2])
    maps_GWC[:, widths_X] = maps_GXC
    return maps_GWC.repeat_interleave(layer.heads_per_group, 0)


def _plain_maps(layer: AttentionLayer, residuals: LogitResiduals | None) -> Tensor:
    """[H, W, W]: the identity, with the factors conj(m) on pairs."""
    num_heads, pairs = len(layer.query_HWD), layer.pairs
    eye_WW = torch.eye(pairs.head_size, dtype=layer.query_HWD.dtype)
    if residuals is None:
        return eye_WW.expand(num_heads, -1, -1)
    factor_HP = residuals.factor_HP.conj().to(_complex(layer))
    eye_HWW = eye_WW.repeat(num_heads, 1, 1)
    return pairs.put(eye_HWW, pairs.as_complex(eye_HWW) * factor_HP[:, None])


def residual_directions(
    layer: AttentionLayer,
    statistics: LayerStatistics,
    residuals: LogitResiduals,
    *,
    num_slots: int,
    stride: int,
    is_compensated: bool,
) -> SharedKey:
    """One complex, oblique direction a slot over `stride` pairs, weighted by what rotation does.

    Raises:
        ValueError: the slots need more pairs than there are.
    """
    scores_GP = residuals.scores(num_groups=layer.num_groups, is_compensated=is_compensated)
    _check_slots(num_slots, stride=stride, fold=stride, num_pairs=layer.pairs.count)
    read_KGP, write_KGP = _no_slots(layer, num_slots), _no_slots(layer, num_slots)
    covered = num_slots * stride
    loss = float(scores_GP[:, covered:].sum())
    folded_GP = residuals.folded_HP.unflatten(0, (layer.num_groups, -1)).sum(1)
    for slot in range(num_slots):
        fold = torch.arange(slot * stride, (slot + 1) * stride)
        moment_nn = key_moment(layer, statistics, fold)
        energy_n = moment_nn.diagonal().real
        weight_n = scores_GP[:, fold].flatten() / energy_n.clamp(min=1e-300)
        weight_n = weight_n.clamp(min=_SMALLEST_WEIGHT * float(weight_n.max()) + 1e-300)
        root_n = weight_n.sqrt()
        values_n, vectors_nn = torch.linalg.eigh(root_n[:, None] * moment_nn * root_n)
        best_n = vectors_nn[:, -1]
        read_KGP[slot][:, fold] = (root_n * best_n).view(-1, stride)
        write_KGP[slot][:, fold] = (best_n / root_n).view(-1, stride)
        loss += float(values_n[:-1].clamp(min=0).sum())
        if stride == FOLD_STRIDE:
            carried_n = values_n[-1] * best_n.abs().square() / (weight_n * energy_n + 1e-300)
            loss += float((carried_n.view(-1, stride) * folded_GP[:, fold]).sum())
    return SharedKey(
        read_KGP=read_KGP,
        write_KGP=write_KGP,
        pairs_K=torch.arange(num_slots) * stride,
        loss=loss,
    )


def energy_directions(
    layer: AttentionLayer,
    statistics: LayerStatistics,
    *,
    num_slots: int,
    stride: int,
    fold: int,
) -> SharedKey:
    """RoRoPE with FreqFold: real orthogonal directions of the most energy (arXiv 2502.07864).

    fold: neighbouring pairs whose principal directions are found together, a multiple of `stride`.

    Raises:
        ValueError: the slots need more pairs than there are, or do not fill their folds.
    """
    _check_slots(num_slots, stride=stride, fold=fold, num_pairs=layer.pairs.count)
    directions_KGP = _no_slots(layer, num_slots)
    per_fold = fold // stride
    shape = (layer.num_groups, layer.pairs.count)
    eye_XGP = torch.eye(shape[0] * shape[1], dtype=torch.float64).view(-1, *shape)
    rest = [eye_XGP.view(*shape, *shape)[:, num_slots * stride :].flatten(0, 1)]
    for first in range(0, num_slots, per_fold):
        channels = torch.arange(first * stride, first * stride + fold)
        moment_nn = key_moment(layer, statistics, channels).real
        vectors_nn = torch.linalg.eigh(moment_nn).eigenvectors
        best_pn = vectors_nn.flip(1)[:, :per_fold].T
        slots = slice(first, first + per_fold)
        directions_KGP[slots, :, channels] = best_pn.view(per_fold, -1, fold).to(torch.complex128)
        others_XGF = vectors_nn[:, :-per_fold].T.view(-1, layer.num_groups, fold)
        others_XGP = others_XGF.new_zeros(len(others_XGF), *shape)
        others_XGP[..., channels] = others_XGF
        rest.append(others_XGP)
    return SharedKey(
        read_KGP=directions_KGP,
        write_KGP=directions_KGP,
        rest_XGP=torch.cat(rest),
        pairs_K=torch.arange(num_slots) * stride,
    )


def key_moment(layer: AttentionLayer, statistics: LayerStatistics, pairs_F: Tensor) -> Tensor:
    """E[k k^H] of complex key channels (KV head, pair), complex128 [G * F, G * F]."""
    key_GPD = layer.pairs.as_complex(layer.key_GWD.double(), dim=1)
    key_nD = key_GPD[:, pairs_F].flatten(0, 1)
    moment_DD = statistics.moment().to(key_nD.dtype)
    moment_nn = key_nD @ moment_DD @ key_nD.mH
    if layer.key_bias_GW is not None:
        bias_n = layer.pairs.as_complex(layer.key_bias_GW.double())[:, pairs_F].flatten()
        mean_n = key_nD @ statistics.mean_D.to(key_nD.dtype)
        crossed_nn = torch.outer(mean_n, bias_n.conj())
        moment_nn = moment_nn + crossed_nn + crossed_nn.mH + torch.outer(bias_n, bias_n.conj())
    return moment_nn


def _no_slots(layer: AttentionLayer, num_slots: int) -> Tensor:
    shape = (num_slots, layer.num_groups, layer.pairs.count)
    return torch.zeros(shape, dtype=torch.complex128)


def _check_slots(num_slots: int, *, stride: int, fold: int, num_pairs: int) -> None:
    if num_slots < 0 or num_slots * stride > num_pairs:
        raise ValueError(
            f"--rope-pairs {num_slots} with --rope-stride {stride}: the shared key would cover "
            f"{num_slots * stride} of the {num_pairs} rotary pairs of a head. Use "
            f"--rope-pairs 0 to {num_pairs // stride}."
        )
    if fold % stride or num_slots % (fold // stride):
        raise ValueError(
            f"--rope-fold {fold} with --rope-stride {stride} and --rope-pairs {num_slots}: a fold "
            "is a multiple of the stride, and its slots divide the pairs."
        )
