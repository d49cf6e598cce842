"""The same train step in every way there is: by jmp_kit, by hand, and with what the peers have."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import jmp_kit
from benchmarks.measuring import Contender, Step

Loss = Callable[..., tuple[jax.Array, Any]]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Of integer labels, as XLA fuses it: optax's scatters into a float32 array like the logits."""
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


@dataclasses.dataclass(frozen=True)
class Task:
    """A Flax model in any dtype, with its variables, learned and other."""

    module: Callable[[Any], Any]  # from dtype=
    example: Any
    optimizer: optax.GradientTransformation
    error: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy  # of outputs and labels

    @property
    def variables(self) -> tuple[Any, Any]:
        """Parameters and the rest (batch statistics), float32."""
        variables = dict(self._initialise())
        return variables.pop("params"), variables

    @functools.cached_property
    def _initialise(self) -> Callable[[], Any]:
        return jax.jit(lambda: self.module(None).init(jax.random.key(0), self.example))

    def loss(self, dtype: Any = None) -> Loss:
        """(params, rest, inputs, labels) -> (loss, new rest).

        In float32, or by hand in `dtype`.
        """

        def loss_fn(params: Any, rest: Any, inputs: Any, labels: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, **rest}
            outputs, rest = self.module(dtype).apply(variables, inputs, mutable=list(rest))
            return self.error(outputs.astype(jnp.float32), labels).mean(), rest

        return loss_fn


def contenders(task: Task) -> list[Contender]:
    """Every way, float32 first."""
    return [*float32(task), *with_jmp_kit(task), *by_hand(task), *peers(task)]


def float32(task: Task) -> list[Contender]:
    """In float32 products proper, and in what JAX makes of them by default (TF32 on GPUs)."""
    plain = plain_step(task.loss(), task.optimizer)
    return [
        Contender("float32, highest", plain, plain_state(task), precision="highest"),
        Contender("float32, default", plain, plain_state(task)),
    ]


def with_jmp_kit(task: Task) -> list[Contender]:
    """Around the loss, around the whole step, without recomputation, and scaled."""
    loss, state = task.loss(), plain_state(task)
    whole = jmp_kit.autocast(plain_step(loss, task.optimizer), "mixed_bfloat16")
    kept = jmp_kit.autocast(loss, "mixed_bfloat16", recompute=False)
    dynamic = jmp_kit.DynamicLossScale()
    return [
        four_lines("jmp_kit, bfloat16", task, "mixed_bfloat16", jmp_kit.NoOpLossScale()),
        Contender("jmp_kit, bfloat16, one line", whole, state),
        Contender("jmp_kit, bfloat16, kept", plain_step(kept, task.optimizer), state),
        four_lines("jmp_kit, float16, scaled", task, "mixed_float16", dynamic),
    ]


def beside_float8(task: Task) -> list[Contender]:
    """By hand and by jmp_kit in bfloat16, and in float8."""
    return by_hand(task)[:1] + with_jmp_kit(task)[:2] + in_float8(task)


def in_float8(task: Task) -> list[Contender]:
    """Around the loss and around the whole step."""
    step = plain_step(task.loss(), task.optimizer)
    whole = jmp_kit.autocast(step, "mixed_float8")
    return [
        four_lines("jmp_kit, float8", task, "mixed_float8", jmp_kit.NoOpLossScale()),
        Contender("jmp_kit, float8, one line", whole, plain_state(task)),
    ]


def by_hand(task: Task) -> list[Contender]:
    """`dtype=` on every module; float16 with Flax's loss scale."""
    half = plain_step(task.loss(jnp.bfloat16), task.optimizer)
    return [
        Contender("by hand, bfloat16", half, plain_state(task)),
        _flax_dynamic_scale(task),
    ]


def peers(task: Task) -> list[Contender]:
    """Those that are installed; the JSON file's versions say which."""
    found: list[Contender] = []
    if importlib.util.find_spec("jmp"):
        found += _jmp(task)
    if importlib.util.find_spec("mpx"):
        found.append(_mpx(task))
    return found


