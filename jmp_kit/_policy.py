"""Policies: which dtype parameters, compute and outputs have."""

import dataclasses
import difflib
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_kit._dtypes import DTYPE_NAMES, half_dtype, parse_dtype, short_name, stored_dtype
from jmp_kit._tree import cast_floating

T = TypeVar("T")

_PRESETS = {
    "mixed_float16": "params=float32,compute=float16,output=float32",
    "mixed_bfloat16": "params=float32,compute=bfloat16,output=float32",
    "mixed_float8": "params=float32,compute=float8,output=float32",
}
_KEYS = {"p": "param", "params": "param", "c": "compute", "compute": "compute"}
_KEYS |= {"o": "output", "output": "output"}

_HOW_TO_WRITE_A_POLICY = (
    'Write "mixed_bfloat16", "mixed_float16", "mixed_float8", a dtype ("float32"), or pairs: '
    '"params=float32,compute=bfloat16,output=float32" (p=, c= and o= for short).'
)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, of compute and of outputs.

    Every cast changes the floating-point array leaves of a pytree and nothing else: integers,
    bools, PRNG keys and leaves that are no arrays pass through, and NumPy arrays stay NumPy's.

    Args:
      param_dtype: the dtype in which parameters are kept; a dtype or its name.
      compute_dtype: the dtype of matrix products and convolutions; or float8, for the operands of
        large matrix products, where the others, and what is stored between them, are bfloat16.
      output_dtype: the dtype of results.

    Raises:
      ValueError: if one is not a floating-point dtype of 16, 32 or 64 bits; float8 is one to
        compute in.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> policy = jmp_kit.Policy("float32", "bfloat16", "float32")
      >>> str(policy)
      'p=f32,c=bf16,o=f32'
      >>> policy.cast_to_compute({"step": jnp.arange(2), "w": jnp.ones(2)})
      {'step': Array([0, 1], dtype=int32), 'w': Array([1, 1], dtype=bfloat16)}

    Source: the vocabulary of jmp, https://github.com/google-deepmind/jmp
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype

    def __init__(
        self, param_dtype: DTypeLike, compute_dtype: DTypeLike, output_dtype: DTypeLike
    ) -> None:
        # One spelling inside, so that equal policies are equal however they were written.
        object.__setattr__(self, "param_dtype", parse_dtype(param_dtype))
        object.__setattr__(self, "compute_dtype", parse_dtype(compute_dtype, to_compute=True))
        object.__setattr__(self, "output_dtype", parse_dtype(output_dtype))

    def cast_to_param(self, tree: T) -> T:
        """The tree with its floating-point arrays in `param_dtype`.

        >>> import jax.numpy as jnp, jmp_kit
        >>> jmp_kit.get_policy("p=bf16,c=bf16").cast_to_param(jnp.ones(2)).dtype
        dtype(bfloat16)
        """
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """The tree with its floating-point arrays in `compute_dtype`, or for float8 in bfloat16.

        >>> import jax.numpy as jnp, jmp_kit
        >>> jmp_kit.get_policy("mixed_float16").cast_to_compute(jnp.ones(2)).dtype
        dtype('float16')
        """
        return cast_floating(tree, stored_dtype(self.compute_dtype))

    def cast_to_output(self, tree: T) -> T:
        """The tree with its floating-point arrays in `output_dtype`.

        >>> import jax.numpy as jnp, jmp_kit
        >>> half = jnp.ones(2, jnp.float16)
        >>> jmp_kit.get_policy("mixed_float16").cast_to_output(half).dtype
        dtype('float32')
        """
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """The same policy with another output dtype.

        >>> import jmp_kit
        >>> str(jmp_kit.get_policy("half").with_output_dtype("f32"))
        'p=f16,c=f16,o=f32'
        """
        return Policy(self.param_dtype, self.compute_dtype, output_dtype)

    def __str__(self) -> str:
        param, compute, output = map(short_name, dataclasses.astuple(self))
        return f"p={param},c={compute},o={output}"


