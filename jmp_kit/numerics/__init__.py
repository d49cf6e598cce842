"""Seeing the numerics: what a program computes in, where values lie, what a dtype does to them.

print(audit(train_step, params, batch))             # which products run in half
print(traffic(train_step, params, batch))           # which kernels move how many bytes
print(traffic(train_step, params, batch, target="h200"))  # on a GPU that need not be here
print(plan(loss_fn, "mixed_bfloat16", params))      # what is stored in half, and what is state
print(compare(loss_fn, params, *batch))             # faster? accurate?
print(float8_errors(jax.grad(loss_fn), params, batch))  # what float8 would cost each product
print(doctor())                                     # what this machine is fast in
print(locate_nonfinite(train_step, params, batch))  # where a NaN came from
histogram = exponent_histogram(grads)               # how small gradients are
underflow(grads, jnp.float16)                       # what float16 would lose of them
recommend_loss_scale(grads, jnp.float16)            # by what to scale the loss
print(ranges(params))                               # what a cast would lose, array by array
optax.chain(watch(every=100), inner)                # over a run; watched(opt_state) reads it
"""

from jmp_kit.numerics._audit import LEVELS as LEVELS
from jmp_kit.numerics._audit import audit as audit
from jmp_kit.numerics._audited import Audit as Audit
from jmp_kit.numerics._audited import Convert as Convert
from jmp_kit.numerics._audited import Product as Product
from jmp_kit.numerics._audited import Transfer as Transfer
from jmp_kit.numerics._compare import POLICIES as POLICIES
from jmp_kit.numerics._compare import Comparison as Comparison
from jmp_kit.numerics._compare import compare as compare
from jmp_kit.numerics._doctor import Diagnosis as Diagnosis
from jmp_kit.numerics._doctor import doctor as doctor
from jmp_kit.numerics._exponents import ExponentHistogram as ExponentHistogram
from jmp_kit.numerics._exponents import exponent_histogram as exponent_histogram
from jmp_kit.numerics._exponents import recommend_loss_scale as recommend_loss_scale
from jmp_kit.numerics._exponents import underflow as underflow
from jmp_kit.numerics._float8 import Float8Errors as Float8Errors
from jmp_kit.numerics._float8 import ProductError as ProductError
from jmp_kit.numerics._float8 import float8_errors as float8_errors
from jmp_kit.numerics._locate import locate_nonfinite as locate_nonfinite
from jmp_kit.numerics._nonfinite import NonFinite as NonFinite
from jmp_kit.numerics._plan import Plan as Plan
from jmp_kit.numerics._plan import StoredValue as StoredValue
from jmp_kit.numerics._plan import plan as plan
from jmp_kit.numerics._planned import PlannedPart as PlannedPart
from jmp_kit.numerics._plots import plot_audit as plot_audit
from jmp_kit.numerics._plots import plot_comparison as plot_comparison
from jmp_kit.numerics._plots import plot_exponents as plot_exponents
from jmp_kit.numerics._plots import plot_loss_scale as plot_loss_scale
from jmp_kit.numerics._ranges import Ranges as Ranges
from jmp_kit.numerics._ranges import ranges as ranges
from jmp_kit.numerics._targets import TARGETS as TARGETS
from jmp_kit.numerics._targets import Target as Target
from jmp_kit.numerics._traffic import Kernel as Kernel
from jmp_kit.numerics._traffic import Traffic as Traffic
from jmp_kit.numerics._traffic import traffic as traffic
from jmp_kit.numerics._watch import WatchState as WatchState
from jmp_kit.numerics._watch import total_histogram as total_histogram
from jmp_kit.numerics._watch import watch as watch
from jmp_kit.numerics._watch import watched as watched
