"""The products of a program that JAX gave to the compiler, or that came out of it."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jmp_kit.numerics._audited import Audit, Convert, Product, Transfer
from jmp_kit.numerics._hlo import Array, Computation, Instruction, Program, Run, parse, root_of
from jmp_kit.programs import is_backward, names_in


def audit_lowered(
    stage: jax.stages.Lowered | jax.stages.Compiled, paths: Mapping[str, str] | None = None
) -> Audit:
    """The products of a program, and if it is compiled, what it converts.

    Args:
      stage: `jax.jit(fun).lower(*args)`, or that compiled.
      paths: by source, where the names in the program tell none.
    """
    if isinstance(stage, jax.stages.Lowered):
        text, level = stage.as_text("hlo", debug_info=True), "lowered"
    else:
        text, level = stage.as_text() or "", "compiled"
    return audit_text(text, level, device_of(stage).platform, paths or {})


def audit_text(text: str, level: str, backend: str, paths: Mapping[str, str]) -> Audit:
    """The products of a program in XLA's text."""
    program = parse(text)
    products, opaque, converts, transfers = [], [], [], []
    for run in program.runs():
        source, backward = str(program.source_of(run)), is_backward(run.stack)
        path = path_of(run.stack) or paths.get(source, "")
        if _is_product(run.instruction):
            kind, flops = _kind(run.instruction), _flops(run)
            is_kernel = flops is None
            if is_kernel and not _takes_halves(run):
                opaque.append(f"{kind} {source} {path}".rstrip())
                continue
            lhs, *others = run.operands
            rhs, out, times = (others or [lhs])[0], run.instruction.results[0], run.times
            product = Product(
                source,
                path,
                kind,
                shape=out.shape,
                lhs_dtype=lhs.dtype,
                rhs_dtype=rhs.dtype,
                out_dtype=out.dtype,
                flops=times * (flops or 0),
                backward=backward,
                times=times,
                is_kernel=is_kernel,
            )
            products.append(product)
        for start, end in _converted(run, program) if level == "compiled" else ():
            moved, ends = run.times * (start.nbytes + end.nbytes), (start.dtype, end.dtype)
            convert = Convert(source, path, end.shape, *ends, moved, backward, run.times)
            converts.append(convert)
        for kind, array in _exchanged(run):
            moved = run.times * array.nbytes
            transfer = Transfer(source, path, kind, array.dtype, moved, backward, run.times)
            transfers.append(transfer)
    return Audit(level, backend, tuple(products), tuple(opaque), tuple(converts), tuple(transfers))


def device_of(stage: Any) -> Any:
    """The first device that a program runs on; of one that does not tell, the first there is."""
    told = [getattr(stage, f"{end}_shardings", None) for end in ("input", "output")]
    for sharding in jax.tree.leaves(told):
        return min(sharding.device_set, key=lambda device: device.id)
    return jax.devices()[0]


# Libraries' kernels that multiply matrices.
_LIBRARY = re.compile(
    "cublas|cudnn|onednn|gemm|matmul|conv|fmha|attention|triton|mosaic|tpu_custom_call", re.I
)
_PRODUCTS = ("dot", "convolution", "ragged-dot")


def _is_product(instruction: Instruction) -> bool:
    """Whether an instruction multiplies matrices, by itself or by a library."""
    if instruction.opcode == "custom-call":
        return bool(_LIBRARY.search(_kind(instruction)))
    return instruction.opcode in _PRODUCTS


def _takes_halves(run: Run) -> bool:
    floats = {array.dtype for array in run.operands if "float" in array.dtype}
    return bool(floats) and "float32" not in floats and "float64" not in floats


def _kind(instruction: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found[1] if found else instruction.opcode


def _flops(run: Run) -> int | None:
    """Two for each multiplication; None of a kernel that does not tell."""
    attributes, kind = run.instruction.attributes, _kind(run.instruction)
    operands, out = run.operands, run.instruction.results[0]
    for pattern in (
        r"lhs_contracting_dims=\{([\d,]*)\}",
        r'"lhs_contracting_dimensions":\[([^\]]*)\]',
    ):
        if contracting := re.search(pattern, attributes):
            dimensions = map(int, re.findall(r"\d+", contracting[1]))
            return 2 * out.size * math.prod(operands[0].shape[i] for i in dimensions)
    if labels := re.search(r"dim_labels=\w+_(\w+)->", attributes):
        # What cuDNN's convolutions of the backward pass give is an operand of the forward one.
        kernel = operands[1]
        if "BackwardInput" in kind:
            out = operands[0]
        elif "BackwardFilter" in kind:
            out, kernel = operands[1], out
        features = kernel.shape[labels[1].index("o")]
        return 2 * out.size * kernel.size // max(features, 1)
    if kind == "__onednn$matmul":
        return 2 * out.size * operands[0].shape[-2 if '"transpose_a":true' in attributes else -1]
    return None


# Where an XLA loop or call is, and not what a user named.
_PLUMBING = re.compile(
    r"p?jit\([^()]*\)|\bwhile/(?:body|cond)\b|\b(?:eval_jaxpr|closed_call|checkpoint|shard_map)\b|"
    r"\brematted_computation\b|\bcond/branch_\d+_fun\b|\bcustom_[jv][vj]p_call(?:_jaxpr)?\b"
)


def path_of(stack: str) -> str:
    """Of "jit(loss)/jvp(Network)/head/dot_general": "Network/head"."""
    return "/".join(names_in(_PLUMBING.sub("", stack)).split("/")[:-1])


_EXCHANGES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


def _exchanged(run: Run) -> Iterator[tuple[str, Array]]:
    """The kind and the arrays of an exchange between devices: each where it is whole."""
    kind = run.instruction.opcode.removesuffix("-start")
    if kind in _EXCHANGES:
        results, operands = run.instruction.results, run.operands
        if len(results) > len(operands):  # begun here and done elsewhere: (operands, results)
            results = results[len(operands) :]
        for pair in zip(operands, results, strict=False):
            yield kind, max(pair, key=lambda array: array.nbytes)


# Around a single fused kernel, and what in it does not compute.
AROUND = ("while", "conditional", "call", "async-start")
_MOVES = ("convert", "bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice")


def _converted(run: Run, program: Program) -> Iterator[tuple[Array, Array]]:
    """What a kernel takes and gives if all it does is to convert."""
    if any(call.opcode not in AROUND for call in run.calls):
        return
    if run.instruction.opcode == "convert":
        pairs: list[tuple[Array | None, Array]] = [(run.operands[0], run.instruction.results[0])]
    elif run.instruction.opcode in ("fusion", "fusion-start"):
        fused = program.computations[run.instruction.called[0]]
        root = root_of(fused)
        outputs = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
        pairs = [(_origin(output, fused), output.results[0]) for output in outputs]
    else:
        return
    for start, end in pairs:
        if start and end.size > 1 and start.dtype != end.dtype:
            yield Array(start.dtype, end.shape), end


def _origin(instruction: Instruction, fused: Computation) -> Array | None:
    """The parameter of a fusion that nothing but moves and conversions lies between."""
    while instruction.opcode in _MOVES:
        instruction = fused[instruction.operands[0]]
    return instruction.results[0] if instruction.opcode == "parameter" else None
