"""Fine-tunes a checkpoint of Parakeet or Nemotron, and writes it for `transformers` again: docs/parakeet.md.

    cd examples && python -m parakeet.finetune FOLDER MANIFEST --output TUNED

A line of the manifest is {"audio_filepath": "a.wav", "text": "..."}, as in NeMo. In the place of the text may stand
"labels", a list of integers. A text needs the package tokenizers, and tokenizer.json beside the weights.
"""

import argparse
import functools
import json
from pathlib import Path

import numpy as np
import optax
from flax import nnx

from .recordings import read_wav
from .weights import load, save


def batched(extractor, recordings, labels, frames=128, columns=8):
    """Arrays of a batch: features, their lengths, targets, their lengths.

    Padded to multiples of `frames` and `columns`: each shape is compiled once.
    """
    features, feature_lengths = extractor(recordings)
    target_lengths = np.array([len(x) for x in labels], np.int32)
    targets = np.zeros((len(labels), -(-max(target_lengths.max(), 1) // columns) * columns), np.int32)
    for row, x in zip(targets, labels):
        row[: len(x)] = x
    more = -features.shape[1] % frames
    return np.pad(features, [(0, 0), (0, more), (0, 0)]), feature_lengths, targets, target_lengths


@functools.partial(nnx.jit, static_argnames="tiles")
def train_step(model, optimizer, features, feature_lengths, targets, target_lengths, tiles=True):
    """The mean loss of the batch, after which model and optimizer have made a step."""

    def compute(model):
        logits, lengths = model.logits(features, feature_lengths, targets, tiles=tiles)
        return model.criterion()(logits, targets, lengths, target_lengths)

    loss, gradient = nnx.value_and_grad(compute)(model)
    optimizer.update(model, gradient)
    return loss


def read_manifest(file, folder, rate):
    """[(recording, labels)] of a manifest, whose paths are relative to it."""
    file, tokenizer, found = Path(file), None, []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        if "labels" not in entry:
            if tokenizer is None:
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
            entry["labels"] = tokenizer.encode(entry["text"], add_special_tokens=False).ids
        found.append((read_wav(file.parent / entry["audio_filepath"], rate), entry["labels"]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="config.json, preprocessor_config.json, *.safetensors")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the tuned checkpoint")
    parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="utterances a step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="(%(default)s)")
    args = parser.parse_args()
    model, extractor = load(args.folder)
    data = read_manifest(args.manifest, args.folder, extractor.sampling_rate)
    rng, size = np.random.default_rng(0), min(args.batch, len(data))
    optimizer = nnx.Optimizer(model, optax.adamw(args.learning_rate), wrt=nnx.Param)
    model.train()
    for step in range(args.steps):
        chosen = rng.choice(len(data), size, replace=False)
        loss = train_step(model, optimizer, *batched(extractor, *zip(*(data[i] for i in chosen))))
        print(f"step {step + 1}: loss {float(loss):.4f}", flush=True)
    save(model, args.output, args.folder)


if __name__ == "__main__":
    main()
