"""Rounding and masters on a GPU: the same tests, where the compiler takes more liberties."""

# ruff: noqa: F401

import pytest

from tests.optim.test_masters import (
    test_an_overflow_changes_not_a_bit,
    test_how_much_kahan_keeps,
    test_nearer_than_plain_rounding_on_a_quadratic,
    test_remainders_are_the_masters_of_a_float32_run_bit_for_bit,
    test_steps_in_one_program_are_steps_one_by_one,
    test_ten_thousand_random_steps_keep_the_invariants,
    test_the_parameter_and_what_is_kept_are_the_master,
)
from tests.optim.test_moments import test_a_second_moment_in_bfloat16_decays
from tests.test_rounding import (
    test_every_representable_number_and_its_midpoints,
    test_split_and_join_are_exact_for_every_float32,
    test_stochastic_rounding_is_exact_on_what_is_representable,
    test_stochastic_rounding_is_unbiased,
    test_stochastic_rounding_keeps_infinities_and_nan,
    test_stochastic_rounding_never_passes_a_neighbour,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("standard_promotion")]
