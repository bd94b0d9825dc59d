"""Live text by encoders that see whole windows: that of the whole where each window has all that a row sees."""

import numpy as np
import pytest

from jax_rnnt_speech.recognition import recognise
from jax_rnnt_speech.recognition.live import Windowed
from jax_rnnt_speech.recognition.search import Decoding
from support import CONVOLUTIONAL, asr, random_model


@pytest.mark.parametrize(
    ("beam", "options"), [(0, {"loss": "tdt", "durations": (0, 1, 4)}), pytest.param(3, {}, marks=pytest.mark.slow)]
)
def test_windows(beam, options):
    """Also where durations reach over a cut; whatever pieces samples come in; short ones are one window."""
    model = random_model(**CONVOLUTIONAL, chunk=0, **options)
    samples = np.random.default_rng(1).normal(size=16000).astype(np.float32) * (1 + np.sin(np.arange(16000) / 500))
    samples *= 0.1
    (whole,) = recognise.transcribe(model, [("", samples)], Decoding(beam))
    sizes = {"left": 0.4, "chunk": 5 * model.seconds, "right": 0.4}  # a row sees less than 0.2 s around it
    found = []
    for cuts in ([], [1, 700, 701, 9000], range(333, 16000, 333)):
        live, heard, opened = Windowed(model, Decoding(beam), **sizes), [], []
        run, most = live.slots.run, 0
        live.slots.run = lambda steps, run=run, seen=opened: seen.append(run(steps)[0]) or seen[-1:]
        for piece in np.split(samples, cuts):
            heard += live.feed(piece)
            most = max(most, len(live.samples))
        found.append(heard + live.finish())
        if len(cuts) > 40:
            assert most <= sum(sizes.values()) * 8000 + 333 + 2 * live.step
    assert [x.text for x in found[0]] == whole.text.split() and len(whole.labels) > 20
    assert found[0] == found[1] == found[2]
    counted = [x for part, *_ in opened for x in part.labels]
    assert counted == whole.labels[: len(counted)] and len(opened) > 5
    if not beam:  # each window's open labels are what the next ones make final
        frames = np.array(whole.frames)
        for part, unsure, _ in opened[:-1]:
            if unsure.labels:
                place = np.searchsorted(frames, unsure.frames[0])
                assert unsure.labels[:2] == whole.labels[place:][:2] or unsure.frames[0] in part.frames
    live = Windowed(model, Decoding(beam), left=1, chunk=1, right=1)
    assert [x.text for x in live.feed(samples) + live.finish()] == whole.text.split()
    assert live.row == 0  # all of it was the last window
    for more, message in (({"chunk": 0.001}, "the least chunk"), ({"left": 1e9}, "the model hears 3600 s at most")):
        with pytest.raises(asr.system.UserError, match=message):
            Windowed(model, **more)
    with pytest.raises(asr.system.UserError, match="this one streams"):
        Windowed(random_model(**CONVOLUTIONAL))
