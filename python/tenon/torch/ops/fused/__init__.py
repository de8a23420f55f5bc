"""Fused operations that users may construct and register. Each is a plan of its basic ops."""

from .backward_activation_bias import BackwardActivationBias
from .forward_linear_bias_activation import ForwardLinearBiasActivation

__all__ = ["BackwardActivationBias", "ForwardLinearBiasActivation"]
