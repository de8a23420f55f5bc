"""The fused operations, and the order in which they are tried."""

from .. import _registry
from .backward_activation_bias import BackwardActivationBias
from .bias_activation import BiasActivation
from .bias_dropout_add import BackwardBiasDropoutAdd, ForwardBiasDropoutAdd
from .forward_linear_bias_activation import ForwardLinearBiasActivation
from .planned import Planned

__all__ = [
    "BackwardActivationBias",
    "BackwardBiasDropoutAdd",
    "BiasActivation",
    "ForwardBiasDropoutAdd",
    "ForwardLinearBiasActivation",
    "Planned",
]

# A bias before a dropout goes with it, where one kernel adds, drops and adds again.
_registry.register_forward_fusion(ForwardBiasDropoutAdd.fuse_forward_ops)
_registry.register_forward_fusion(ForwardLinearBiasActivation.fuse_forward_ops)
_registry.register_backward_fusion(BackwardBiasDropoutAdd.fuse_backward_ops)
_registry.register_backward_fusion(BackwardActivationBias.fuse_backward_ops)
_registry.PAIRS.append(BiasActivation.fuse_pairs)