def get_policy(policy_name: str) -> Policy:
    """The policy that a string describes.

        policy := preset | dtype | key "=" dtype {"," key "=" dtype}
        preset := "mixed_float16" | "mixed_bfloat16" | "mixed_float8"
        dtype  := "half" | "full" | "f16" | "bf16" | "f32" | "f64" | "float16" | …
                  "f8" | "float8"                                # to compute in
        key    := "p" | "params" | "c" | "compute" | "o" | "output"

    A dtype alone stands for all three. Of the keys left out, params is float32, compute follows
    params, and output follows compute. Spaces do not matter.

    Args:
      policy_name: the description.

    Returns:
      A `Policy`; `str(policy)` is a description of it.

    Raises:
      ValueError: if a key or a dtype is unknown, or a key is written twice.
      TypeError: if it is not a string.

    Example:
      >>> import jmp_kit
      >>> str(jmp_kit.get_policy("mixed_bfloat16"))
      'p=f32,c=bf16,o=f32'
      >>> str(jmp_kit.get_policy("c=f16"))
      'p=f32,c=f16,o=f16'

    Source: the grammar of jmp, https://github.com/google-deepmind/jmp
    """
    if not isinstance(policy_name, str):
        raise TypeError(
            f"get_policy reads a string, but got {policy_name!r}. "
            "To put a policy together from dtypes, write Policy(param, compute, output)."
        )
    description = _PRESETS.get(policy_name.strip(), policy_name)
    if "=" not in description:
        dtype = _parse(description, policy_name)
        return Policy(dtype, dtype, dtype)
    dtypes: dict[str, np.dtype] = {}
    for part in description.split(","):
        key, _, name = part.partition("=")
        if key.strip() not in _KEYS:
            raise ValueError(
                f"Unknown key {key.strip()!r} in the policy {policy_name!r}: the keys are "
                f"{', '.join(_KEYS)}. {_HOW_TO_WRITE_A_POLICY}"
            )
        role = _KEYS[key.strip()]
        if role in dtypes:
            raise ValueError(
                f"The policy {policy_name!r} gives the {role} dtype twice. {_HOW_TO_WRITE_A_POLICY}"
            )
        dtypes[role] = _parse(name, policy_name, to_compute=role == "compute")
    param = dtypes.get("param", jnp.dtype(jnp.float32))
    compute = dtypes.get("compute", param)
    return Policy(param, compute, dtypes.get("output", stored_dtype(compute)))


def as_policy(policy: Policy | str | DTypeLike) -> Policy:
    """A policy, its name, or what to compute in with float32 parameters and outputs."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return get_policy(policy)
    return Policy(jnp.float32, policy, jnp.float32)


def policy_to_compute(policy: Policy | str | DTypeLike) -> Policy:
    """As `as_policy`, but that a dtype's name is what to compute in, as the dtype itself is."""
    if isinstance(policy, str) and "=" not in policy and policy.strip() not in _PRESETS:
        policy = _parse(policy, policy, to_compute=True)
    return as_policy(policy)


def _parse(name: str, policy_name: str, to_compute: bool = False) -> np.dtype:
    try:
        return parse_dtype(name.strip(), to_compute=to_compute)
    except ValueError as error:
        known = (*_PRESETS, *DTYPE_NAMES)
        near = difflib.get_close_matches(name.strip(), known, n=1, cutoff=0.5)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{error}{meant} Presets are {', '.join(map(repr, _PRESETS))}. (In the policy "
            f"{policy_name!r}.)"
        ) from None


def cast_to_half(tree: T) -> T:
    """The tree with its floating-point arrays in `half_dtype()`.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> jmp_kit.cast_to_half(jnp.ones(2)).dtype
      dtype('float16')
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """The tree with its floating-point arrays in float32.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> jmp_kit.cast_to_full(jnp.ones(2, jnp.bfloat16)).dtype
      dtype('float32')
    """
    return cast_floating(tree, jnp.dtype(jnp.float32))
