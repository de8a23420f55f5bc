"""The C ABI for ctypes. Made from include/tenon/tenon.h by tools/c_abi.py; do not edit."""

# ruff: noqa: E501
# fmt: off
from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any, ClassVar


class Sized(Structure):
    """Structs whose first field is their size."""

    _fields_: ClassVar[Any] = (("size", c_size_t),)

    def __init__(self, **fields: object) -> None:
        super().__init__(size=sizeof(self), **fields)


CODE = {
    "ok": 0,
    "invalid_argument": 1,
    "unsupported": 2,
    "runtime": 3,
}

DTYPE = {
    "f32": 0,
    "f16": 1,
    "bf16": 2,
    "e4m3": 3,
    "e5m2": 4,
    "e8m0": 5,
}

PRECISION = {
    "native": 0,
    "strict": 1,
}

ROUNDING = {
    "once": 0,
    "eager": 1,
}

DEVICE = {
    "cpu": 0,
    "cuda": 1,
}


class View(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("stride", c_int64),
        ("dtype", c_int32),
    )


Allocate = CFUNCTYPE(c_void_p, c_void_p, c_size_t)


class Options(Sized):
    _fields_ = (
        ("precision", c_int32),
        ("rounding", c_int32),
        ("device", c_int32),
        ("stream", c_void_p),
        ("allocate", Allocate),
        ("user", c_void_p),
    )


POWER_OF_TWO = {
    "mode_default": 0,
    "power_of_two": 1,
    "exact_scale": 2,
}


class Tensor(Sized):
    _fields_ = (
        ("scaling", c_char_p),
        ("dtype", c_int32),
        ("power_of_two", c_int32),
        ("eps", c_float),
        ("swizzled", c_int32),
        ("amax_given", c_int32),
        ("data", POINTER(View)),
        ("scale_inv", POINTER(View)),
        ("columnwise_data", POINTER(View)),
        ("columnwise_scale_inv", POINTER(View)),
        ("scale", POINTER(View)),
        ("amax", POINTER(View)),
        ("health", POINTER(View)),
    )


class Scaling(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("scale_dtype", c_int32),
        ("single", c_int32),
        ("scale_given", c_int32),
        ("transposes", c_int32),
        ("block_rows", c_int64 * 2),
        ("block_cols", c_int64 * 2),
    )


class ForwardArgs(Sized):
    _fields_ = (
        ("x", POINTER(View)),
        ("b", POINTER(View)),
        ("bias", POINTER(View)),
        ("scale", POINTER(View)),
        ("y", POINTER(View)),
        ("amax", POINTER(View)),
        ("layout", c_char_p),
        ("x_encoded", POINTER(Tensor)),
        ("b_encoded", POINTER(Tensor)),
        ("y_encoded", POINTER(Tensor)),
    )


class BackwardArgs(Sized):
    _fields_ = (
        ("grad", POINTER(View)),
        ("x", POINTER(View)),
        ("b", POINTER(View)),
        ("bias", POINTER(View)),
        ("scale", POINTER(View)),
        ("dx", POINTER(View)),
        ("db", POINTER(View)),
        ("dbias", POINTER(View)),
        ("dscale", POINTER(View)),
        ("amax", POINTER(View)),
        ("layout", c_char_p),
        ("grad_encoded", POINTER(Tensor)),
        ("x_encoded", POINTER(Tensor)),
        ("b_encoded", POINTER(Tensor)),
        ("dx_encoded", POINTER(Tensor)),
        ("db_encoded", POINTER(Tensor)),
    )


class QuantizeArgs(Sized):
    _fields_ = (
        ("x", POINTER(View)),
        ("y", POINTER(View)),
        ("dbias", POINTER(View)),
        ("amax", POINTER(View)),
        ("x_encoded", POINTER(Tensor)),
        ("y_encoded", POINTER(Tensor)),
    )


class DropoutArgs(Sized):
    _fields_ = (
        ("x", POINTER(View)),
        ("bias", POINTER(View)),
        ("residual", POINTER(View)),
        ("y", POINTER(View)),
        ("p", c_double),
        ("training", c_int32),
        ("random", POINTER(c_uint64)),
    )


class DropoutBackwardArgs(Sized):
    _fields_ = (
        ("grad", POINTER(View)),
        ("dx", POINTER(View)),
        ("dbias", POINTER(View)),
        ("dresidual", POINTER(View)),
        ("p", c_double),
        ("training", c_int32),
        ("random", POINTER(c_uint64)),
    )


class Parameter(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("value", c_float),
        ("least", c_float),
        ("most", c_float),
    )


class Activation(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("formula", c_char_p),
        ("inputs", c_int32),
        ("scaled", c_int32),
        ("parameters", POINTER(Parameter)),
        ("parameter_count", c_size_t),
    )


