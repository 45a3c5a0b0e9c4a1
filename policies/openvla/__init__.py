"""OpenVLA and OpenVLA-OFT checkpoints as policies (arXiv 2406.09246, 2502.19645)."""

from policies.openvla.config import OpenVLAConfig
from policies.openvla.policy import OpenVLA, OpenVLAL1

__all__ = ["OpenVLA", "OpenVLAConfig", "OpenVLAL1"]
