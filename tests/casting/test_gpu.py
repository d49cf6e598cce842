"""What only a GPU's compiler can show, and gradients as its kernels compute them."""

# ruff: noqa: F401

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpt
from benchmarks.compiled import product_dtypes
from jmp_kit import autocast
from tests.casting.by_hand import MODELS
from tests.casting.reading.test_extrema import (
    test_gradients_are_no_farther_from_float32_than_by_hand,
)
from tests.casting.reading.test_places import (
    test_gradients_are_those_of_float32_sums_and_scattered_in_half,
)
from tests.casting.test_random_steps import test_gradients_of_random_networks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("standard_promotion")]

SHORT = {jnp.bfloat16: "bf16", jnp.float16: "f16"}


@pytest.mark.parametrize("dtype", SHORT, ids=lambda d: d.dtype.name)
@pytest.mark.parametrize(
    ("name", "limit"), [("transformer", 0.75), ("resnet_group", 0.95), ("resnet_batch", 0.95)]
)
def test_every_compiled_product_is_half_and_memory_is_saved(name, limit, dtype):
    model = MODELS[name]
    example = model.draw(0)
    ours, hand = (
        jax.jit(jax.value_and_grad(f)).lower(*example).compile()
        for f in (autocast(model.loss(), dtype), model.loss(dtype))
    )
    products = product_dtypes(ours)
    assert set(products) == {SHORT[dtype]}
    bytes_of = [p.memory_analysis().temp_size_in_bytes for p in (ours, hand)]
    assert bytes_of[0] <= limit * bytes_of[1]


def test_fused_attention_runs_as_often_as_by_hand():
    """Once forward and once backward for each of two layers: not again to recompute."""
    task = gpt.task(gpt.TINY["gpt 124M"])
    tokens = jnp.zeros((2, 16), jnp.int32)

    def kernels(loss_fn):
        step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
        text = step.lower(*task.variables, tokens, tokens).compile().as_text()
        return text.count('custom_call_target="__cudnn$fmha')

    ours = kernels(autocast(task.loss(half=jnp.bfloat16), jnp.bfloat16))
    assert ours == kernels(task.loss(jnp.bfloat16)) == 4
