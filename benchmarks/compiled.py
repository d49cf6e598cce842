"""What a compiled program says of itself."""

import collections
import re

# Matrix products and convolutions, as XLA writes them for CPUs and GPUs.
_PRODUCT = re.compile(
    r"(?:ROOT )?%?(?P<name>[\w.\-]+) = .*? (?:dot|convolution|custom-call)\((?P<operands>[^)]*)\)"
)
_LIBRARY = re.compile(r'custom_call_target="(?:__cublas|__cudnn|__onednn\$(?:matmul|conv))')
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(?(\w+)\[", re.MULTILINE)


def product_dtypes(text: str) -> dict[str, int]:
    """How many products of a compiled program take operands of each dtype, by its text."""
    dtypes = dict(_DEFINED.findall(text))
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        match = _PRODUCT.match(line.strip())
        if match and ("custom-call(" not in line or _LIBRARY.search(line)):
            first = re.findall(r"%?([\w.\-]+)(?:,|$)", match["operands"])[0]
            found[dtypes.get(first, "unknown")] += 1
    return dict(found)
