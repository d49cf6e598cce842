"""Optimizers for half-precision training."""

from jmp_kit.optim._convert import convert_precision as convert_precision
from jmp_kit.optim._inspect import loss_scale_of as loss_scale_of
from jmp_kit.optim._inspect import metrics as metrics
from jmp_kit.optim._inspect import raise_if_diverged as raise_if_diverged
from jmp_kit.optim._master_params import master_params as master_params
from jmp_kit.optim._mixed_precision import MixedPrecisionState as MixedPrecisionState
from jmp_kit.optim._mixed_precision import mixed_precision as mixed_precision
from jmp_kit.optim._shardings import state_shardings as state_shardings
