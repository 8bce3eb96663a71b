"""Compressors: what a gradient goes through on its way to other workers."""

from dome.compression.codec import Codec
from dome.compression.error_feedback import ErrorFeedback
from dome.compression.gaussian import GaussianSketch
from dome.compression.hadamard import HadamardSketch
from dome.compression.message import Message, sum_messages
from dome.compression.powersgd import PowerSGD
from dome.compression.protocol import Compressor, Unbiased
from dome.compression.qsgd import QSGD
from dome.compression.randomk import RandomK
from dome.compression.signsgd import SignSGD
from dome.compression.terngrad import TernGrad
from dome.compression.topk import TopK

__all__ = [
    "QSGD",
    "Codec",
    "Compressor",
    "ErrorFeedback",
    "GaussianSketch",
    "HadamardSketch",
    "Message",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "TopK",
    "Unbiased",
    "sum_messages",
]
