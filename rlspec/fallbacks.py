"""Did the kernels run that a candidate declares? From the names of what was seen to run, and nothing else.

A candidate that declares own kernels may let torch make and move data; what torch computed is a fallback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Operators of torch that make, move, compare or sort data. Any other is arithmetic, such as what `observe` names
# "index_put_ (accumulate)", and scatter, which may add, too.
_MOVING = frozenset((
    "_local_scalar_dense", "_pin_memory", "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "all", "aminmax",
    "any", "arange", "as_strided", "bitwise_and", "bitwise_not", "bitwise_or", "cat", "chunk", "clamp", "clamp_max",
    "clamp_min", "clone", "constant_pad_nd", "contiguous", "copy_", "detach", "detach_", "diagonal", "empty",
    "empty_like", "empty_strided", "eq", "equal", "expand", "fill", "fill_", "flatten", "flip", "full", "full_like",
    "gather", "ge", "gt", "index", "index_copy", "index_copy_", "index_put", "index_put_", "index_select",
    "is_nonzero", "is_pinned", "isfinite", "isnan", "item", "le", "lift_fresh", "logical_and", "logical_not",
    "logical_or", "lt", "masked_fill", "masked_fill_", "masked_select", "narrow", "ne", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "nonzero", "ones", "ones_like", "pad", "permute",
    "pin_memory", "promote_types", "record_stream", "repeat", "reshape", "roll", "scalar_tensor", "searchsorted",
    "select", "set_", "slice", "sort", "split", "split_with_sizes", "squeeze", "stack", "t", "take", "to", "transpose",
    "unbind", "unflatten", "unfold", "unsqueeze", "view", "where", "zero_", "zeros", "zeros_like",
))  # fmt: skip
# Where the launches of a backend are seen; `fastest` takes the kernels of either.
_LAUNCHES: Mapping[str, tuple[str, ...]] = {
    "triton": ("triton",), "cuda": ("native",), "fastest": ("triton", "native"),
}  # fmt: skip
_OWN = ("rlspec::",)  # the namespace of the kernels in csrc/, whose launchers go by other names
_LIBRARY_KERNEL = re.compile(
    r"cublas|cutlass|cudnn|flash|fmha|nvjet|xmma|gemm|gemv|softmax|layer_norm|rms_norm|silu", re.I
)


def fallback(backend: str | None, seen: Mapping[str, Any]) -> str | None:
    """Why what ran is not what the candidate declares, or None; who declares no backend may run anything."""
    if backend is None:
        return None
    if backend not in _LAUNCHES:
        return f"the candidate declares the backend {backend!r}; known: {', '.join(_LAUNCHES)}"
    declares = f"the candidate declares {backend}"
    if not any(seen[where] for where in _LAUNCHES[backend]):
        return f"{declares}, and no {backend} kernel was launched"
    for where in {"triton", "native"} - {*_LAUNCHES[backend]}:
        if seen[where]:
            return f"{declares}, and {seen[where][0]}, a kernel of the other backend, was launched"
    # An operator of a user's own library is the candidate, not a fallback; what it is made of is seen beside it.
    if computed := [name for name in seen["torch"] if name not in _MOVING and "::" not in name]:
        return f"{declares}, and torch computed {', '.join(computed[:4])}"
    if idle := seen["calls_without_launch"]:
        return f"{declares}, and {idle} of its calls launched no {backend} kernel"
    known = {*seen["triton"], *seen["native"]}
    own = _OWN if "native" in _LAUNCHES[backend] else ()
    strange = [name for name in seen["profiled"] or () if name not in known and not name.startswith(own)]
    foreign = [name for name in strange if _LIBRARY_KERNEL.search(name)]
    return f"{declares}, and the profiler saw {foreign[0][:80]}" if foreign else None
