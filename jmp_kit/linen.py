"""A policy for Flax linen modules, which stay as they are.

model = jmp_kit.linen.apply_policy(Network(), "mixed_bfloat16", rules={"head": "float32"})
variables = model.init(key, x)      # parameters in param_dtype, statistics in float32
y = model.apply(variables, x)       # computed under autocast, in output_dtype
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_kit._policy import Policy, as_policy
from jmp_kit._tree import at_least_float32
from jmp_kit.casting import autocast, autocast_method
from jmp_kit.programs import Paths, eval_shape, product_paths


@dataclasses.dataclass(frozen=True)
class PolicyModule:
    """A linen module under a policy, as `apply_policy` makes it.

    Frozen, and hashable if the module is: it may be closed over or be a static argument of `jit`.

    Example:
      >>> import flax.linen as nn
      >>> from jmp_kit import linen
      >>> str(linen.apply_policy(nn.Dense(4), "mixed_bfloat16").policy)
      'p=f32,c=bf16,o=f32'
    """

    module: nn.Module
    policy: Policy
    rules: tuple[tuple[str, Any], ...] = ()

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's variables: parameters in `param_dtype`, other collections as they are."""
        return self._with_params_cast(self.module.init(rngs, *args, **kwargs))

    def apply(self, variables: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        """What the module's `apply` gives, computed under autocast, in `output_dtype`.

        Args:
          variables, args, kwargs: as the module's `apply` takes them: `rngs`, `method`,
            `capture_intermediates` and the module's own.
          mutable: collections that may change and then come back too, batch statistics in the
            dtype they have in the module: float32.
        """

        def run(variables: Any, *args: Any, **kwargs: Any) -> Any:
            # Between products the module computes in float32, however its parameters are stored.
            wide = jax.tree.map(at_least_float32, variables)
            return self.module.apply(wide, *args, mutable=mutable, **kwargs)

        policy = self.policy.with_output_dtype(jnp.float32)
        result = autocast_method(run, policy, dict(self.rules))(variables, *args, **kwargs)
        if mutable is False:
            return self.policy.cast_to_output(result)
        outputs, mutated = result
        return self.policy.cast_to_output(outputs), self._with_params_cast(mutated)

    def _with_params_cast(self, variables: Any) -> Any:
        if "params" not in variables:
            return variables
        return {**variables, "params": self.policy.cast_to_param(variables["params"])}


def apply_policy(
    module: nn.Module,
    policy: Policy | str | DTypeLike,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
) -> PolicyModule:
    """A linen module whose parameters, compute and outputs have the dtypes of a policy.

        init:  cast_to_param(module.init(...))
        apply: cast_to_output(autocast(module.apply, policy, rules)(...))

    The module is not changed and need not say anything about dtypes. Paths of parameters and of
    products are its own, so checkpoints fit.

    Args:
      module: a linen module; `nn.scan`, `nn.remat` and shared modules within it as usual.
      policy: what `autocast` takes.
      rules: what products compute in, by path, as in `autocast`: regular expressions over module
        paths ("decoder/lm_head"), the first match wins.

    Returns:
      An object with the module's `init` and `apply`.

    Raises:
      TypeError: if `module` is no linen module, or a class of them.
      ValueError: if `policy` or `rules` cannot be read, or the module is under one already; when
        applied, if a rule matches nothing.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jmp_kit import linen
      >>> model = linen.apply_policy(nn.Dense(4), "p=f32,c=bf16,o=bf16")
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 3)))
      >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((2, 3))).dtype
      (dtype('float32'), dtype(bfloat16))

    Source: https://flax-linen.readthedocs.io/en/latest/api_reference/flax.linen/module.html
    """
    if isinstance(module, PolicyModule):
        raise ValueError(
            f"The module is under the policy {module.policy} already: write "
            "apply_policy(module.module, policy) for another one."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"apply_policy takes a Flax linen module, but got {module!r}. Write "
            'apply_policy(Network(), "mixed_bfloat16"); for nnx models there is '
            "jmp_kit.nnx.apply_policy, and for functions jmp_kit.autocast."
        )
    autocast(module.apply, policy, rules=rules)  # which reads both, and says what is wrong
    return PolicyModule(module, as_policy(policy), tuple((rules or {}).items()))


def paths(module: nn.Module | PolicyModule, rngs: Any, *args: Any, **kwargs: Any) -> Paths:
    """What `rules` are compared with: the paths of each product. Print it for a table.

    Args:
      module: a linen module, under a policy or not.
      rngs, args, kwargs: as for its `init`; arrays may be abstract. Nothing is computed.

    Returns:
      A tuple of strings for each product: name scopes, which are module paths, and the paths of
      the arguments and parameters that feed it.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jmp_kit import linen
      >>> network = nn.Sequential([nn.Dense(8), nn.Dense(4)])
      >>> print(linen.paths(network, jax.random.key(0), jnp.ones((2, 3))))
      product  paths
            1  Sequential/layers_0  args/0  variables/params/layers_0/kernel
            2  Sequential/layers_1  variables/params/layers_1/kernel
    """
    plain = module.module if isinstance(module, PolicyModule) else module

    def run(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return plain.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)

    variables = eval_shape(plain.init, rngs, *args, **kwargs)
    return product_paths(run, variables, *args, **kwargs)