ARGUMENT_KIND = {
    "argument_columns": 0,
    "argument_count": 1,
    "argument_number": 2,
    "argument_flag": 3,
    "argument_text": 4,
}


class OpArgument(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("kind", c_int32),
        ("required", c_int32),
        ("value", c_double),
        ("least", c_double),
        ("most", c_double),
    )


class OpParameter(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("rows", c_char_p),
    )


EXTRA_KIND = {
    "extra_tensor": 0,
    "extra_column": 1,
    "extra_scalar": 2,
}


class OpExtra(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("kind", c_int32),
    )


class Op(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("summary", c_char_p),
        ("arguments", POINTER(OpArgument)),
        ("argument_count", c_size_t),
        ("parameters", POINTER(OpParameter)),
        ("parameter_count", c_size_t),
        ("extra_inputs", POINTER(OpExtra)),
        ("extra_input_count", c_size_t),
        ("extra_output_count", c_size_t),
    )


class GradRequest(Structure):
    _fields_ = (
        ("unwanted", c_int32),
        ("dtype_given", c_int32),
        ("dtype", c_int32),
        ("accumulate", c_int32),
    )


class OpaqueOp(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("cols", c_int64),
        ("rows_mul", c_int64),
        ("rows_div", c_int64),
        ("forward", CFUNCTYPE(c_int, c_void_p, c_int64, POINTER(View), POINTER(View), POINTER(c_char), c_size_t)),
        ("backward", CFUNCTYPE(c_int, c_void_p, c_int64, POINTER(View), POINTER(View), POINTER(View), POINTER(c_char), c_size_t)),
        ("user", c_void_p),
    )


Exchange = CFUNCTYPE(c_int, c_void_p, POINTER(View), POINTER(View), c_void_p, POINTER(c_char), c_size_t)


class Collectives(Structure):
    _fields_ = (
        ("ranks", c_int64),
        ("all_reduce", Exchange),
        ("all_gather", Exchange),
        ("reduce_scatter", Exchange),
        ("user", c_void_p),
    )


class Format(Structure):
    _fields_ = (
        ("scaling", c_char_p),
        ("dtype", c_int32),
        ("power_of_two", c_int32),
        ("eps", c_float),
    )


ENCODINGS = {
    "rowwise": 0,
    "columnwise": 1,
    "both": 2,
}


class Encoding(Structure):
    _fields_ = (
        ("format", Format),
        ("encodings", c_int32),
        ("swizzled", c_int32),
    )


class OpRequest(Structure):
    _fields_ = (
        ("recipe_given", c_int32),
        ("input", Format),
        ("weight", Format),
        ("gradient", Format),
        ("weight_encoding", POINTER(Encoding)),
        ("output", c_int32),
    )


class PlanRequest(Sized):
    _fields_ = (
        ("cols", c_int64),
        ("dtype", c_int32),
        ("parameter_dtype_given", c_int32),
        ("parameter_dtype", c_int32),
        ("recipe", c_char_p),
        ("recipe_e4m3", c_int32),
        ("evaluation", c_int32),
        ("forward_only", c_int32),
        ("no_input_grad", c_int32),
        ("keep", c_char_p),
        ("parameter_grads", POINTER(GradRequest)),
        ("parameter_grad_count", c_size_t),
        ("extra_grads", POINTER(GradRequest)),
        ("extra_grad_count", c_size_t),
        ("opaque_ops", POINTER(OpaqueOp)),
        ("opaque_op_count", c_size_t),
        ("collectives", POINTER(Collectives)),
        ("target", c_char_p),
        ("input_dtype_given", c_int32),
        ("input_dtype", c_int32),
        ("parameter_dtypes", POINTER(c_int32)),
        ("parameter_dtype_count", c_size_t),
        ("extra_dtypes", POINTER(c_int32)),
        ("extra_dtype_count", c_size_t),
        ("op_requests", POINTER(OpRequest)),
        ("op_request_count", c_size_t),
        ("input_encoding", POINTER(Encoding)),
        ("output_decoded", c_int32),
    )


ROLE = {
    "input": 0,
    "output": 1,
    "param": 2,
    "grad": 3,
    "extra_in": 4,
    "extra_out": 5,
    "saved": 6,
    "state": 7,
    "workspace": 8,
    "rng": 9,
}


class Buffer(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("role", c_int32),
        ("dtype", c_int32),
        ("rows_mul", c_int64),
        ("rows_div", c_int64),
        ("rows_round", c_int64),
        ("rows_add", c_int64),
        ("cols", c_int64),
        ("rows_inside", c_int32),
        ("random", c_int32),
        ("initial_low", c_float),
        ("initial_high", c_float),
        ("reads_forward", c_int32),
        ("writes_forward", c_int32),
        ("reads_backward", c_int32),
        ("writes_backward", c_int32),
        ("same_as", c_int32),
        ("first_forward", c_int32),
        ("last_forward", c_int32),
        ("first_backward", c_int32),
        ("last_backward", c_int32),
        ("in_place", c_int32),
    )


