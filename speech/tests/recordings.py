"""Audio files of every format, and a cut of Lhotse, for tests of what is read."""

import av
import numpy as np

RATE = 16000
TIMES = np.arange(3 * RATE) / RATE
SWEEP = 0.3 * np.sin(2 * np.pi * (300 + 200 * TIMES) * TIMES)  # tells places apart
FORMATS = {
    "wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "opus": "libopus", "m4a": "aac", "mp4": "aac",
    "webm": "libopus", "aiff": "pcm_s16be", "aac": "aac",
}  # fmt: skip


def encode(path, x=SWEEP, rate=RATE, codec=None, container=None, **options):
    """Writes samples [S] or [2, S] in the format of the name."""
    codec, layout = codec or FORMATS[path.suffix[1:]], "mono" if np.ndim(x) == 1 else "stereo"
    container = container or {".opus": "ogg", ".aac": "adts", ".m4a": "ipod"}.get(path.suffix)
    with av.open(str(path), "w", format=container, options=options) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(np.atleast_2d(np.float32(x))), "fltp", layout)
        frame.sample_rate = rate
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(stream.format, stream.layout, rate, size)
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            file.mux(stream.encode(part))


def cut(sources, supervisions, **more):
    recording = {"id": "r", "sources": sources, "sampling_rate": RATE, "num_samples": 48000, "duration": 3.0}
    common = {"id": "r-0", "start": 0.5, "duration": 2.0, "channel": 0, "type": "MonoCut"}
    return common | {"recording": recording, "supervisions": supervisions} | more
