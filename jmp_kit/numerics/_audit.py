"""Which products of a program really run in half."""

import collections
from typing import Any, Literal, get_args

import jax

from jmp_kit.numerics._audited import Audit
from jmp_kit.numerics._lowered import audit_lowered
from jmp_kit.numerics._traced import audit_traced
from jmp_kit.programs import on_arrays

Level = Literal["traced", "lowered", "compiled"]
LEVELS = get_args(Level)


def audit(fun: Any, *args: Any, level: Level = "traced", **kwargs: Any) -> Audit:
    """Every matrix product and convolution of a function, with its dtypes.

    Nothing is computed. If `fun` is a gradient or a train step, then the products of the backward
    pass are among them. A product in a loop counts once for each round, in a while loop once.

    - `"traced"`: as JAX traces it. Quick, and the same on every backend.
    - `"lowered"`: as the compiler gets it. It shows what devices exchange in `shard_map`.
    - `"compiled"`: as the present backend runs it. It shows which products the compiler widened (on
      a CPU that cannot multiply in half), turned into something else or gave to a library; which
      kernels do nothing but convert dtypes; and what devices exchange, in which dtype.

    Args:
      fun: any JAX function: under `autocast` or not, jitted or not. Or one that is lowered or
        compiled already, `jax.jit(f).lower(...)` or `.compile()` of that, for options, shardings
        and devices of your own.
      args, kwargs: what it is called with; arrays may be abstract (`jax.ShapeDtypeStruct`).
      level: which of these programs to look at.

    Returns:
      An `Audit`, which prints as a table.

    Raises:
      ValueError: if there is no such level.
      TypeError: if arguments are given with a program that is lowered or compiled already.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> @jmp_kit.autocast("mixed_bfloat16", rules={"head": "float32"})
      ... def loss_fn(params, x):
      ...     hidden = jnp.tanh(x @ params["body"])
      ...     return jnp.sum(hidden @ params["head"])
      >>> params = {"body": jnp.ones((8, 8)), "head": jnp.ones((8, 2))}
      >>> found = jmp_kit.numerics.audit(jax.grad(loss_fn), params, jnp.ones((4, 8)))
      >>> [p.lhs_dtype for p in found.products if p.backward]
      ['float32', 'float32', 'bfloat16']
      >>> f"{found.half_fraction:.0%}"
      '80%'
      >>> found.assert_half(except_="head")
      >>> compiled = jax.jit(loss_fn).lower(params, jnp.ones((4, 8))).compile()
      >>> jmp_kit.numerics.audit(compiled).level
      'compiled'
    """
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}, but there are {', '.join(map(repr, LEVELS))}.")
    if isinstance(fun, jax.stages.Lowered | jax.stages.Compiled):
        if args or kwargs or level != "traced":
            raise TypeError(
                f"A {type(fun).__name__} program has its arguments and its level already: "
                "write audit(program)."
            )
        return audit_lowered(fun)
    traced = audit_traced(fun, *args, **kwargs)
    if level == "traced":
        return traced
    if hasattr(fun, "lower"):
        lowered = fun.lower(*args, **kwargs)
    else:
        call, arrays = on_arrays(fun, *args, **kwargs)
        lowered = jax.jit(call).lower(arrays)
    # What a program does not name, the parameters that feed the products of the same line do.
    paths: dict[str, set[str]] = collections.defaultdict(set)
    for product in traced.products:
        paths[product.source].add(product.path)
    known = {source: path for source, (path, *others) in paths.items() if not others}
    return audit_lowered(lowered if level == "lowered" else lowered.compile(), known)
