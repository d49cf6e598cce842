"""A mixture of experts: each token goes to two of them, as far as they have room."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Experts(nn.Module):
    """SwiGLU networks side by side, and a router, which is float32 by hand too."""

    dtype: Any
    experts: int
    hidden: int
    room: float = 1.25  # of an expert, over its even share

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        width = x.shape[-1]
        tokens = x.reshape(-1, width)
        router = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32)
        weights, chosen = jax.lax.top_k(nn.softmax(router(tokens)), 2)  # [tokens, 2]
        weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype)
        slots, held = _slots(chosen, self.experts, int(self.room * 2 * len(tokens) / self.experts))

        def weight(name: str, *shape: int) -> jax.Array:
            initialise = nn.initializers.lecun_normal(batch_axis=0)
            return self.param(name, initialise, (self.experts, *shape)).astype(x.dtype)

        y = tokens[held]  # [experts, room, width]
        gate = jnp.einsum("etw,ewh->eth", y, weight("gate", width, self.hidden))
        up = jnp.einsum("etw,ewh->eth", y, weight("up", width, self.hidden))
        y = jnp.einsum("eth,ehw->etw", nn.silu(gate) * up, weight("down", self.hidden, width))
        found = y.reshape(-1, width).at[slots].get(mode="fill", fill_value=0)  # [tokens, 2, width]
        return (found * weights[..., None]).sum(axis=1).reshape(x.shape)


def _slots(chosen: jax.Array, experts: int, room: int) -> tuple[jax.Array, jax.Array]:
    """Where the choices of each token go, and who holds each expert's places; first come first."""
    is_chosen = jax.nn.one_hot(chosen.reshape(-1), experts, dtype=jnp.int32)  # [2 tokens, experts]
    place = (jnp.cumsum(is_chosen, axis=0) * is_chosen).sum(axis=-1).reshape(chosen.shape) - 1
    slots = jnp.where(place < room, chosen * room + place, experts * room)  # or nowhere
    owners = jnp.broadcast_to(jnp.arange(len(chosen))[:, None], chosen.shape)
    held = jnp.zeros(experts * room, jnp.int32).at[slots].set(owners, mode="drop")
    return slots, held.reshape(experts, room)
