"""Finds speech in a recording, whatever a model wrote there, by the network of Silero VAD (MIT licence), in NumPy.

Its weights are those of silero-vad 6.2.3 for 16 kHz, in float16: activity.safetensors, with their licence next to them.
A chunk of 512 samples gets the probability that somebody speaks in it; an LSTM goes from chunk to chunk.
"""

import array
import functools
import math
from pathlib import Path

import av
import numpy as np
from safetensors.numpy import load_file

RATE, CHUNK, CONTEXT = 16000, 512, 64  # samples a second, in a chunk, and before it
SECONDS = CHUNK / RATE
BEGINS, ENDS = 0.5, 0.35  # probabilities at which speech begins and ends
PAUSE = 0.1  # seconds below ENDS that end speech
FILTER, HOP = 256, 128  # samples of a spectrum
ROWS = 2048  # chunks whose convolutions are computed at once
QUIET = 0.1  # probability below which it is sure that nobody speaks
ENOUGH = 16  # chunks that are needed: of 849 clips of 0.2 s within speech, 5 stay below QUIET, of 760 of 0.5 s none
KNOWN = 1.0  # seconds of speech which show that the detector recognises the voices of a recording
STEADY, FAINT = 4.0, 1e-3  # ratio of loudness within noise, and loudness that always counts as silence


@functools.cache
def weights():
    file = Path(__file__).with_name("activity.safetensors")
    return {name: x.astype(np.float32) for name, x in load_file(file).items()}


def convolved(x, name, stride=1):
    """Returns relu of a convolution of x [N, T, C] with three taps, and a zero at both ends."""
    kernel = weights()[f"{name}.weight"]  # [D, C, 3]
    x = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    count = (x.shape[1] - 3) // stride + 1
    windows = np.stack([x[:, i * stride : i * stride + 3] for i in range(count)], 1)  # [N, count, 3, C]
    flat = windows.reshape(len(x) * count, -1) @ kernel.transpose(2, 1, 0).reshape(-1, len(kernel))
    return np.maximum(flat + weights()[f"{name}.bias"], 0).reshape(len(x), count, -1)


def spectra(x):
    """Returns magnitudes [N, T, 129] of chunks [N, CONTEXT + CHUNK], whose end is mirrored."""
    x = np.concatenate([x, x[:, -2 : -CONTEXT - 2 : -1]], 1)
    basis = weights()["stft_conv.weight"][:, 0].T  # [FILTER, 258]
    frames = np.lib.stride_tricks.sliding_window_view(x, FILTER, 1)[:, ::HOP]
    parts = frames.reshape(-1, FILTER) @ basis  # one product of two arrays, not one for each chunk
    return np.hypot(*np.split(parts, 2, 1)).reshape(*frames.shape[:2], -1)


def sigmoid(x):
    return (1 + np.tanh(x / 2)) / 2  # exp would overflow


class Detector:
    """Finds probabilities of speech in a recording's chunks. Its samples come at a rate, in pieces of any size."""

    def __init__(self, rate):
        # These belong to the chunks that are not forgotten, from `first` on.
        self.rate, self.probabilities, self.levels, self.first = rate, array.array("f"), array.array("f"), 0
        self.spoken = 0  # chunks with speech
        self.state = np.zeros((2, 128), np.float32)
        self.resampler = None if self.rate == RATE else av.AudioResampler("flt", "mono", RATE)
        self.samples = np.zeros(CONTEXT, np.float32)

    def add(self, samples):
        """Takes more samples float32 [S]."""
        if self.resampler is not None and len(samples):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], "flt", "mono")
            frame.sample_rate = self.rate
            samples = [x.to_ndarray()[0] for x in self.resampler.resample(frame)]
        else:
            samples = [samples]
        self.samples = np.concatenate([self.samples, *samples])
        while (count := min((len(self.samples) - CONTEXT) // CHUNK, ROWS)) > 0:
            x = np.lib.stride_tricks.sliding_window_view(self.samples, CONTEXT + CHUNK)[: count * CHUNK : CHUNK]
            self.probabilities.extend(found := self.of(x))
            self.levels.extend(np.sqrt(np.mean(x[:, CONTEXT:] ** 2, 1)).tolist())
            self.spoken += sum(p >= BEGINS for p in found)
            self.samples = self.samples[count * CHUNK :]

    def of(self, x):
        """Returns probabilities of the next chunks [N, CONTEXT + CHUNK]."""
        x = convolved(spectra(x), "conv1")
        for name, stride in (("conv2", 2), ("conv3", 2), ("conv4", 1)):
            x = convolved(x, name, stride)
        arrays = weights()
        # Gates i, f, o, g: a sigmoid is half a tanh of half, so one tanh serves all of them: 12 us a chunk in place
        # of 60.
        order, half = np.r_[0:256, 384:512, 256:384], np.repeat(np.float32([0.5, 1]), (384, 128))
        biases = arrays["lstm_cell.bias_ih"] + arrays["lstm_cell.bias_hh"]
        inputs = (x[:, 0] @ arrays["lstm_cell.weight_ih"].T + biases)[:, order] * half
        again = np.ascontiguousarray(arrays["lstm_cell.weight_hh"].T[:, order] * half)
        (hidden, cell), rows = self.state, []
        for row in inputs:
            gates = np.tanh(row + hidden @ again)
            i, f, o = 0.5 * gates[:384].reshape(3, 128) + 0.5
            cell = f * cell + i * gates[384:]
            hidden = o * np.tanh(cell)
            rows.append(hidden)
        self.state = np.stack([hidden, cell])
        last = np.maximum(rows, 0) @ arrays["final_conv.weight"][0, :, 0] + arrays["final_conv.bias"][0]
        return sigmoid(last).tolist()

    def forget(self, seconds):
        """Drops the chunks before a time."""
        count = max(0, int(seconds / SECONDS) - self.first)
        del self.probabilities[:count], self.levels[:count]
        self.first += count

    def sure(self, begin, end):
        """Returns True if surely nobody speaks in [begin, end), in seconds. Before and after a recording nobody does.

        A recording in which the detector finds no voice may have one that it cannot recognise, such as whispers, or
        tones that a model has learned to read. There, only silence and steady noise are sure.
        """
        a = max(0, min(math.floor(begin / SECONDS) - self.first, len(self.levels) - ENOUGH))
        b = max(a + ENOUGH, math.ceil(end / SECONDS) - self.first)
        heard, levels = self.probabilities[a:b], self.levels[a:b]
        if len(heard) < ENOUGH or max(heard) >= QUIET:
            return False
        return self.spoken * SECONDS >= KNOWN or max(levels) <= STEADY * min(levels) + FAINT

    def speech(self, since=0.0):
        """Returns [begin, end) in seconds of the stretches with speech, in its chunks since a time."""
        stretches, begin, quiet = [], None, 0
        first = max(self.first, int(since / SECONDS))
        chunks = [*self.probabilities[first - self.first :], *[0.0] * round(PAUSE / SECONDS + 1)]
        for i, x in enumerate(chunks, first):
            quiet = 0 if x >= ENDS else quiet + 1
            if begin is None and x >= BEGINS:
                begin = i
            elif begin is not None and quiet * SECONDS > PAUSE:
                stretches.append((begin * SECONDS, (i + 1 - quiet) * SECONDS))
                begin = None
        return stretches
