"""A policy for Flax linen modules. The modules stay as they are.

model = jmp_kit.linen.apply_policy(Network(), "mixed_bfloat16", rules={"head": "float32"})
variables = model.init(key, x)      # parameters in param_dtype, statistics in float32
y = model.apply(variables, x)       # computed under autocast, in output_dtype
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import lift
from flax.linen.transforms import lift_transform
from jax.typing import DTypeLike

from jmp_kit._alike import alike, become, plain, public_methods
from jmp_kit._policy import Policy, as_policy
from jmp_kit._tree import at_least_float32, cast_like
from jmp_kit.casting import autocast, autocast_method
from jmp_kit.programs import Paths, eval_shape, product_paths

__all__ = ["apply_policy", "paths"]

Module = TypeVar("Module", bound=nn.Module | type[nn.Module])
Rules = tuple[tuple[str, Any], ...]


def apply_policy(
    module: Module,
    policy: Policy | str | DTypeLike,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
) -> Module:
    """The same linen module, with parameters, compute and outputs in the dtypes of a policy.

        init:  cast_to_param(module.init(...))
        apply: cast_to_output(autocast(module.apply, policy, rules)(...))

    The module need not say anything about dtypes. The result is a linen module too. Its class has
    the name of the module's class, and inherits from it. Call it, bind, clone and tabulate it, give
    it to `nn.scan` and `nn.Sequential`, and make it a part of another module, which may have
    another policy. Paths of parameters and of products are the module's own, so checkpoints fit.
    Parameters have the `param_dtype` of the outermost policy. Statistics and other collections keep
    their dtypes.

    Args:
      module: a linen module, or a class of modules, as for `nn.scan` and `nn.remat`.
      policy: a `Policy`, its description, or a dtype. The name of a dtype stands for parameters and
        outputs too: "bfloat16" is not "mixed_bfloat16" here.
      rules: other compute dtypes for some products, as in `autocast`: regular expressions over
        module paths ("decoder/lm_head"), of which the first match wins.

    Returns:
      A module, or a class. A module that is no part of another one is not changed itself.

    Raises:
      TypeError: if `module` is neither a module nor a class of modules.
      ValueError: if `policy` or `rules` cannot be read; when applied, if a rule matches nothing.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jmp_kit import linen
      >>> model = linen.apply_policy(nn.Dense(4), "p=f32,c=bf16,o=bf16")
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 3)))
      >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((2, 3))).dtype
      (dtype('float32'), dtype(bfloat16))

    Source: https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/module.html
    """
    autocast(lambda: None, policy, rules=rules)  # which reads both, and says what is wrong
    settings = as_policy(policy), tuple((rules or {}).items())
    if inspect.isclass(module) and issubclass(module, nn.Module):
        under: Any = _under_policy(plain(module), *settings)
        return under
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"apply_policy takes a Flax linen module, but got {module!r}. Write "
            'apply_policy(Network(), "mixed_bfloat16"); for nnx models there is '
            "jmp_kit.nnx.apply_policy, and for functions jmp_kit.autocast."
        )
    # Of what belongs to another module there must not be two.
    found = module if module.parent or module.scope else module.clone()
    become(found, _under_policy(plain(type(module)), *settings))
    return found


@functools.cache
def _under_policy(kind: type[nn.Module], policy: Policy, rules: Rules) -> type[nn.Module]:
    """A module's class, its methods under a policy."""
    transform = functools.partial(_transformed, policy=policy, rules=dict(rules))
    made = lift_transform(functools.wraps(_transformed)(transform), kind, methods=_methods(kind))
    for name in ("apply", "init", "init_with_output", "lazy_init"):
        setattr(made, name, _with_methods_of(kind, getattr(kind, name)))
    return alike(made, kind, _under_policy, policy, rules)


def _with_methods_of(kind: type[nn.Module], call: Callable[..., Any]) -> Callable[..., Any]:
    """`module.apply(…, method=Network.encode)` means the method of the class under the policy."""

    @functools.wraps(call)
    def with_methods(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        name = getattr(method, "__name__", "")
        is_own = method is not None and getattr(kind, name, None) is method
        return call(self, *args, method=name if is_own else method, **kwargs)

    return with_methods


def _methods(kind: type[nn.Module]) -> list[str]:
    return [
        name
        for name, value in public_methods(kind, nn.Module).items()
        if inspect.isfunction(value) and not getattr(value, "nowrap", False)
    ]


def _transformed(
    fun: Callable[..., Any], policy: Policy, rules: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function of scopes, as Flax lifts it through JAX's transformations."""
    internal = policy.with_output_dtype(jnp.float32)

    def run(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        is_first = any(scope.get_flag("initializing", False) for scope in jax.tree.leaves(scopes))

        def inner(
            scopes_of: Any, repacked: Any, groups: Any, rngs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            [of_scopes] = groups
            is_one = len(of_scopes) == 1

            def apply(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                wide = [_computed(v) for v in ([variables] if is_one else variables)]
                scopes = scopes_of((wide,), rngs)
                return fun(scopes, *args, **kwargs), repacked(scopes)

            # What parameters begin with is made in float32.
            applied = apply if is_first else autocast_method(apply, internal, rules)
            variables = of_scopes[0] if is_one else of_scopes  # as their paths are to begin
            outputs, changed = applied(variables, rngs, *args, **kwargs)
            return policy.cast_to_output(outputs), _stored(changed, groups, policy)

        lifted = lift.pack(inner, (True,), (True,), (True,), name="jmp_kit", enable_kwargs=True)
        return lifted(scopes, *args, **kwargs)

    return run


def _computed(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """By collection; between products the module computes in float32, however it is stored."""
    params = {k: jax.tree.map(at_least_float32, v) for k, v in variables.items() if k == "params"}
    return {**variables, **params}


def _stored(changed: Any, before: Any, policy: Policy) -> Any:
    """Variables, by group, scope and collection, in the dtypes they are stored in."""
    had = dict(jax.tree_util.tree_leaves_with_path(before))

    def stored(path: Any, x: Any) -> Any:
        _, _, collection, *_ = path
        if collection.key == "params":
            return policy.cast_to_param(x)
        return cast_like(x, had[path]) if path in had else x

    return jax.tree_util.tree_map_with_path(stored, changed)


def paths(module: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Paths:
    """The paths of each product, with which `rules` are compared. Print it for a table.

    Args:
      module: a linen module, under a policy or not.
      rngs, args, kwargs: as for the module's `init`. Arrays may be abstract: nothing is computed.

    Returns:
      A tuple of strings for each product: its name scopes, which are module paths, and the paths
      of the arguments and parameters that feed it.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jmp_kit import linen
      >>> network = nn.Sequential([nn.Dense(8), nn.Dense(4)])
      >>> print(linen.paths(network, jax.random.key(0), jnp.ones((2, 3))))
      product  paths
            1  Sequential/layers_0  args/0  variables/params/layers_0/kernel
            2  Sequential/layers_1  variables/params/layers_1/kernel
    """
    module = module.clone()
    become(module, plain(type(module)))

    def run(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return module.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)

    variables = eval_shape(module.init, rngs, *args, **kwargs)
    return product_paths(run, variables, *args, **kwargs)
