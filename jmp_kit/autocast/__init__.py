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

`_flow` finds what depends on a product and what reaches one, `_state` what is updated, `_parts`
splits, `_evaluate` evaluates, and `_worth` knows what is worth computing twice. Where the backward
pass is part of the program, `_repeat` has it do so, after `_inline` and `_scans` have brought it
and the forward pass together. `_calls` and `_custom_derivatives` rebuild calls, loops, branches and
rules around what is inside them, and `_jaxpr` knows how JAX's versions differ. `_rules` and
`_full_precision` choose another dtype by marking equations; `_marks` reads and writes the marks.
"""

from jmp_kit.autocast._arguments import eval_shape as eval_shape
from jmp_kit.autocast._arguments import on_arrays as on_arrays
from jmp_kit.autocast._autocast import PRODUCTS as PRODUCTS
from jmp_kit.autocast._autocast import autocast as autocast
from jmp_kit.autocast._autocast import autocast_method as autocast_method
from jmp_kit.autocast._autocast import stored_values as stored_values
from jmp_kit.autocast._evaluator import Stored as Stored
from jmp_kit.autocast._flow import Body as Body
from jmp_kit.autocast._flow import Flow as Flow
from jmp_kit.autocast._flow import bodies_of as bodies_of
from jmp_kit.autocast._full_precision import full_precision as full_precision
from jmp_kit.autocast._jaxpr import cut_out as cut_out
from jmp_kit.autocast._jaxpr import is_var as is_var
from jmp_kit.autocast._jaxpr import pruned as pruned
from jmp_kit.autocast._jaxpr import scan_counts as scan_counts
from jmp_kit.autocast._jaxpr import subjaxprs as subjaxprs
from jmp_kit.autocast._marks import is_backward as is_backward
from jmp_kit.autocast._marks import marked_dtype as marked_dtype
from jmp_kit.autocast._marks import names_in as names_in
from jmp_kit.autocast._marks import stack_of as stack_of
from jmp_kit.autocast._models import arrays_of as arrays_of
from jmp_kit.autocast._models import changed as changed
from jmp_kit.autocast._models import set_arrays as set_arrays
from jmp_kit.autocast._paths import Paths as Paths
from jmp_kit.autocast._paths import product_paths as product_paths
from jmp_kit.autocast._paths import products_in as products_in
from jmp_kit.autocast._paths import program_of as program_of
from jmp_kit.autocast._paths import traced as traced
