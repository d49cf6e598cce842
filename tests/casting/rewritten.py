"""Functions as a rewriting of their programs leaves them, what these hold, and what they learn."""

import functools

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

from jmp_kit import autocast
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.programs import every_equation
from tests.casting.test_zoo import distance


def rewritten(fun, rewriting):
    """The function, its program rewritten: a list of results."""

    def function(*args):
        closed = jax.make_jaxpr(fun)(*args)
        jaxpr = rewriting(inlined(closed.jaxpr))
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*args)

    return function


def holds(primitive, fun, *args):
    """Whether there is such an equation in the function's program, however deep."""
    eqns = every_equation(jax.make_jaxpr(fun)(*args).jaxpr)
    return any(eqn.primitive.name == primitive for eqn, _ in eqns)


def gradient_error(loss_fn, *args):
    """How far gradients in half are from those in float32, of the parameters that are farthest."""
    ways = autocast(jax.grad(loss_fn), "mixed_bfloat16"), jax.grad(loss_fn)
    return farthest(*(jax.jit(way)(*args) for way in ways))


def farthest(found, wanted):
    """The relative distance of the arrays of two trees that are farthest apart; NaN if any is."""
    pairs = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    return np.max([distance(a, b) for a, b in pairs])


def assert_devices_learn_the_same(loss_fn, params, x):
    """Eight that share a batch, as one alone."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    def mapped(params, x):
        return jax.tree.map(lambda g: g / 8, jax.grad(loss_fn)(params, x))  # summed up

    found = jax.jit(autocast(mapped, "mixed_bfloat16"))(params, x)
    alone = jax.jit(autocast(jax.grad(loss_fn), "mixed_bfloat16"))(params, x)
    for a, b in zip(*map(jax.tree.leaves, (found, alone)), strict=True):
        assert np.linalg.norm(a - b) <= 0.01 * np.linalg.norm(b)
