"""A policy for Flax nnx models, which stay as they are.

model = jmp_kit.nnx.apply_policy(Network(rngs=nnx.Rngs(0)), "mixed_float16", {"head": "float32"})
transform = jmp_kit.mixed_precision(optax.adamw(3e-4), jmp_kit.DynamicLossScale())
optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

@nnx.jit
def train_step(model, optimizer, x, y):
    loss_scale = jmp_kit.loss_scale_of(optimizer.opt_state)
    loss, grads = jmp_kit.nnx.value_and_grad(loss_fn, loss_scale)(model, x, y)
    optimizer.update(model, grads)
    return loss
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_kit import optim
from jmp_kit._grad import value_and_grad_by
from jmp_kit._loss_scale import LossScale
from jmp_kit._policy import Policy, as_policy
from jmp_kit._tree import all_finite, select_tree
from jmp_kit.casting import arrays_of, autocast_method, changed, set_arrays
from jmp_kit.casting import autocast as autocast_arrays
from jmp_kit.programs import Paths, product_paths

Rules = Mapping[str, Policy | str | DTypeLike]


def autocast(
    fun: Any, policy: Policy | str | DTypeLike | None = None, *, rules: Rules | None = None
) -> Callable[..., Any]:
    """`jmp_kit.autocast`, of a function of nnx models: what it changes in them is kept.

    Variables are read in float32, whatever dtype they are stored in, so that everything between
    products is float32; those that the function sets (statistics, random counts) get their new
    values in the dtypes they had.

    Args:
      fun, policy, rules: as for `jmp_kit.autocast`; also a decorator, `@autocast("half")`.

    Returns:
      A function of the same arguments, models and arrays, that returns arrays.

    Raises:
      as `jmp_kit.autocast`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> @jmp_kit.nnx.autocast("mixed_bfloat16")
      ... def loss_fn(model, x):
      ...     return (model(x) ** 2).mean()
      >>> loss_fn(model, jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    return autocast_arrays(fun, policy, rules=rules)


class PolicyModule(nnx.Module):
    """An nnx model under a policy, as `apply_policy` makes it.

    Called as the model is. Other methods of the model can be called on it too and are under the
    policy as well; its other attributes are the model's. An nnx module itself, it can be split,
    trained by an `nnx.Optimizer` and saved.

    Example:
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> model = jmp_kit.nnx.apply_policy(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
      >>> model.kernel.shape, model.eval() is None
      ((3, 4), True)
    """

    def __init__(self, model: nnx.Module, policy: Policy, rules: Rules) -> None:
        self.model = model
        self._settings = _Settings(policy, tuple(rules.items()))

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("model", "_settings") or name.startswith("_pytree__")
        super().__setattr__(name, value) if own else setattr(self.model, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, computed under autocast, in `output_dtype`."""
        return self._under_policy("__call__")(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "model" not in vars(self):
            raise AttributeError(name)
        value = getattr(self.model, name)
        # A jitted method is a method no more, but can be called, and its class has it.
        is_method = callable(value) and hasattr(type(self.model), name)
        return self._under_policy(name) if is_method else value

    def _under_policy(self, method: str) -> Callable[..., Any]:
        settings = self._settings

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(model, method)(*args, **kwargs)

        internal = settings.policy.with_output_dtype(jnp.float32)
        cast = autocast_method(call, internal, dict(settings.rules))
        return lambda *args, **kwargs: settings.policy.cast_to_output(
            cast(self.model, *args, **kwargs)
        )


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Kept apart from the model's state, for it has none of its own."""

    policy: Policy
    rules: tuple[tuple[str, Any], ...]


def apply_policy(
    model: nnx.Module, policy: Policy | str | DTypeLike, rules: Rules | None = None
) -> PolicyModule:
    """An nnx model whose parameters, compute and outputs have the dtypes of a policy.

        model's nnx.Param:  cast_to_param, in place
        calls:              cast_to_output(autocast(model, policy, rules)(...))

    The model need not say anything about dtypes. It is not copied: its parameters are cast where
    they are, its statistics stay float32, and its random state is not touched.

    Args:
      model: an nnx model.
      policy: what `autocast` takes.
      rules: what products compute in, by path, as in `autocast`: regular expressions over the
        paths of parameters ("decoder/lm_head/kernel"), the first match wins.

    Returns:
      A module to be called as the model is.

    Raises:
      TypeError: if `model` is no nnx module.
      ValueError: if `policy` or `rules` cannot be read, or the model is under one already; when
        called, if a rule matches nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jmp_kit.nnx
      >>> model = jmp_kit.nnx.apply_policy(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), "half")
      >>> model.model.kernel.dtype == model(jnp.ones((2, 3))).dtype == jmp_kit.half_dtype()
      True

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/module.html
    """
    if isinstance(model, PolicyModule):
        raise ValueError(
            f"The model is under the policy {model._settings.policy} already: write "
            "apply_policy(model.model, policy) for another one."
        )
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"apply_policy takes an nnx model, but got {model!r}. Write apply_policy(Network("
            'rngs=nnx.Rngs(0)), "mixed_bfloat16"); for linen modules there is '
            "jmp_kit.linen.apply_policy, and for functions jmp_kit.autocast."
        )
    autocast_arrays(lambda: None, policy, rules=rules)  # which reads both, and says what is wrong
    policy = as_policy(policy)
    nnx.update(model, policy.cast_to_param(nnx.state(model, nnx.Param)))
    return PolicyModule(model, policy, rules or {})


def paths(model: nnx.Module, *args: Any, **kwargs: Any) -> Paths:
    """What `rules` are compared with. Print it for a table.

    Args:
      model: an nnx model, under a policy or not.
      args, kwargs: as the model is called; arrays may be abstract. Nothing is computed.

    Returns:
      A tuple of strings for each product: the paths of the arguments and parameters that feed it,
      and name scopes. Without `args` and `kwargs` the path of each parameter, whether it feeds a
      product or not.

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
    plain = model.model if isinstance(model, PolicyModule) else model
    if not args and not kwargs:
        params = nnx.to_flat_state(nnx.state(plain, nnx.Param))
        return Paths("parameter", [["/".join(map(str, path))] for path, _ in params])
    graphdef, state = nnx.split(plain)

    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        return nnx.merge(graphdef, model)(*args, **kwargs)

    return product_paths(run, state, *args, **kwargs)


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    keep_skipped_state: bool = False,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` with the backward pass scaled, and no trace of steps that overflow.

        value = fun(model, x)        grads = grad(loss_scale * fun)(model, x) / loss_scale
        if not all_finite(grads): statistics and random counts of the model stay as they were

    Args:
      fun, loss_scale, has_aux: as for `jmp_kit.value_and_grad`.
      argnums: which positional arguments to differentiate by, or `nnx.DiffState`s.
      keep_skipped_state: whether to keep what `fun` set in the model even though a gradient is not
        finite, and the optimizer will skip the step.

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
    def value_and_unscaled_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        nodes = args, kwargs
        before = arrays_of(nnx.state(nodes, nnx.Variable))
        value, grads = by_nnx(*args, **kwargs)
        if not keep_skipped_state:
            finite = all_finite(grads)
            after = changed(before, nodes)
            kept = {p: select_tree(finite, new, before[p]) for p, new in after.items()}
            set_arrays(nodes, kept)
        return value, grads

    return value_and_unscaled_grad


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
      >>> jmp_kit.nnx.master_params(optimizer, model)["model"]["kernel"].dtype
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
