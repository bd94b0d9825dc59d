"""Transducer losses for PyTorch on a GPU. Those that can be imported take part. Each maps
(logits, targets, logit_lengths, target_lengths) to the mean loss over the batch; the last class is the blank.
"""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import reference_numpy


def torchaudio():
    from torchaudio.functional import rnnt_loss

    return lambda *arrays: rnnt_loss(*arrays, blank=-1, reduction="mean")


def warp_rnnt():
    """Takes log-probabilities, float32 only."""
    import torch
    from warp_rnnt import rnnt_loss

    def loss(logits, *rest):
        log_probs = torch.log_softmax(logits.float(), -1)
        return rnnt_loss(log_probs, *rest, blank=logits.shape[-1] - 1, gather=True, reduction="mean")

    return loss


def nemo_numba():
    from nemo.collections.asr.parts.numba.rnnt_loss.rnnt_pytorch import rnnt_loss

    def loss(logits, *rest):
        rest = [x.long() for x in rest]
        return rnnt_loss(logits, *rest, blank=logits.shape[-1] - 1, reduction="mean").mean()

    return loss


def nemo_triton():
    from nemo.collections.asr.parts.triton.rnnt_logprobs import rnnt_logprobs_triton
    from nemo.collections.asr.parts.triton.rnnt_loss import rnnt_loss_triton

    def loss(logits, targets, *lengths):
        scores = rnnt_logprobs_triton(logits, targets, logits.shape[-1] - 1, *lengths)
        return rnnt_loss_triton(*scores, *lengths).mean()

    return loss


# Name, function that makes the loss, its package, and the types of logits that it takes.
PEERS = (
    ("torchaudio", torchaudio, "torchaudio", ("float32",)),
    ("warp-rnnt", warp_rnnt, "warp-rnnt", ("float32",)),
    ("NeMo, numba", nemo_numba, "nemo-toolkit", ("float32",)),
    ("NeMo, Triton", nemo_triton, "nemo-toolkit", ("float32", "bfloat16")),
)


class Torch:
    """`losses`: the peers by name. `missing`: the reasons why others cannot be imported."""

    def __init__(self):
        self.losses, self.missing, self.versions = {}, {}, {}
        try:
            import torch
        except (ImportError, OSError) as error:
            self.torch, self.missing = None, {"all": f"torch cannot be imported ({error})"}
            return
        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self.versions["torch"] = torch.__version__
        for name, make, package, dtypes in PEERS:
            try:
                self.losses[name] = make(), dtypes
                self.versions[package] = importlib.metadata.version(package)
            except Exception as error:  # an import may raise anything
                self.missing[name] = f"{type(error).__name__}: {error}"

    def wait(self, _=None):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def release(self):
        if self.torch is not None and self.device == "cuda":
            self.torch.cuda.empty_cache()

    def names(self, dtype):
        return [name for name, (_, dtypes) in self.losses.items() if dtype in dtypes]

    def step(self, name, arrays):
        """Loss and gradient for these JAX arrays, without a copy."""
        logits, *rest = (self.torch.from_dlpack(x) for x in arrays)
        loss, _ = self.losses[name]

        def run(_=0):
            x = logits.detach().requires_grad_()
            value = loss(x, *rest)
            value.backward()
            return value.detach(), x.grad

        return run


# ---------------------------------------------------------------------------------------------------- wrong answers

# (what, logits [B, T, U1, V], targets, logit lengths, target lengths, clamp)
QUESTIONS = (
    ("one frame", np.array([[[[1, 0, 2], [0, 1, 0]]]]), [[0]], [1], [1], -1.0),
    ("one frame, beside a longer sequence", np.arange(24.0).reshape(2, 2, 2, 3) % 5, [[0], [1]], [2, 1], [1, 1], -1.0),
    ("no label", np.arange(9.0).reshape(1, 3, 1, 3) % 4, np.zeros((1, 0)), [3], [0], -1.0),
    ("no label, beside a sequence with one", np.arange(24.0).reshape(2, 2, 2, 3) % 5, [[0], [1]], [2, 2], [1, 0], -1.0),
    # The clamp acts on both sides: unclamped gradients reach from below -0.05 to above 0.05.
    ("clamp 0.05", np.arange(12.0).reshape(1, 2, 2, 3) % 5, [[0]], [2], [1], 0.05),
)


def answers(torch, ours):
    """Losses and gradients for QUESTIONS: float64, torchaudio on this device and on the CPU, `ours`."""
    from torchaudio.functional import rnnt_loss

    def ask(device, logits, targets, logit_lengths, target_lengths, clamp):
        torch_ = torch.torch
        # Fills freed memory, which the loss may get uncleared: it must not hold the right answer by chance.
        held = [torch_.full((n,), 12345.0, device=device) for n in (1, 2, 8, 32, 128, 512) for _ in range(16)]
        del held
        x = torch_.tensor(logits, dtype=torch_.float32, device=device, requires_grad=True)
        rest = [torch_.tensor(y, device=device) for y in (targets, logit_lengths, target_lengths)]
        values = rnnt_loss(x, *rest, blank=-1, clamp=clamp, reduction="none")
        values.sum().backward()
        return values.detach().cpu().numpy(), x.grad.cpu().numpy()

    found = []
    for what, logits, targets, logit_lengths, target_lengths, clamp in QUESTIONS:
        integers = [np.asarray(x, np.int32) for x in (targets, logit_lengths, target_lengths)]
        logits = logits.astype(np.float32)
        truth = reference_numpy.loss_and_gradient(logits, *integers, clamp=clamp)
        row = {"what": what, "logits": logits.tolist(), "clamp": clamp}
        row |= dict(zip(("targets", "logit_lengths", "target_lengths"), (x.tolist() for x in integers)))
        row["true_loss"], row["true_gradient"] = (x.tolist() for x in truth)
        for name, run in (
            (f"torchaudio on {torch.device}", lambda *p: ask(torch.device, *p)),
            ("torchaudio on cpu", lambda *p: ask("cpu", *p)),
            ("ours", ours),
        ):
            try:
                loss, gradient = (np.asarray(x, np.float64) for x in run(logits, *integers, clamp))
            except Exception as error:
                row[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            off = [float(np.max(np.abs(a - b), initial=0)) for a, b in zip((loss, gradient), truth)]
            row[name] = {
                "loss": loss.tolist(),
                "gradient": gradient.tolist(),
                "loss_off": off[0],
                "gradient_off": off[1],
            }
            row[name]["right"] = bool(max(off) < 1e-4)  # false for NaN
        found.append(row)
    return found
