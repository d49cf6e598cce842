"""Draws `docs/audit.png`: which products of a transformer block are half, and what they compute.

    python docs/audit.py

The block is that of `block.py`, forward and backward, with its head in float32 by a rule.
"""

import json
import pathlib
import runpy

import jax

import jmp_kit
from jmp_kit import numerics

DOCS = pathlib.Path(__file__).parent


def audited():
    """The products of the block's gradient."""
    block = runpy.run_path(str(DOCS / "block.py"))
    loss_fn = jmp_kit.autocast(block["block"], "mixed_bfloat16", rules={"head": "float32"})
    return numerics.audit(jax.grad(loss_fn), *block["arguments"]())


def draw(found, path):
    """A bar for each name scope."""
    told = json.dumps([(p.path, p.flops, p.is_half) for p in found.products])
    numerics.plot_audit(found).savefig(path, metadata={"Description": told})


if __name__ == "__main__":
    draw(audited(), DOCS / "audit.png")
