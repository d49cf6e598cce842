"""Classes that pass for the ones they are made of."""

import inspect
from collections.abc import Callable
from typing import Any


def alike(made: Any, kind: type, make: Callable[..., type], *arguments: Any) -> type:
    """`made`, a subclass of `kind`, named as that is and pickled by what makes it.

    Args:
      make: `make(kind, *arguments)` gives `made` again.
    """

    def reduced(self: Any, protocol: Any) -> Any:
        # Pickled, a class is its name, and by that only `kind` is found.
        found: Any = super(made, self).__reduce_ex__(max(protocol, 2))
        _, (_, *others), *rest = found
        return _new, (make, kind, arguments, *others), *rest

    names = {name: getattr(kind, name) for name in ("__name__", "__qualname__", "__module__")}
    for name, value in {**names, "__doc__": kind.__doc__, "__reduce_ex__": reduced}.items():
        setattr(made, name, value)
    made.jmp_kit_made_of = kind
    result: type = made
    return result


def plain(made: type) -> type:
    """What a class was made of; any other class itself."""
    kind: type = vars(made).get("jmp_kit_made_of", made)
    return kind


def public_methods(kind: type, base: type) -> dict[str, Any]:
    """What may be a method that is called from outside: `__call__`, and names that `base` lacks."""
    public = (n for n in dir(kind) if not n.startswith("_") and not hasattr(base, n))
    return {n: inspect.getattr_static(kind, n, None) for n in ("__call__", *public)}


def become(x: Any, kind: type) -> None:
    """Give an object another class, whatever guards its attributes."""
    object.__setattr__(x, "__class__", kind)


def _new(make: Callable[..., type], kind: type, arguments: tuple[Any, ...], *others: Any) -> Any:
    return kind.__new__(make(kind, *arguments), *others)
