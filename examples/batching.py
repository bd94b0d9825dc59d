"""Batches of similar length with grain: few static shapes, so XLA compiles few programs and computes little padding.

    python examples/batching.py

Utterances are sorted into buckets. A bucket pads to its own number of frames and labels, and its batches have about as
many frames as the others. Grain shuffles within the buckets and then the batches of all; its iterators can be saved and
resumed. The loss reads nothing outside the lengths, so no mask is needed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import AdditiveLogits, RNNTLoss

try:
    import grain
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/batching.py needs {error.name}: run pip install '.[examples]' in the clone.") from None


def batches(utterances, buckets, frames_per_batch, seed):
    """Grain's dataset of one epoch, with `repeat` one of many: dictionaries of arrays, of one shape a bucket.

    `utterances` is a sequence of (features [T, F], targets [U]). `buckets` are pairs (frames, labels) from the smallest
    to the largest; an utterance goes to the first that holds it. What does not fill a batch waits for another epoch,
    which shuffles anew.
    """
    indices = [[] for _ in buckets]
    for i, (features, targets) in enumerate(utterances):
        fits = [len(features) <= frames and len(targets) <= labels for frames, labels in buckets]
        if not any(fits):
            raise ValueError(f"utterance {i} of {len(features)} frames and {len(targets)} labels fits no bucket")
        indices[fits.index(True)].append(i)

    def padded(frames, labels):
        def pad(i):
            features, targets = utterances[i]
            return {
                "features": np.pad(features, ((0, frames - len(features)), (0, 0))),
                "targets": np.pad(targets, (0, labels - len(targets))),
                "lengths": np.int32([len(features), len(targets)]),
            }

        return pad

    parts = []
    for bucket, members in zip(buckets, indices):
        size = max(1, frames_per_batch // bucket[0])
        if len(members) >= size:
            part = grain.MapDataset.source(members).shuffle(seed=seed).map(padded(*bucket))
            parts.append(part.batch(size, drop_remainder=True))
    return grain.MapDataset.concatenate(parts).shuffle(seed=seed)


def main():
    rng = np.random.default_rng(0)
    utterances = []
    for frames in rng.gamma(3.0, 40.0, 400).astype(int).clip(10, 400):
        utterances.append((rng.normal(size=(frames, 16)).astype(np.float32), rng.integers(0, 29, frames // 8)))
    buckets = [(80, 10), (160, 20), (240, 30), (400, 50)]
    parameters = {"encoder": jnp.zeros((16, 30), "float32"), "predictor": jnp.zeros((30, 30), "float32")}

    @jax.jit
    def step(parameters, batch):
        def value(parameters):
            states = jnp.pad(batch["targets"], ((0, 0), (1, 0)), constant_values=29)
            logits = AdditiveLogits(batch["features"] @ parameters["encoder"], parameters["predictor"][states])
            return RNNTLoss()(logits, batch["targets"], batch["lengths"][:, 0], batch["lengths"][:, 1])

        loss, gradient = jax.value_and_grad(value)(parameters)
        return loss, jax.tree.map(lambda x, g: x - 1e-3 * g, parameters, gradient)

    used = padded = 0
    for batch in batches(utterances, buckets, frames_per_batch=3200, seed=0):
        loss, parameters = step(parameters, batch)
        used += batch["lengths"][:, 0].sum()
        padded += batch["features"].shape[0] * batch["features"].shape[1]
        print(f"features {batch['features'].shape}, targets {batch['targets'].shape}: loss {loss:.1f}")
    longest = max(len(features) for features, _ in utterances)
    mean = np.mean([len(features) for features, _ in utterances])
    print(f"{step._cache_size()} programs; {1 - used / padded:.0%} padding, {1 - mean / longest:.0%} with one shape")


if __name__ == "__main__":
    main()
