"""Forced alignment: where each label of a known transcript lies, as CTM and TextGrid files.

    python recipes/alignment.py

`runs/recipes/alignment.ctm` has all held-out lines, `alignment.TextGrid` the first one, for Praat. The model sees no
future: a label comes with the columns that show it. Its frames are compared to the true columns of each digit.
"""

import jax
import numpy as np
from _shared import Digits, check, fit, output, parse, usual_loss

from jax_rnnt.timing import frames_to_seconds, intervals, write_ctm, write_textgrid

HOP = 0.01  # a column of pixels counts as 10 ms


def main():
    args = parse(__doc__, steps=600)
    digits = Digits(steps=args.steps, seed=args.seed, chunk=1)
    recogniser = digits.recogniser()
    params = fit(recogniser.params, usual_loss(recogniser), digits)

    @jax.jit
    def align(batch):
        """Frames [B, U] of the best path."""
        model = recogniser.model(params)
        x = recogniser.encoded(model, recogniser.inputs(batch), batch)
        return recogniser.loss.align(model.joint.logits(x.frames, x.states), *x[2:])[1]

    clock, spoken, distances = {"hop": HOP, "subsampling": recogniser.subsampling}, {}, []
    for batch in digits.tests():
        index, valid = batch.pop("index"), batch["valid"]
        for i, frames in zip(index[valid], np.asarray(align(batch))[valid]):
            utterance = digits.test.corpus.utterances[i]
            frames = frames[: len(utterance.text)]
            spoken[utterance.name] = intervals(frames, list(utterance.text), **clock)
            columns = digits.test.corpus.draw(i, np.random.default_rng(i))[1]
            seconds = frames_to_seconds(frames, **clock)
            outside = np.maximum(columns[:, 0] * HOP - seconds, 0) + np.maximum(seconds - columns[:, 1] * HOP, 0)
            distances += list(outside / HOP)
    write_ctm(output("alignment.ctm"), spoken)
    first, seconds = next(iter(spoken)), digits.test.corpus.utterances[0].frames * HOP
    write_textgrid(output("alignment.TextGrid"), {"labels": spoken[first]}, seconds)
    print(f"{output('alignment.ctm')} has {len(spoken)} lines of digits, {output('alignment.TextGrid')} one")
    print(f"labels inside of their digit: {100 * np.mean(np.array(distances) == 0):.1f}%")
    check("mean distance from the digit, columns", float(np.mean(distances)), 1.0)


if __name__ == "__main__":
    main()
