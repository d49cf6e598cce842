"""Linear algebra: what decomposes matrices, and what solves with them."""

from jax.extend.core import JaxprEqn

from jmp_kit.programs._jaxpr import names_within

# What solves to the precision that it was asked for, which half has not: JAX's, and Lineax's.
SOLVES = ("custom_linear_solve", "linear_solve")

# How the names of these primitives begin.
ALGEBRA: tuple[str, ...] = (
    *(
        "cholesky",
        "eig",
        "geqp",
        "geqrf",
        "hessenberg",
        "householder",
        "lu",
        "ormqr",
        "qr",
        "schur",
    ),
    *("svd", "triangular_solve", "tridiagonal", *SOLVES),
)


def is_algebra(eqn: JaxprEqn) -> bool:
    """Whether it is linear algebra, or calls it.

    A condition number multiplies the errors of what it takes: that is not rounded, nor is what it
    gives, of which its derivatives are made.
    """
    return any(name.startswith(ALGEBRA) for name in names_within(eqn))
