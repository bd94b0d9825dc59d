"""Three made-up recordings with labels, which golden files, tests and docs/speech/parakeet.md share."""

import numpy as np

RATE = 16000  # samples a second
LABELS = {
    "targets": np.array([[3, 7, 7, 1, 12], [5, 0, 9, 0, 0], [18, 4, 0, 0, 0]]),
    "target_lengths": np.array([5, 3, 2]),
}


def recordings():
    """[N] float32 arrays [samples]: tones that glide, with noise and a silent end."""
    rng = np.random.default_rng(0)
    waves = []
    for i, samples in enumerate((17_300, 14_080, 9_601)):
        seconds = np.arange(samples) / RATE
        tone = np.sin(2 * np.pi * (150 + 200 * i + 900 * seconds) * seconds) * (1.2 + np.sin(9 * seconds))
        noise = 0.1 * rng.normal(size=samples)
        waves.append(((0.2 * tone + noise) * (seconds < 0.95 * seconds[-1])).astype(np.float32))
    return waves
