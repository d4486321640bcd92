"""Modules. State between calls is an argument and a result, never kept on a module."""

from .contract import InputExpand, LearnedOutputContract, OutputContract
from .hyper_connection import HyperConnected, HyperConnection, HyperConnectionState
from .recompute import RecomputedStreams, recompute_streams
from .single_pass import Mixes, SinglePassHyperConnection

__all__ = [
    "HyperConnected",
    "HyperConnection",
    "HyperConnectionState",
    "InputExpand",
    "LearnedOutputContract",
    "Mixes",
    "OutputContract",
    "RecomputedStreams",
    "SinglePassHyperConnection",
    "recompute_streams",
]
