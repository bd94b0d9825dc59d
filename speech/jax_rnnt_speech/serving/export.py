"""A model as one file that runs without this package: samples to labels, and the vocabulary.

`jax.export.deserialize` reads the file. Behind the program there is a zip, with `model.json` in it.
"""

import json
import zipfile

import jax
import jax.numpy as jnp
from jax import export as exporting

from jax_rnnt_speech.data.tokens import SILENT
from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.system import UserError, outputs

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
DATE = 1980, 1, 1, 0, 0, 0  # of the member, so that equal models are equal files


def program_of(model):
    """A function of samples [B, S] in [-1, 1] and their numbers [B]: what greedy search finds in them."""

    def program(samples, lengths):
        """-> labels, frames, log-probabilities [B, L] and the number of each, [B]."""
        extractor, network = model.extractor, model.network(model.params)
        x = model.standardised(extractor(samples, jnp, lengths))
        found = search(model, network, *network.encode(x, extractor.counts(lengths, jnp)))
        return found.labels, found.frames, found.label_log_probs, found.counts

    return jax.jit(program)


def write(model, path, seconds, platforms):
    """Writes the program for recordings that are padded to so many seconds."""
    tokens, extractor = model.tokens, model.extractor
    rate, samples = extractor.rate, round(seconds * extractor.rate)
    if not extractor.count(samples) or seconds > model.longest:
        most = "one frame or more" + (f", and {model.longest:g} seconds at most" if model.longest < 1e9 else "")
        raise UserError(f"--seconds {seconds:g}: the model hears {most}")
    print(f"lowering for {', '.join(platforms)}", flush=True)
    shape = exporting.symbolic_shape(f"recordings, {samples}")
    shapes = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    made = exporting.export(program_of(model), platforms=platforms)(*shapes)
    about = {"rate": rate, "seconds": model.seconds, "samples": samples, "platforms": platforms}
    about |= {"labels": ["" if x in SILENT else x for x in tokens.texts], "separator": tokens.separator}
    with outputs.whole(path) as part:
        part.write_bytes(made.serialize())
        with zipfile.ZipFile(part, "a") as file:
            file.writestr(zipfile.ZipInfo("model.json", DATE), json.dumps(about, ensure_ascii=False))
