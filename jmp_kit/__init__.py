"""Mixed-precision training for JAX."""

from jmp_kit._version import __version__ as __version__
from jmp_kit._dtypes import half_dtype as half_dtype
from jmp_kit._tree import all_finite as all_finite
from jmp_kit._tree import select_tree as select_tree
from jmp_kit._policy import Policy as Policy
from jmp_kit._policy import get_policy as get_policy
from jmp_kit._policy import cast_to_half as cast_to_half
from jmp_kit._policy import cast_to_full as cast_to_full
from jmp_kit._loss_scale import LossScale as LossScale
from jmp_kit._loss_scale import NoOpLossScale as NoOpLossScale
from jmp_kit._loss_scale import StaticLossScale as StaticLossScale
from jmp_kit._loss_scale import DynamicLossScale as DynamicLossScale
from jmp_kit._grad import value_and_grad as value_and_grad
from jmp_kit._grad import grad as grad
from jmp_kit.autocast import autocast as autocast
from jmp_kit.autocast import full_precision as full_precision
from jmp_kit.autocast import PRODUCTS as PRODUCTS
from jmp_kit.optim import MixedPrecisionState as MixedPrecisionState
from jmp_kit.optim import mixed_precision as mixed_precision
from jmp_kit.optim import loss_scale_of as loss_scale_of
from jmp_kit.optim import metrics as metrics
from jmp_kit.optim import raise_if_diverged as raise_if_diverged
