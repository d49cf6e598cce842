"""A program written for jmp 0.0.4 runs, and to the same end, with `import jmp_kit as jmp`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import jmp_kit
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")  # jmp counts on it


def test_every_public_name_of_jmp_is_here():
    assert set(jmp.__all__) <= set(dir(jmp_kit))


def train(jmp, policy_name, loss_scale_name):
    """The loop of jmp's own documentation."""
    policy = jmp.get_policy(policy_name)
    loss_scale = {
        "none": lambda: jmp.NoOpLossScale(),
        "static": lambda: jmp.StaticLossScale(2.0**15),
        "dynamic": lambda: jmp.DynamicLossScale(jnp.asarray(2.0**15)),
        "short": lambda: jmp.DynamicLossScale(
            jnp.asarray(2.0**15), jnp.asarray(1, jnp.int32), 3, 2, jnp.asarray(2.0)
        ),
    }[loss_scale_name]()
    w = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    params = policy.cast_to_param({"w": jnp.asarray(w), "b": jnp.zeros(3), "step": 0})
    x = jnp.asarray(np.linspace(-2, 2, 32, dtype=np.float32).reshape(8, 4))

    def loss_fn(arrays, params, loss_scale, x):
        params, x = policy.cast_to_compute((dict(params, **arrays), x))
        y = policy.cast_to_output(jnp.tanh(x @ params["w"]) + params["b"])
        loss = jnp.mean(y.astype(jnp.float32) ** 2)
        return loss_scale.scale(loss), loss

    @jax.jit
    def step(params, loss_scale, x):
        arrays = {k: v for k, v in params.items() if k != "step"}
        grads, loss = jax.grad(loss_fn, has_aux=True)(arrays, params, loss_scale, x)
        grads = loss_scale.unscale(policy.cast_to_param(grads))
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        new = jax.tree.map(lambda p, g: (p - 0.5 * g).astype(p.dtype), arrays, grads)
        arrays = jmp.select_tree(grads_finite, new, arrays)
        return dict(params, **arrays), loss_scale, loss

    losses, scales = [], []
    for i in range(8):
        params, loss_scale, loss = step(params, loss_scale, x * (jnp.inf if i == 5 else 1.0))
        losses.append(float(loss))
        scales.append(float(loss_scale.loss_scale))
    return params, losses, scales


@pytest.mark.parametrize("policy", ["p=f32,c=f16,o=f32", "params=float32,compute=bfloat16", "full"])
@pytest.mark.parametrize(
    "loss_scale", quick_or_slow(["none", "static", "dynamic", "short"], ["static", "short"])
)
def test_the_same_program_ends_the_same(policy, loss_scale):
    params, losses, scales = train(jmp, policy, loss_scale)
    ours, our_losses, our_scales = train(jmp_kit, policy, loss_scale)
    assert our_scales == scales
    np.testing.assert_array_equal(our_losses, losses)
    jax.tree.map(np.testing.assert_array_equal, ours, params)


def test_jmp_forgets_the_minimum_in_one_jit_and_we_do_not():
    """jmp#44, the bug that a program may count on being mended."""
    identity = jax.jit(lambda x: x)
    make = {"loss_scale": jnp.asarray(8.0), "min_loss_scale": jnp.asarray(4.0)}
    assert float(identity(jmp.DynamicLossScale(**make)).min_loss_scale) == 1.0
    assert float(identity(jmp_kit.DynamicLossScale(**make)).min_loss_scale) == 4.0


HAIKU = """
import sys, jmp_kit
sys.modules["jmp"] = jmp_kit
import haiku as hk, jax, jax.numpy as jnp

seen = []
class Dense(hk.Linear):
    def __call__(self, x):
        y = super().__call__(x)
        seen.append((x.dtype.name, y.dtype.name))
        return y

policy = jmp_kit.get_policy("params=float32,compute=bfloat16,output=float16")
hk.mixed_precision.set_policy(hk.nets.MLP, policy)
assert hk.mixed_precision.get_policy(hk.nets.MLP) is policy

def forward(x):
    assert hk.mixed_precision.current_policy() is None
    return hk.nets.MLP([8, 3], name="mlp")(x)

net = hk.without_apply_rng(hk.transform(forward))
x = jnp.ones((2, 4))
params = net.init(jax.random.key(0), x)
out = net.apply(params, x)
print({p.dtype.name for p in jax.tree.leaves(params)}, out.dtype.name)
print("bf16" in str(jax.make_jaxpr(net.apply)(params, x)))
with hk.mixed_precision.push_policy(hk.nets.MLP, jmp_kit.get_policy("float32")):
    print(net.apply(params, x).dtype.name)
"""


def test_haiku_s_mixed_precision_runs_with_jmp_kit_in_jmp_s_place():
    result = subprocess.run([sys.executable, "-c", HAIKU], capture_output=True, text=True)
    assert result.stdout.split("\n")[:3] == ["{'float32'} float16", "True", "float32"], (
        result.stdout + result.stderr
    )
