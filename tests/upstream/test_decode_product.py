"""A packed weight's product is the plain one, whether it was packed yet or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.upstream.decode_product import LEAST_NUMBERS, PackedProducts, plain_product

ROUNDING = 5e-4  # fp32, values of up to 100, summed in another order


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_the_plain_ones(has_bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(LEAST_NUMBERS // 512, 512, generator=generator)
    bias = torch.randn(len(weight), generator=generator) if has_bias else None
    product = PackedProducts()(weight, bias)
    with torch.no_grad():
        for rows in [8] * 20 + [1, 2, 32, 64, 65]:
            x = torch.randn(rows, 512, generator=generator)
            torch.testing.assert_close(product(x), F.linear(x, weight, bias), rtol=0, atol=ROUNDING)
    assert product._packed is not None


def test_copies_take_limited_memory():
    weights = [torch.ones(LEAST_NUMBERS // 512, 512) for _ in range(3)]
    products = PackedProducts(most_bytes=2 * weights[0].nbytes)
    made = [products(weight) for weight in weights]
    with torch.no_grad():
        for product in made:
            for _ in range(20):
                assert torch.equal(product(torch.ones(2, 512)), torch.full((2, 2048), 512.0))
    assert [product._packed is not None for product in made] == [True, True, False]


@pytest.mark.parametrize(
    "weight", [torch.ones(4, 4), torch.ones(2048, 512, dtype=torch.bfloat16)], ids=["small", "bf16"]
)
def test_other_weights_are_multiplied_as_they_are(weight):
    assert type(PackedProducts()(weight)) is type(plain_product(weight))
