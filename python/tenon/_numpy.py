"""The NumPy front end: all names of `import tenon` that work on arrays."""

from __future__ import annotations

from ._activation import (
    Activation,
    Gradients,
    activation,
    activation_info,
    define,
    names,
    resolve,
    show,
)
from ._array import Array
from ._dlpack import to_dlpack
from ._dropout import (
    DropoutGradients,
    Normalized,
    Random,
    bias_dropout_add,
    bias_dropout_add_backward,
    dropout,
    dropout_backward,
    get_bias_dropout_add,
    l2_normalization,
    l2_normalization_backward,
    l2_normalization_forward,
)
from ._fused import Fused, fuse, grad
from ._lib import check, lib
from ._ops import Op, OpArgument, OpExtra, OpParameter, ops
from ._plan import Plan, plan
from ._quantize import Format, Health, Quantized, delayed_update, dequantize, quantize
from ._trace import (
    Condition,
    Expr,
    abs,
    clamp,
    erf,
    erfc,
    exp,
    expm1,
    log,
    log1p,
    maximum,
    minimum,
    round,
    rsqrt,
    select,
    sqrt,
    where,
)

__all__ = [
    "Activation",
    "Array",
    "Condition",
    "DropoutGradients",
    "Expr",
    "Format",
    "Fused",
    "Gradients",
    "Health",
    "Normalized",
    "Op",
    "OpArgument",
    "OpExtra",
    "OpParameter",
    "Plan",
    "Quantized",
    "Random",
    "abs",
    "activation",
    "activation_info",
    "bias_dropout_add",
    "bias_dropout_add_backward",
    "clamp",
    "define",
    "delayed_update",
    "dequantize",
    "dropout",
    "dropout_backward",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "fuse",
    "get_bias_dropout_add",
    "grad",
    "l2_normalization",
    "l2_normalization_backward",
    "l2_normalization_forward",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "names",
    "ops",
    "plan",
    "quantize",
    "resolve",
    "round",
    "rsqrt",
    "select",
    "set_threads",
    "show",
    "sqrt",
    "threads",
    "to_dlpack",
    "where",
]


def set_threads(count: int) -> None:
    """Sets the CPU thread count. 0 restores TENON_THREADS, OMP_NUM_THREADS or the core count."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"set_threads: {count!r}; it must be a whole number, 0 to 1024")
    if not 0 <= count <= 1024:
        raise ValueError(f"set_threads: {count} threads; give 1 to 1024, or 0 for the default")
    check(lib.tenon_set_threads(count))


def threads() -> int:
    """The number of threads of the CPU backend."""
    return int(lib.tenon_threads())
