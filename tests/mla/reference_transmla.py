"""TransMLA (arXiv 2502.07864) as its authors' code computes it, written out for a stack of layers.

From fxmeng/TransMLA at 9c0d254: principal directions of keys across KV heads and neighbouring
pairs, taken from the original model; then those of balanced keys and values, taken from the model
in which every layer has partial rotation.  Keys and values themselves are projected here, their
weights are not.  Nothing here imports the code it checks.
For layers without biases whose pairs are in halves.

Legend: T tokens, G KV heads, P pairs of a head, X directions of a layer (G * P), S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext.weights.architecture import Architecture
from tests.mla.reference import causal_head

Tensors = Mapping[str, Tensor]
Run = Callable[[Sequence[Callable[[Tensor], Tensor]]], list[Tensor]]
"""Layers' attention -> inputs [S, T, D] of each layer."""
DAMPING = 0.01


class Attention:
    """One layer with partial rotation; `project` gives it a latent too."""

    def __init__(
        self,
        tensors: Tensors,
        shape: Architecture,
        frequencies_P: Tensor,
        *,
        fold: int,
        stride: int,
    ) -> None:
        self.tensors, self.shape = tensors, shape
        self.frequencies_P = frequencies_P
        self.fold, self.stride = fold, stride
        self.basis_XGP = torch.zeros(0)
        self.turns_X = torch.zeros(0)
        self.projection = torch.zeros(0)
        self.ratio = 1.0

    def rotate(self, inputs_STD: Tensor) -> None:
        """Principal directions of the keys of every fold of pairs, the largest first."""
        keys_TGP = self._pairs(inputs_STD.flatten(0, 1) @ self.tensors["k_proj.weight"].T)
        groups, count = keys_TGP.shape[1:]
        slots, plain = [], []
        for first in range(0, count, self.fold):
            found = keys_TGP[:, :, first : first + self.fold].flatten(1)
            both = torch.cat((found.real, found.imag))
            vectors = principal(both)
            for place in range(vectors.shape[1]):
                direction_GP = torch.zeros(groups, count, dtype=torch.float64)
                direction_GP[:, first : first + self.fold] = vectors[:, place].view(groups, -1)
                if place < self.fold // self.stride:
                    frequency = float(self.frequencies_P[first + place * self.stride])
                    slots.append((direction_GP, frequency))
                else:
                    plain.append((direction_GP, 0.0))
        self.num_slots = len(slots)
        self.basis_XGP = torch.stack([direction for direction, _ in slots + plain])
        self.turns_X = torch.tensor([turn for _, turn in slots + plain], dtype=torch.float64)

    def project(self, inputs_STD: Tensor, *, rank: int) -> None:
        """Balanced principal components of plain keys and values for these inputs."""
        x_TD = inputs_STD.flatten(0, 1)
        plain, values = self._plain(self._keys(x_TD)), self._values(x_TD)
        self.ratio = float(plain.norm(dim=0).mean() / values.norm(dim=0).mean())
        vectors = principal(torch.cat((plain / self.ratio, values), dim=1))[:, :rank]
        self.projection = vectors @ vectors.T

    def __call__(self, x_TD: Tensor) -> Tensor:
        shape, groups = self.shape, self.shape.num_groups
        keys_TX, values = self._keys(x_TD), self._values(x_TD)
        if self.projection.numel():
            plain = self._plain(keys_TX)
            both = torch.cat((plain / self.ratio, values), dim=1) @ self.projection
            real, imaginary = (both[:, : plain.shape[1]] * self.ratio).chunk(2, dim=1)
            keys_TX[:, self.num_slots :] = torch.complex(real, imaginary)
            values = both[:, plain.shape[1] :]
        turn_TX = torch.exp(1j * torch.arange(len(x_TD))[:, None] * self.turns_X)
        queries_THP = self._pairs(x_TD @ self.tensors["q_proj.weight"].T)
        outputs = []
        for head in range(shape.num_heads):
            group = head // (shape.num_heads // groups)
            basis_XP = self.basis_XGP[:, group].to(queries_THP.dtype)
            queries_TX = queries_THP[:, head] @ basis_XP.T * turn_TX
            q, k = (torch.view_as_real(y).flatten(1) for y in (queries_TX, keys_TX * turn_TX))
            value_TV = values.view(len(x_TD), groups, -1)[:, group]
            outputs.append(causal_head(q, k, value_TV, scale=shape.head_size**-0.5))
        return torch.cat(outputs, dim=1) @ self.tensors["o_proj.weight"].T

    def _pairs(self, x_TY: Tensor) -> Tensor:
        real, imaginary = x_TY.view(len(x_TY), -1, self.shape.head_size).chunk(2, dim=-1)
        return torch.complex(real, imaginary)

    def _keys(self, x_TD: Tensor) -> Tensor:
        keys_TGP = self._pairs(x_TD @ self.tensors["k_proj.weight"].T)
        return torch.einsum("tgp,xgp->tx", keys_TGP, self.basis_XGP.to(keys_TGP.dtype))

    def _plain(self, keys_TX: Tensor) -> Tensor:
        rest = keys_TX[:, self.num_slots :]
        return torch.cat((rest.real, rest.imag), dim=1)

    def _values(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.tensors["v_proj.weight"].T


def principal(rows: Tensor) -> Tensor:
    """Eigenvectors of the damped Gram matrix, the largest first."""
    gram = rows.T @ rows
    gram = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    values, vectors = torch.linalg.eigh(gram)
    return vectors[:, values.argsort(descending=True)]


def transmla(
    layers: Sequence[Attention],
    *,
    rank: int,
    original: Sequence[Callable[[Tensor], Tensor]],
    run: Run,
) -> None:
    """Both passes over all layers."""
    for layer, inputs_STD in zip(layers, run(original), strict=True):
        layer.rotate(inputs_STD)
    for layer, inputs_STD in zip(layers, run(layers), strict=True):
        layer.project(inputs_STD, rank=rank)
