"""Any function with its matrix products in half.

The function is traced once, at its own dtypes, to a jaxpr, which is split and evaluated in parts:

- A **product** (matrix product, convolution, ragged product) takes half operands and gives a half
  result, so that both of its backward products are half too.
- A **segment** is a run of other operations between products. It computes in float32, exactly as
  it was traced; what leaves it on its way to a product, depends on a product and is large, is
  stored in half, but for statistics: what is reduced and then combined with larger values. The
  backward pass computes it again: of a softmax, a norm or a GELU only the half results of the
  products before it are kept.
- **State**, what is updated rather than made anew, stays float32; products take it in half.
- The **epilogue** is what no product follows, the loss say: float32, as it was traced.

    x: float32 -> product -> half -> segment -> half -> product -> half -> epilogue: float32

A function goes through the rooms in one direction: it is traced (`_casting`), what `programs` and
`reading` know of it is looked up, `recomputing` and `rewriting` write it anew where it holds its
backward pass, `planning` makes a plan, and `evaluating` follows that. `docs/autocast.md` walks a
loss through them. `_models` keeps what a function changes in nnx models, `_regions` is for what is
to be left alone or called in half, and `_misused` and `_warned` tell what cannot, or may not, be
meant.
"""

from jmp_kit.casting._autocast import autocast as autocast
from jmp_kit.casting._autocast import autocast_method as autocast_method
from jmp_kit.casting._autocast import plans_of as plans_of
from jmp_kit.casting._regions import full_precision as full_precision
from jmp_kit.casting._regions import half_precision as half_precision
from jmp_kit.casting.planning._plan import Barrier as Barrier
from jmp_kit.casting.planning._plan import Call as Call
from jmp_kit.casting.planning._plan import Part as Part
from jmp_kit.casting.planning._plan import Plan as Plan
from jmp_kit.casting.planning._plan import Stored as Stored
from jmp_kit.casting.rewriting._float8 import in_float8 as in_float8
from jmp_kit.casting.rewriting._float8 import why_half as why_half
