"""The command line: transcribes recordings, or fine-tunes a checkpoint and writes it for `transformers` again.

What ends a command is one line, and the exit status 2. With bad audio files among others, `transcribe` ends with 1.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import optax
from flax import nnx

from jax_rnnt_speech import audio, config, corpora
from jax_rnnt_speech.config import UserError, amount, positive, run

from .finetune import batched, train_step
from .inputs import read_manifest, tokenizer_of
from .transcribe import labels_of, stream, transcribe
from .weights import load, save

READING = "normalize", "audio_column", "text_column"  # options of rnnt-speech


def opened(folder):
    """What `load` returns. Its errors are the user's here."""
    try:
        return load(folder)
    except ValueError as error:
        raise UserError(error) from None


def run_transcribe(args):
    model, extractor = opened(args.folder)
    if args.stream and not model.encoder.config.causal:
        kind = model.encoder.config.model_type
        raise UserError(f"--stream needs a nemotron_asr_streaming_encoder, got the {kind} of {args.folder}")
    tokenizer, good = tokenizer_of(args.folder), []
    for file in args.files:
        try:
            good.append((file, audio.read(file, extractor.sampling_rate)))
        except UserError as error:
            print(f"parakeet: {error}", file=sys.stderr)
    files, recordings = zip(*good) if good else ((), ())
    if args.stream:
        results = ([row for part in stream(model, extractor, x) for row in labels_of(part)[0]] for x in recordings)
    else:
        results = labels_of(transcribe(model, extractor, recordings)) if good else ()
    for file, labels in zip(files, results):
        print(f"{file}: {tokenizer.decode(labels) if tokenizer else labels}", flush=True)
    return 1 if len(good) < len(args.files) else 0


def run_finetune(args):
    if args.output.resolve() == args.folder.resolve():
        raise UserError(f"--output must not be the folder that is tuned, got {args.output}")
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output must be a folder, got the file {args.output}")
    if args.output.exists() and any(args.output.iterdir()) and not args.overwrite:
        raise UserError(f"--output must be an empty folder, got {args.output}: --overwrite writes into it")
    model, extractor = opened(args.folder)
    reading = {name: getattr(args, name) for name in READING if hasattr(args, name)}
    data, report = read_manifest(args.manifest, args.folder, model, extractor, **reading)
    for line in report.lines():
        print(line)
    args.output.mkdir(parents=True, exist_ok=True)  # before the training, which a failure would lose
    rng, size = np.random.default_rng(0), min(args.batch, len(data))
    optimizer = nnx.Optimizer(model, optax.adamw(args.learning_rate), wrt=nnx.Param)
    model.train()
    for step in range(args.steps):
        entries, labels = zip(*(data[i] for i in rng.choice(len(data), size, replace=False)))
        recordings = [corpora.samples_of(x, extractor.sampling_rate) for x in entries]
        loss = float(train_step(model, optimizer, *batched(extractor, recordings, labels)))
        if not np.isfinite(loss):
            raise UserError(f"step {step + 1}: the loss must be finite, got {loss}; nothing is written")
        print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    try:
        save(model, args.output, args.folder)
    except ValueError as error:
        raise UserError(error) from None
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="parakeet", description="Parakeet and Nemotron in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("transcribe", help="texts of audio files; labels without tokenizers or tokenizer.json")
    one.add_argument("folder", type=Path, help="config.json, preprocessor_config.json, *.safetensors")
    one.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of any format, rate and number of channels")
    one.add_argument("--stream", action="store_true", help="part by part: Nemotron")
    one.set_defaults(run=run_transcribe)
    one = commands.add_parser("finetune", help="train a checkpoint on recordings with texts")
    one.add_argument("folder", type=Path, help="config.json, preprocessor_config.json, *.safetensors")
    one.add_argument("manifest", type=Path, help="or a folder, as rnnt-speech check reads it")
    one.add_argument("--output", type=Path, required=True, help="folder of the tuned checkpoint")
    one.add_argument("--overwrite", action="store_true", help="a checkpoint that is in --output")
    one.add_argument("--steps", type=positive, default=100, help="(%(default)s)")
    one.add_argument("--batch", type=positive, default=8, help="utterances a step (%(default)s)")
    one.add_argument("--learning-rate", type=amount, default=1e-5, help="(%(default)s)")
    config.add_options(one, READING)
    one.set_defaults(run=run_finetune)
    run(parser, arguments, "interrupted")
