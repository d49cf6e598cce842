"""Reading JAX programs, for those that rewrite them and for those that look at them.

`_jaxpr` knows how JAX's versions differ and cuts pieces out of a jaxpr; `_flow` what is inside an
equation, what depends on a product and what reaches one; `_once` has what was found in a jaxpr;
`_axes` what equations do to axes; `_marks` the names around an equation and those that say what it
computes in; `_algebra` what decomposes and solves; `_arguments` which of a function's arguments are
arrays, and their paths; `_rules` which products a path names; `_paths` shows them.
"""

from jmp_kit.programs._arguments import eval_shape as eval_shape
from jmp_kit.programs._arguments import on_arrays as on_arrays
from jmp_kit.programs._flow import PRODUCTS as PRODUCTS
from jmp_kit.programs._flow import Body as Body
from jmp_kit.programs._flow import Flow as Flow
from jmp_kit.programs._flow import bodies_of as bodies_of
from jmp_kit.programs._flow import is_kernel as is_kernel
from jmp_kit.programs._jaxpr import cut_out as cut_out
from jmp_kit.programs._jaxpr import equations_of as equations_of
from jmp_kit.programs._jaxpr import every_equation as every_equation
from jmp_kit.programs._jaxpr import is_float32 as is_float32
from jmp_kit.programs._jaxpr import is_var as is_var
from jmp_kit.programs._jaxpr import opened as opened
from jmp_kit.programs._jaxpr import pruned as pruned
from jmp_kit.programs._jaxpr import scan_counts as scan_counts
from jmp_kit.programs._jaxpr import subjaxprs as subjaxprs
from jmp_kit.programs._jaxpr import where_rows as where_rows
from jmp_kit.programs._jaxpr import with_subjaxprs as with_subjaxprs
from jmp_kit.programs._marks import is_backward as is_backward
from jmp_kit.programs._marks import marked as marked
from jmp_kit.programs._marks import marked_dtype as marked_dtype
from jmp_kit.programs._marks import names_in as names_in
from jmp_kit.programs._marks import stack_of as stack_of
from jmp_kit.programs._paths import Paths as Paths
from jmp_kit.programs._paths import product_paths as product_paths
from jmp_kit.programs._paths import products_in as products_in
from jmp_kit.programs._paths import program_of as program_of
from jmp_kit.programs._paths import traced as traced
