"""Packed attention: equal to a plain masked softmax, and the same bits wherever a segment lies."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from megatron_ext.packing.attention import dense_attention, packed_attention
from tests.references import masked_softmax_attention

LENGTHS = [5, 1, 64, 3, 33, 5]


def borders(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def inputs(length, *, heads=4, kv_heads=2, width=16, value_width=16, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width)]
    return [torch.randn(length, *s, dtype=dtype, generator=generator) for s in shapes]


def with_gradients(function, tensors):
    """Output and the gradients of a fixed projection of it."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    out.backward(grad)
    return out.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("value_width", [16, 8, 24])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_equals_the_masked_softmax(heads, kv_heads, value_width, scale):
    tensors = inputs(sum(LENGTHS), heads=heads, kv_heads=kv_heads, value_width=value_width)
    got = with_gradients(
        lambda q, k, v: packed_attention(q, k, v, cu_seqlens=borders(LENGTHS), softmax_scale=scale),
        tensors,
    )
    want = with_gradients(
        lambda q, k, v: masked_softmax_attention(q, k, v, lengths=LENGTHS, scale=scale or 0.25),
        tensors,
    )
    for mine, plain in zip(got, want, strict=True):
        assert_close(mine, plain, rtol=1e-10, atol=1e-12)  # float64; the sums are ordered otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"), [(4, 2, 16, 16), (3, 1, 15, 15), (2, 2, 24, 16)]
)
def test_a_segment_is_the_same_bits_alone_and_at_any_place(
    dtype, heads, kv_heads, width, value_width
):
    """Outputs and gradients of one segment, alone and after every rotation of its neighbours."""
    sizes = dict(heads=heads, kv_heads=kv_heads, width=width, value_width=value_width, dtype=dtype)
    segments = [inputs(n, seed=s, **sizes) for s, n in enumerate(LENGTHS)]
    grads = [inputs(n, seed=90 + s, **sizes)[0].repeat(1, 1, 2) for s, n in enumerate(LENGTHS)]

    def run(order):
        leaves = [
            torch.cat([segments[s][part] for s in order]).requires_grad_() for part in range(3)
        ]
        lengths = [LENGTHS[s] for s in order]
        out = packed_attention(*leaves, cu_seqlens=borders(lengths))
        out.backward(torch.cat([grads[s] for s in order])[..., :value_width])
        results = [out.detach(), *(leaf.grad for leaf in leaves)]
        return {
            s: parts for s, *parts in zip(order, *(r.split(lengths) for r in results), strict=True)
        }

    orders = [
        list(range(len(LENGTHS)))[shift:] + list(range(shift)) for shift in range(len(LENGTHS))
    ]
    alone = {s: run([s])[s] for s in range(len(LENGTHS))}
    for order in orders:
        for s, parts in run(order).items():
            assert all(torch.equal(x, y) for x, y in zip(parts, alone[s], strict=True))


def test_case_d9_changing_a_neighbour_changes_no_bit():
    tensors = inputs(9, dtype=torch.float32)
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[1] += 1
    first, second = (packed_attention(*xs, cu_seqlens=[0, 5, 9]) for xs in (tensors, changed))
    assert torch.equal(first[5:], second[5:])
    assert not torch.equal(first[:5], second[:5])


def test_time_and_memory_grow_with_the_segments_not_with_the_row():
    """No tensor of row x row, forward or backward: the largest saved one is the operands' size."""
    lengths = [16] * 64
    tensors = [x.requires_grad_() for x in inputs(sum(lengths), dtype=torch.float32)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        packed_attention(*tensors, cu_seqlens=borders(lengths)).sum().backward()
    assert max(saved) <= tensors[0].numel() < sum(lengths) ** 2


def test_dense_rows_are_packed_rows_of_equal_segments():
    q, k, v = (x.unflatten(0, (3, 8)) for x in inputs(24))
    got = dense_attention(q, k, v)
    assert got.shape == (3, 8, 4, 16)
    for b in range(3):
        alone = packed_attention(q[b], k[b], v[b], cu_seqlens=[0, 8])
        assert torch.equal(got[b], alone)


def test_empty_segments_and_empty_rows():
    tensors = inputs(5)
    plain = packed_attention(*tensors, cu_seqlens=[0, 3, 5])
    assert torch.equal(packed_attention(*tensors, cu_seqlens=[0, 3, 3, 5, 5]), plain)
    assert packed_attention(*inputs(0, value_width=8), cu_seqlens=[0]).shape == (0, 4, 8)
    assert dense_attention(*(x[None] for x in inputs(0))).shape == (1, 0, 4, 16)


def test_dropout_stays_inside_its_segment():
    tensors = inputs(6)
    torch.manual_seed(0)
    dropped = packed_attention(*tensors, cu_seqlens=[0, 1, 6], dropout=0.5)
    torch.manual_seed(0)
    again = packed_attention(*tensors, cu_seqlens=[0, 1, 6], dropout=0.5)
    plain = packed_attention(*tensors, cu_seqlens=[0, 1, 6])
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, plain)
    first = [
        torch.allclose(row, 2 * v) or not row.any()
        for row, v in zip(dropped[0], tensors[2][0].repeat_interleave(2, dim=0), strict=True)
    ]  # a segment of one: its value doubled, or dropped
    assert all(first)


@pytest.mark.parametrize("cu_seqlens", [[0, 4], [1, 5], [0, 4, 3, 5], []])
def test_borders_that_do_not_fit_are_refused(cu_seqlens):
    with pytest.raises(ValueError, match="must rise from 0 to 5"):
        packed_attention(*inputs(5), cu_seqlens=cu_seqlens)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="H a multiple of G"):
        packed_attention(*inputs(5, heads=3, kv_heads=2), cu_seqlens=[0, 5])
