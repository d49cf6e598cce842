"""Linear algebra: what decomposes matrices, and what solves with them."""

from jax.extend.core import JaxprEqn

from jmp_kit.programs._jaxpr import names_within

# How the names of these primitives begin.
ALGEBRA: tuple[str, ...] = (
    *("cholesky", "custom_linear_solve", "eig", "geqp", "geqrf", "hessenberg", "householder", "lu"),
    *("ormqr", "qr", "schur", "svd", "triangular_solve", "tridiagonal"),
)


def is_algebra(eqn: JaxprEqn) -> bool:
    """Whether it is linear algebra, or calls it.

    A condition number multiplies the errors of what it takes: that is not rounded, nor is what it
    gives, of which its derivatives are made.
    """
    return any(name.startswith(ALGEBRA) for name in names_within(eqn))
