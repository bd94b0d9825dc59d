"""Labels and their frames to seconds, words and captions, and files of them. All of it runs on the host.

Files: CTM (NIST), TextGrid (Praat), SubRip (SRT) and WebVTT, and what `json` writes.
"""

from jax_rnnt.timing._captions import captions as captions
from jax_rnnt.timing._captions import write_srt as write_srt
from jax_rnnt.timing._captions import write_vtt as write_vtt
from jax_rnnt.timing._files import read_ctm as read_ctm
from jax_rnnt.timing._files import to_json as to_json
from jax_rnnt.timing._files import write_ctm as write_ctm
from jax_rnnt.timing._files import write_textgrid as write_textgrid
from jax_rnnt.timing._intervals import Interval as Interval
from jax_rnnt.timing._intervals import frames_to_seconds as frames_to_seconds
from jax_rnnt.timing._intervals import intervals as intervals
from jax_rnnt.timing._words import words as words

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
