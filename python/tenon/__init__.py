"""Tenon: fused activations, quantisation and dropout on arrays.

    y = tenon.gelu(x)                                   # every registered activation
    y = tenon.swiglu(x, quantize="mxfp8")               # straight into FP8
    tenon.define("soft_step", "x*sigmoid(beta*x) + 0.1*tanh(x); beta = 1.5")
    print(tenon.show("soft_step"))

    @tenon.fuse
    def bias_gelu(x, bias):
        return tenon.gelu(x + bias)

    dx, dbias = bias_gelu.grad(dy, x, bias)

Arrays are NumPy's, or of anything with __dlpack__, on the CPU or on CUDA; `tenon.torch` and
`tenon.jax` are the other front ends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._lib import lib as _library

if TYPE_CHECKING:
    from ._activation import (
        Activation,
        Gradients,
        activation,
        activation_info,
        define,
        names,
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
    from ._numpy import set_threads, threads
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
    "__version__",
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

__version__: str = _library.tenon_version().decode()


def __getattr__(name: str) -> Any:
    # NumPy is imported with the first name that needs it, so `import tenon` stays fast.
    if name in ("torch", "jax"):
        return importlib.import_module(f".{name}", __name__)
    if name.startswith("_"):  # unimported submodules, and names that libraries probe
        raise AttributeError(f"module 'tenon' has no attribute {name!r}")
    from . import _numpy

    if name in __all__:
        found = getattr(_numpy, name)
        globals()[name] = found
        return found
    try:
        if name in ("x", "a", "b"):  # valid formulas, but not attribute names
            raise ValueError("it is an input of formulas")
        return _numpy.Activation(name)
    except ValueError as e:
        raise AttributeError(f"module 'tenon' has no attribute {name!r}: {e}") from None


def __dir__() -> list[str]:
    from . import _numpy

    return sorted({*__all__, *_numpy.names()})
