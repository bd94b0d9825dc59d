"""Turns labels and their frames into seconds and words. All of it runs on the host.

Files of words (CTM, TextGrid, SubRip and WebVTT) belong to `rnnt-speech`.
"""

from jax_rnnt.timing._intervals import Interval, frames_to_seconds, intervals
from jax_rnnt.timing._spelling import is_dense, joins
from jax_rnnt.timing._words import words

__all__ = ["Interval", "frames_to_seconds", "intervals", "is_dense", "joins", "words"]
