"""Compressors: what a gradient goes through on its way to other workers."""

from dome.compression.gaussian import GaussianSketch, SketchMessage

__all__ = ["GaussianSketch", "SketchMessage"]