PASS = {
    "forward": 0,
    "backward": 1,
    "backward_last": 2,
}

RUN = {
    "weights_unchanged": 1,
    "no_tuning": 2,
    "aligned": 4,
    "separate": 8,
}

# Of each function: its result, then its arguments.
SIGNATURES: Any = {
    "tenon_scalings": (c_int, POINTER(Scaling), c_size_t, POINTER(c_size_t)),
    "tenon_encoding_shape": (c_int, c_char_p, c_int64, c_int64, c_int32, POINTER(c_int64), POINTER(c_int64)),
    "tenon_version": (c_char_p,),
    "tenon_last_error": (c_char_p,),
    "tenon_forward": (c_int, c_char_p, POINTER(ForwardArgs), POINTER(Options)),
    "tenon_backward": (c_int, c_char_p, POINTER(BackwardArgs), POINTER(Options)),
    "tenon_quantize": (c_int, POINTER(QuantizeArgs), POINTER(Options)),
    "tenon_delayed_update": (c_int, POINTER(View), POINTER(View), c_int32, c_int32, c_int32, POINTER(Options)),
    "tenon_bias_dropout_add": (c_int, POINTER(DropoutArgs), POINTER(Options)),
    "tenon_bias_dropout_add_backward": (c_int, POINTER(DropoutBackwardArgs), POINTER(Options)),
    "tenon_fused_forward": (c_int, c_char_p, c_char_p, POINTER(View), c_size_t, POINTER(View), POINTER(Options)),
    "tenon_fused_backward": (c_int, c_char_p, c_char_p, POINTER(View), c_size_t, POINTER(View), POINTER(View), POINTER(Options)),
    "tenon_run": (c_int, c_char_p, POINTER(View), c_size_t, POINTER(View), c_size_t, POINTER(Options)),
    "tenon_define": (c_int, c_char_p, c_char_p),
    "tenon_names": (c_int, POINTER(c_char), c_size_t, POINTER(c_size_t)),
    "tenon_pinned": (c_int, c_char_p, POINTER(c_char), c_size_t, POINTER(c_size_t)),
    "tenon_activation_info": (c_int, c_char_p, POINTER(Activation)),
    "tenon_show": (c_int, c_char_p, c_int32, POINTER(c_char), c_size_t, POINTER(c_size_t)),
    "tenon_l2_normalization": (c_int, POINTER(View), POINTER(View), POINTER(View), c_float, POINTER(Options)),
    "tenon_l2_normalization_backward": (c_int, POINTER(View), POINTER(View), POINTER(View), POINTER(View), POINTER(Options)),
    "tenon_measure_begin": (c_int,),
    "tenon_measure_end": (c_int, POINTER(c_size_t)),
    "tenon_set_threads": (c_int, c_int32),
    "tenon_threads": (c_int,),
    "tenon_ops": (c_int, POINTER(Op), c_size_t, POINTER(c_size_t)),
    "tenon_plan_build": (c_int, c_char_p, POINTER(PlanRequest), POINTER(Options), POINTER(c_void_p)),
    "tenon_plan_free": (None, c_void_p),
    "tenon_plan_buffers": (c_int, c_void_p, POINTER(Buffer), c_size_t, POINTER(c_size_t)),
    "tenon_plan_describe": (c_int, c_void_p, c_int64, c_char_p, POINTER(c_char), c_size_t, POINTER(c_size_t)),
    "tenon_plan_fingerprint": (c_int, c_void_p, POINTER(c_char), c_size_t, POINTER(c_size_t)),
    "tenon_plan_sizes": (c_int, c_void_p, c_int64, POINTER(c_int64), c_size_t, POINTER(c_int64)),
    "tenon_plan_workspace": (c_int, c_void_p, c_int32, c_int64, c_int32, POINTER(c_int64)),
    "tenon_plan_run": (c_int, c_void_p, c_int32, c_int64, POINTER(c_void_p), c_size_t, c_void_p, c_int32, c_void_p),
    "tenon_plan_prepare": (c_int, c_void_p, c_int64, c_void_p, c_void_p),
    "tenon_plan_prepare_bytes": (c_int, c_void_p, c_int64, POINTER(c_int64)),
    "tenon_plan_run_steps": (c_int, c_void_p, c_int32, c_size_t, c_size_t, c_int64, POINTER(c_void_p), c_size_t, c_void_p, c_int32, c_void_p),
}
