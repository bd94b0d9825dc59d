"""A training step of `transformers` in PyTorch beside ours: time and memory, loss alone and whole step.

    PYTHONPATH=speech python lab/benchmarks/parakeet.py --torch PYTHON    # that has torch, torchaudio and transformers

Both have the same random weights, batch and AdamW, without dropout. Each measurement is a process of its own; they take
turns, and the table has the shortest time and the least peak of resident memory: the first process of ours compiles,
the others have its programs, as a run has that goes on. --json has all. The first losses must agree.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ENCODER = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, num_mel_bins=80)
ENCODER |= dict(dropout=0.0, layerdrop=0.0, activation_dropout=0.0, attention_dropout=0.0)
SHARED = dict(vocab_size=1025, decoder_hidden_size=320, num_decoder_layers=1, blank_token_id=1024)
UTTERANCES, SECONDS, LABELS = 8, 5, 20
CASES = [(kind, what) for kind in ("rnnt", "tdt") for what in ("loss", "step", "tiles")]
KINDS = {"rnnt": "RNN-T", "tdt": "TDT"}
NAMES = {"loss": "loss alone", "step": "step, all logits in memory", "tiles": "step, logits in tiles"}


def batch():
    """Features, their lengths, targets, their lengths."""
    rng, frames = np.random.default_rng(0), 100 * SECONDS
    lengths = np.linspace(frames, frames * 3 // 4, UTTERANCES).astype(np.int32)
    features = rng.normal(size=(UTTERANCES, frames, ENCODER["num_mel_bins"])).astype(np.float32)
    features *= (np.arange(frames) < lengths[:, None])[..., None]
    targets = rng.integers(3, 1000, (UTTERANCES, LABELS)).astype(np.int32)
    return features, lengths, targets, np.linspace(LABELS, LABELS // 2, UTTERANCES).astype(np.int32)


def repeated(run, repeats):
    """(first value, least seconds) of calls that return a float."""
    first, seconds = run(), []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return first, min(seconds)


def make(folder):
    import torch
    import transformers as hf

    torch.manual_seed(0)
    encoder = hf.ParakeetEncoderConfig(**ENCODER)
    hf.ParakeetForRNNT(hf.ParakeetRNNTConfig(**SHARED, encoder_config=encoder)).save_pretrained(folder / "rnnt")
    hf.ParakeetForTDT(hf.ParakeetTDTConfig(**SHARED, encoder_config=encoder)).save_pretrained(folder / "tdt")
    for kind in ("rnnt", "tdt"):
        hf.ParakeetFeatureExtractor().save_pretrained(folder / kind)


def theirs(folder, kind, what, repeats):
    import torch
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.set_num_threads(2)
    model = (hf.ParakeetForTDT if kind == "tdt" else hf.ParakeetForRNNT).from_pretrained(folder / kind).train()
    for module in model.modules():  # ours keeps the stored statistics
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
    features, lengths, targets, target_lengths = (torch.tensor(x) for x in batch())
    mask = torch.arange(features.shape[1]) < lengths[:, None]
    inputs = torch.nn.functional.pad(targets.long(), (1, 0), value=model.config.blank_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def loss_of(logits, lengths):
        width, options = model.config.vocab_size, dict(labels=targets.long(), reduction="mean_batch")
        options |= dict(logit_lengths=lengths, label_lengths=target_lengths, blank_token_id=model.config.blank_token_id)
        if kind == "rnnt":
            return model.loss_function(logits, **options)
        heads = logits[..., :width], logits[..., width:]
        return model.loss_function(*heads, durations=model.config.durations, **options)

    def forward():
        rows = model.get_audio_features(input_features=features, attention_mask=mask)
        return model(encoder_outputs=rows, decoder_input_ids=inputs).logits, rows.attention_mask.sum(-1)

    def step():
        optimizer.zero_grad()
        loss = loss_of(*forward())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    if what == "step":
        return repeated(step, repeats)
    with torch.no_grad():
        logits, lengths = forward()
    logits.requires_grad_()

    def loss_alone():
        logits.grad = None
        loss = loss_of(logits, lengths)
        loss.backward()
        return float(loss.detach())

    return repeated(loss_alone, repeats)


def ours(folder, kind, what, repeats):

    import jax
    import optax

    from jax_rnnt_speech import models
    from jax_rnnt_speech.training import parts, steps

    model = models.open_model(folder / kind)
    features, lengths, targets, target_lengths = map(jax.numpy.asarray, batch())
    arrays = {"features": features, "lengths": lengths, "targets": targets, "target_lengths": target_lengths}
    if what != "loss":
        joint = "tiles" if what == "tiles" else "logits"
        model.config = model.config.replace(joint=joint, time_masks=0, mel_masks=0)
        arrays |= {"valid": np.ones(UTTERANCES, bool), "spans": np.zeros((UTTERANCES, 0, 2), np.int32)}
        chosen = parts.Parts(model.config, model.params)
        optimizer = steps.if_finite(optax.adamw(1e-5, weight_decay=0.01))
        step = steps.make_train_step(model, chosen, optimizer)
        frozen = chosen.frozen(model.params)
        state = steps.first_state(model.config.optimiser, optimizer, chosen.free(model.params))

        def one_step():
            nonlocal state
            state, numbers = step(state, arrays, frozen, 1)
            return float(numbers["loss"])

        return repeated(one_step, repeats)

    @jax.jit
    def all_logits(params):
        network = model.network(params)
        x = model.encoded(network, features, arrays)
        return network.joint(x.frames[:, :, None], x.states[:, None]), x.frame_lengths

    logits, lengths = all_logits(model.params)
    compute = jax.jit(jax.value_and_grad(lambda *x: model.loss(*x).mean()))
    return repeated(lambda: float(jax.block_until_ready(compute(logits, targets, lengths, target_lengths))[0]), repeats)


def measure(python, side, folder, kind, what, repeats):
    """{first, seconds, peak} of one process."""
    command = [python, __file__, "--measure", side, str(folder), kind, what, "--repeats", str(repeats)]
    kept = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | kept)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    figures = json.loads(done.stdout.splitlines()[-1])
    print(side, kind, what, figures, file=sys.stderr, flush=True)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="in each process (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all figures go, with the load of the machine")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        side, folder, kind, what = args.measure
        if side == "make":
            make(Path(folder))
            seconds = 0.0, 0.0
        else:
            seconds = (ours if side == "ours" else theirs)(Path(folder), kind, what, args.repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(dict(zip(("first", "seconds", "peak"), (*seconds, peak)))))
        return
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        measure(args.torch, "make", folder, "", "", 0)
        runs_of = {}
        for _ in range(args.rounds):
            for kind, what in CASES:
                for side, python in (("ours", sys.executable), ("theirs", args.torch)):
                    if (side, what) != ("theirs", "tiles"):
                        one = measure(python, side, folder, kind, what, args.repeats)
                        runs_of.setdefault((kind, what, side), []).append(one)
    if args.json:
        found = {"load": load, "runs": {" ".join(case): figures for case, figures in runs_of.items()}}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print("| | transformers: ms | MiB | jax_rnnt: ms | MiB |\n|---|---|---|---|---|")
    for kind, what in CASES:
        sides = [
            runs_of[kind, what if side == "ours" else what.replace("tiles", "step"), side]
            for side in ("theirs", "ours")
        ]
        first = [runs[0]["first"] for runs in sides]
        np.testing.assert_allclose(*first, rtol=1e-4, err_msg=f"{kind}, {what}: the losses differ")
        cells = [f"{1000 * min(x['seconds'] for x in runs):.0f} | {min(x['peak'] for x in runs):.0f}" for runs in sides]
        print(f"| {KINDS[kind]}, {NAMES[what]} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
