import pathlib
import random
import wave

import numpy as np

RATE, TONES = 8000, dict(zip("abcdefg", (400, 500, 630, 790, 1000, 1260, 1590)))  # hertz
WORDS = "abba", "bag", "cab", "cafe", "dad", "egg", "fade", "gag"
draw, noise = random.Random(0), np.random.default_rng(0)
for folder, count in (("train", 200), ("valid", 20), ("test", 20)):
    pathlib.Path(folder).mkdir(exist_ok=True)
    for i in range(count):
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))
        sound = []
        for letter in text:
            time = np.arange(int(RATE * draw.uniform(0.08, 0.14))) / RATE
            sound += [np.sin(2 * np.pi * TONES.get(letter, 0) * time), np.zeros(int(0.04 * RATE))]
        samples = np.concatenate(sound) + noise.normal(0, 0.1, sum(map(len, sound)))
        with wave.open(f"{folder}/{i:03}.wav", "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((8000 * samples).astype("<i2").tobytes())
        pathlib.Path(f"{folder}/{i:03}.txt").write_text(text)
