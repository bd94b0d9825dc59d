"""Labels and their frames to seconds, words and captions, and files of them. All of it runs on the host.

Files: CTM (NIST), TextGrid (Praat), SubRip (SRT) and WebVTT, and what `json` writes.
"""

from jax_rnnt.timing._captions import captions, write_srt, write_vtt
from jax_rnnt.timing._files import read_ctm, to_json, write_ctm, write_textgrid
from jax_rnnt.timing._intervals import Interval, frames_to_seconds, intervals
from jax_rnnt.timing._words import words

__all__ = [
    "Interval",
    "captions",
    "frames_to_seconds",
    "intervals",
    "read_ctm",
    "to_json",
    "words",
    "write_ctm",
    "write_srt",
    "write_textgrid",
    "write_vtt",
]
