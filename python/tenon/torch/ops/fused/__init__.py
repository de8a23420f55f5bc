"""The fused operations, and the order in which they are applied."""

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

# First, so that a bias before a dropout is fused with the dropout: one kernel adds bias, drops, and
# adds the residual.
_registry.register_forward_fusion(ForwardBiasDropoutAdd.fuse_forward_ops)
_registry.register_forward_fusion(ForwardLinearBiasActivation.fuse_forward_ops)
_registry.register_backward_fusion(BackwardBiasDropoutAdd.fuse_backward_ops)
_registry.register_backward_fusion(BackwardActivationBias.fuse_backward_ops)
_registry.PAIRS.append(BiasActivation.fuse_pairs)