def plain_state(
    task: Task, optimizer: optax.GradientTransformation | None = None
) -> Callable[[], Any]:
    """What a step starts from; with the task's optimizer if no other."""

    def state() -> Any:
        params, rest = task.variables
        return params, rest, (optimizer or task.optimizer).init(params)

    return state


def plain_step(loss_fn: Loss, optimizer: optax.GradientTransformation) -> Step:
    """A train step that says nothing of precision."""

    def step(state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        params, rest, opt_state = state
        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), loss

    return step


def four_lines(name: str, task: Task, policy: str, loss_scale: jmp_kit.LossScale) -> Contender:
    """jmp_kit's four lines."""
    loss_fn = jmp_kit.autocast(task.loss(), policy)
    optimizer = jmp_kit.mixed_precision(task.optimizer, loss_scale)

    def step(state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        params, rest, opt_state = state
        scale = jmp_kit.loss_scale_of(opt_state)
        value_and_grad = jmp_kit.value_and_grad(loss_fn, scale, has_aux=True)
        (loss, rest), grads = value_and_grad(params, rest, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), loss

    return Contender(name, step, plain_state(task, optimizer))


def _flax_dynamic_scale(task: Task) -> Contender:
    loss_fn = task.loss(jnp.float16)

    def step(state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        params, rest, opt_state, scale = state
        value_and_grad = scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (loss, rest), grads = value_and_grad(params, rest, *batch)
        updates, new_opt_state = task.optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jmp_kit.select_tree(finite, new, (params, opt_state))
        return (params, rest, opt_state, scale), loss

    return Contender(
        "by hand, float16, DynamicScale", step, lambda: (*plain_state(task)(), DynamicScale())
    )


def _jmp(task: Task) -> Iterator[Contender]:
    """As its README has it: everything is cast, norms and softmax too."""
    import jmp

    for name, scale in (
        ("bfloat16", jmp.NoOpLossScale()),
        ("float16", jmp.DynamicLossScale(jnp.float32(2**15))),
    ):
        policy = jmp.get_policy(f"params=float32,compute={name},output=float32")

        def loss_fn(params: Any, rest: Any, scale: Any, *batch: Any, policy: Any = policy) -> Any:
            # The rest, batch statistics, stays float32: Flax computes it so.
            params, inputs = policy.cast_to_compute((params, batch[0]))
            loss, rest = task.loss(policy.compute_dtype)(params, rest, inputs, *batch[1:])
            return scale.scale(policy.cast_to_output(loss)), rest

        def step(state: Any, *batch: Any, loss_fn: Any = loss_fn) -> tuple[Any, jax.Array]:
            params, rest, opt_state, scale = state
            value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, rest), grads = value_and_grad(params, rest, scale, *batch)
            loss, grads = scale.unscale((loss, grads))
            finite = jmp.all_finite(grads)
            updates, new_opt_state = task.optimizer.update(grads, opt_state, params)
            new = optax.apply_updates(params, updates), new_opt_state
            params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
            return (params, rest, opt_state, scale.adjust(finite)), loss

        def state(scale: Any = scale) -> Any:
            return *plain_state(task)(), scale

        yield Contender(f"jmp, {name}", step, state)


def _mpx(task: Task) -> Contender:
    """float16, the only half dtype that it can be brought to."""
    import mpx

    def loss_fn(params: Any, rest: Any, *batch: Any) -> Any:
        return task.loss(jnp.float16)(params, rest, *batch)

    def step(state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        params, rest, opt_state, scaling = state
        value_and_grad = mpx.filter_value_and_grad(loss_fn, scaling, has_aux=True)
        (loss, rest), scaling, finite, grads = value_and_grad(params, rest, *batch)
        rest = mpx.cast_to_full_precision(rest)
        params, opt_state = mpx.optimizer_update(params, task.optimizer, opt_state, grads, finite)
        return (params, rest, opt_state, scaling), loss

    def state() -> Any:
        scaling = mpx.DynamicLossScaling(jnp.float32(2**15), jnp.float32(1))
        return *plain_state(task)(), scaling

    return Contender("mpx, float16", step, state)
