"""A policy for Flax nnx models. The models stay as they are.

model = jmp_kit.nnx.apply_policy(Network(rngs=nnx.Rngs(0)), "mixed_float16", {"head": "float32"})

`value_and_grad` scales the loss, and an `nnx.Optimizer` of `jmp_kit.mixed_precision` does the rest.
`examples/minimal_nnx.py` is a whole training.
"""

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_kit import optim
from jmp_kit._alike import alike, become, plain, public_methods
from jmp_kit._grad import value_and_grad_by, without_value
from jmp_kit._loss_scale import LossScale
from jmp_kit._policy import Policy, as_policy
from jmp_kit._tree import all_finite, select_tree
from jmp_kit.casting import autocast, autocast_method
from jmp_kit.programs import Paths, product_paths

__all__ = ["apply_policy", "autocast", "grad", "master_params", "paths", "value_and_grad"]

P = ParamSpec("P")
R = TypeVar("R")
Model = TypeVar("Model", bound=nnx.Module)
Rules = Mapping[str, Policy | str | DTypeLike]


def apply_policy(
    model: Model, policy: Policy | str | DTypeLike, rules: Rules | None = None
) -> Model:
    """The same nnx model, with parameters, compute and outputs in the dtypes of a policy.

        model's nnx.Param:  cast_to_param
        public methods:     cast_to_output(autocast(method, policy, rules)(...))

    The model need not say anything about dtypes. It stays what it was: an instance of its class,
    with its attributes, its methods and its state. Split, view, train, pickle and save it as
    before. Its statistics stay float32, and its random state is not touched.

    A part of the model may have a policy of its own, and keeps it. The other parts run under the
    policy of the model while one of its methods runs, and as they were if they are called by
    themselves. A second policy takes the place of the first.

    Args:
      model: an nnx model. It is changed in place.
      policy: a `Policy`, its description, or a dtype. The name of a dtype stands for parameters and
        outputs too: "bfloat16" is not "mixed_bfloat16" here.
      rules: other compute dtypes for some products, as in `autocast`: regular expressions over the
        paths of parameters ("decoder/lm_head/kernel"), of which the first match wins.

    Returns:
      The model.

    Raises:
      TypeError: if `model` is no nnx module.
      ValueError: if `policy` or `rules` cannot be read; when called, if a rule matches nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> model = jmp_kit.nnx.apply_policy(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), "half")
      >>> model.kernel.dtype == model(jnp.ones((2, 3))).dtype == jmp_kit.half_dtype()
      True
      >>> isinstance(model, nnx.Linear), model.in_features
      (True, 3)

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/module.html
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"apply_policy takes an nnx model, but got {model!r}. Write apply_policy(Network("
            'rngs=nnx.Rngs(0)), "mixed_bfloat16"); for linen modules there is '
            "jmp_kit.linen.apply_policy, and for functions jmp_kit.autocast."
        )
    autocast(lambda: None, policy, rules=rules)  # which reads both, and says what is wrong
    policy = as_policy(policy)
    nnx.update(model, policy.cast_to_param(nnx.state(model, nnx.Param)))
    become(model, _under_policy(plain(type(model)), policy, tuple((rules or {}).items())))
    return model


@functools.cache  # for two models of one class and policy have one structure
def _under_policy(
    kind: type[nnx.Module], policy: Policy, rules: tuple[tuple[str, Any], ...]
) -> type[nnx.Module]:
    """The class of a model, its methods under a policy."""

    def body(namespace: dict[str, Any]) -> None:
        namespace.update({name: _method(kind, name, policy, rules) for name in _methods(kind)})

    made = types.new_class(kind.__name__, (kind,), exec_body=body)
    return alike(made, kind, _under_policy, policy, rules)


@contextlib.contextmanager
def _as_it_was(model: nnx.Module, kind: type[nnx.Module]) -> Iterator[None]:
    """While a method runs: what it calls of its model is under the policy already."""
    under = type(model)
    become(model, kind)
    try:
        yield
    finally:
        become(model, under)


def _methods(kind: type[nnx.Module]) -> list[str]:
    """What can be called on a model and is its own, by whatever decorator."""
    no_method = staticmethod, classmethod, property, type
    return [
        name
        for name, value in public_methods(kind, nnx.Module).items()
        if hasattr(value, "__get__")
        and not isinstance(value, no_method)
        and (callable(value) or isinstance(value, functools.partialmethod))
    ]


def _method(
    kind: type[nnx.Module], name: str, policy: Policy, rules: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        with _as_it_was(model, kind):
            return getattr(model, name)(*args, **kwargs)

    cast = autocast_method(call, policy.with_output_dtype(jnp.float32), dict(rules))

    @functools.wraps(inspect.getattr_static(kind, name), updated=())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return policy.cast_to_output(cast(self, *args, **kwargs))

    return method


def paths(model: nnx.Module, *args: Any, **kwargs: Any) -> Paths:
    """The paths with which `rules` are compared. Print it for a table.

    Args:
      model: an nnx model, under a policy or not.
      args, kwargs: as the model is called. Arrays may be abstract: nothing is computed.

    Returns:
      A tuple of strings for each product: the paths of the arguments and parameters that feed it,
      and its name scopes. Without `args` and `kwargs` it gives the path of each parameter, whether
      it feeds a product or not.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> print(jmp_kit.nnx.paths(model, jnp.ones((2, 3))))
      product  paths
            1  args/0  model/kernel/value
      >>> print(jmp_kit.nnx.paths(model))
      parameter  paths
              1  bias
              2  kernel
    """
    if not args and not kwargs:
        params = nnx.to_flat_state(nnx.state(model, nnx.Param))
        return Paths("parameter", [["/".join(map(str, path))] for path, _ in params])
    graphdef, state = nnx.split(model)

    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        merged: Any = nnx.merge(graphdef, model)
        with _as_it_was(merged, plain(type(merged))):
            return merged(*args, **kwargs)

    return product_paths(run, state, *args, **kwargs)


def value_and_grad(
    fun: Callable[P, R],
    loss_scale: LossScale,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    keep_skipped_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[P, tuple[R, Any]]:
    """`nnx.value_and_grad` with the backward pass scaled, and no trace of steps that overflow.

        value = fun(model, x)        grads = grad(loss_scale * fun)(model, x) / loss_scale
        if not all_finite(grads): statistics and random counts of the model stay as they were

    Args:
      fun, loss_scale, has_aux: as for `jmp_kit.value_and_grad`.
      argnums: which positional arguments to differentiate by, or `nnx.DiffState`s.
      keep_skipped_state: whether to keep what `fun` set in the model where a gradient is not
        finite, so that the optimizer skips the step.
      axis_name: under `shard_map` and `pmap`, the axes along which devices hold different
        gradients. Either all devices keep what `fun` set, or none does.

    Returns:
      A function of `fun`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`,
      with true float32 gradients, as `nnx.Optimizer.update` takes them.

    Raises:
      TypeError: as `jmp_kit.value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     return jnp.sum(model(x) * x)
      >>> step = jmp_kit.nnx.value_and_grad(loss_fn, jmp_kit.StaticLossScale(2.0**10))
      >>> loss, grads = step(model, jnp.array([[1.0], [jnp.inf]]))
      >>> float(model.mean[0])
      0.0
      >>> loss, grads = step(model, jnp.array([[1.0], [3.0]]))
      >>> f"{model.mean[0]:.2f}"
      '0.02'

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/transforms.html
    """

    def grad_of(scaled: Callable[..., Any]) -> Callable[..., Any]:
        return nnx.grad(scaled, argnums=argnums, has_aux=True)

    by_nnx = value_and_grad_by(grad_of, fun, loss_scale, has_aux)

    @functools.wraps(fun)
    def value_and_unscaled_grad(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Any]:
        nodes = args, kwargs
        before = dict(_leaves(nodes))
        value, grads = by_nnx(*args, **kwargs)
        if not keep_skipped_state:
            finite = all_finite(grads, axis_name)
            kept = [
                (path, jax.tree.unflatten(jax.tree.structure(v), select_tree(finite, new, old)))
                for path, v in nnx.to_flat_state(nnx.state(nodes, nnx.Variable))
                for new, old in [(jax.tree.leaves(v), before.get(path, []))]
                if len(new) == len(old) and any(map(operator.is_not, new, old))
            ]
            nnx.update(nodes, nnx.from_flat_state(kept))
        return value, grads

    return value_and_unscaled_grad


def _leaves(nodes: Any) -> Iterator[tuple[Any, list[Any]]]:
    """What variables hold, by their paths."""
    for path, variable in nnx.to_flat_state(nnx.state(nodes, nnx.Variable)):
        yield path, jax.tree.leaves(variable)


def grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    keep_skipped_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """`nnx.grad` with the backward pass scaled: `value_and_grad` without the value.

    Args:
      fun, loss_scale, argnums, has_aux, keep_skipped_state, axis_name: as for `value_and_grad`.

    Returns:
      A function of `fun`'s arguments that returns `grads`, or `(grads, aux)`.

    Raises:
      TypeError: as `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
      >>> def loss_fn(model):
      ...     return jnp.sum(model.bias**2 + 3 * model.bias)
      >>> jmp_kit.nnx.grad(loss_fn, jmp_kit.StaticLossScale(2.0**10))(model)["bias"][...]
      Array([3.], dtype=float32)
    """
    with_value = value_and_grad(
        fun,
        loss_scale,
        argnums,
        has_aux,
        keep_skipped_state=keep_skipped_state,
        axis_name=axis_name,
    )
    return without_value(with_value, has_aux)


def master_params(optimizer: nnx.Optimizer[Any], model: nnx.Module) -> Any:
    """`jmp_kit.master_params` of an nnx model and its optimizer: float32 weights, to export.

    Args:
      optimizer: an `nnx.Optimizer` whose transformation is, or holds, a `mixed_precision`.
      model: the model that it trains.

    Returns:
      A state of `nnx.Param`s, for `nnx.update(model, …)`.

    Raises:
      ValueError: as `jmp_kit.master_params`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> policy = jmp_kit.get_policy("p=bf16,c=bf16,o=f32")
      >>> model = jmp_kit.nnx.apply_policy(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), policy)
      >>> transform = jmp_kit.mixed_precision(optax.sgd(1e-3), master="remainder")
      >>> optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
      >>> jmp_kit.nnx.master_params(optimizer, model)["kernel"].dtype
      dtype('float32')
    """

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    def arrays(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable
        )

    params = nnx.state(model, optimizer.wrt)
    full = optim.master_params(arrays(optimizer.opt_state), arrays(params))
    return jax.tree.map(lambda p, x: p.replace(x), params, full, is_leaf=is_variable)
