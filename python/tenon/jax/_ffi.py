"""The handlers of libtenon as XLA FFI targets."""

from __future__ import annotations

try:
    import jax
except ImportError as e:
    raise ImportError(
        "tenon.jax: jax cannot be imported; install it with pip install 'tenon-kernels[jax]'"
    ) from e

from .. import _lib

ACT_LU = "tenon_act_lu_ffi"
DACT_LU = "tenon_dact_dbias_quantize_ffi"
DEQUANTIZE = "tenon_dequantize_ffi"

# XLA target name -> C symbol that executes it on the CPU. Symbols for CUDA and for the initialise
# stage have suffixes.
_SYMBOLS = {
    ACT_LU: "tenon_ActLu",
    DACT_LU: "tenon_DActLuDBiasQuantize",
    DEQUANTIZE: "tenon_Dequantize",
}


_PLATFORMS = {"cpu": "", "CUDA": "Cuda"}  # XLA platform name -> suffix


def register() -> None:
    """Registers the handlers with XLA for CPU and CUDA. Registration needs no GPU."""
    for target, symbol in _SYMBOLS.items():
        for platform, suffix in _PLATFORMS.items():
            name = symbol + suffix
            try:
                handlers = {
                    "initialize": getattr(_lib.lib, name + "Initialize"),
                    "execute": getattr(_lib.lib, name),
                }
            except AttributeError as e:
                raise ImportError(
                    f"tenon.jax: {_lib.path_of_libtenon()} was built without the XLA handlers "
                    f"({name} is missing); install the wheel tenon-kernels, or pip install jaxlib "
                    "and build again (CMake: -DTENON_XLA_INCLUDE_DIR=$(python -c 'import jax; "
                    "print(jax.ffi.include_dir())'))"
                ) from e
            capsules = {stage: jax.ffi.pycapsule(handler) for stage, handler in handlers.items()}
            jax.ffi.register_ffi_target(target, capsules, platform=platform)


register()
