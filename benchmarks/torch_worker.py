"""Times the PyTorch peers in their own environment: one repetition for each line of JSON on standard input.

{"peer": name, "problem": name in problems.py, "case": name, "seed": n, "stride": n}
-> {"seconds": s, "loss": x, "gradient": [every stride-th element]}
"""

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path
from unittest import mock

import torch
from problems import cases, make


class WarpOptions(ctypes.Structure):
    """struct rnntOptions of warp-transducer's rnnt.h."""

    _fields_ = (
        ("location", ctypes.c_int),  # 0: CPU
        ("num_threads", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("blank_label", ctypes.c_int),
        ("max_frames", ctypes.c_int),
        ("max_columns", ctypes.c_int),
        ("batch_first", ctypes.c_bool),
    )


def warp_transducer(path, threads):
    """The same steps as its PyTorch wrapper on CPU: log_softmax, then the library, which takes log-probabilities."""
    library = ctypes.CDLL(path)

    def pointer(x):
        return ctypes.c_void_p(x.data_ptr())

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, log_probs, targets, logit_lengths, target_lengths):
            B, T, U1, V = log_probs.shape
            gradient, losses = torch.zeros_like(log_probs), torch.zeros(B)
            size = ctypes.c_size_t()
            library.get_workspace_size(T, U1, B, ctypes.c_bool(False), ctypes.byref(size), ctypes.c_size_t(4))
            workspace = torch.empty(size.value, dtype=torch.uint8)
            arrays = map(pointer, (log_probs, gradient, targets, target_lengths, logit_lengths))
            options = WarpOptions(0, threads, None, V - 1, T, U1, True)
            status = library.compute_rnnt_loss(*arrays, V, B, pointer(losses), pointer(workspace), options)
            if status:
                raise RuntimeError(f"compute_rnnt_loss returned {status}")
            ctx.gradient = gradient.div_(B)
            return losses.mean()

        @staticmethod
        def backward(ctx, cotangent):
            return ctx.gradient.mul_(cotangent), None, None, None

    return lambda logits, *rest: Loss.apply(torch.log_softmax(logits, -1), *rest)


def torchaudio_loss():
    from torchaudio.functional import rnnt_loss

    return lambda *arrays: rnnt_loss(*arrays, blank=-1, reduction="mean")


def fast_rnnt_losses():
    """Its simple and its pruned loss, with the inputs of ours."""
    import fast_rnnt

    def boundary(logit_lengths, target_lengths):
        zero = torch.zeros_like(logit_lengths)
        return torch.stack([zero, zero, target_lengths, logit_lengths], 1).long()

    def simple(am, lm, targets, *lengths):
        options = {"termination_symbol": am.shape[-1] - 1, "boundary": boundary(*lengths), "reduction": "mean"}
        return fast_rnnt.rnnt_loss_simple(lm, am, targets.long(), **options)

    def pruned(logits, first, targets, *lengths):
        ranges = first[..., None].long() + torch.arange(logits.shape[2])
        options = {"termination_symbol": logits.shape[-1] - 1, "boundary": boundary(*lengths), "reduction": "mean"}
        return fast_rnnt.rnnt_loss_pruned(logits, targets.long(), ranges, **options)

    return {"fast_rnnt simple": simple, "fast_rnnt pruned": pruned}


def nemo_losses(folder):
    """NeMo's losses in plain PyTorch, loaded from their file alone, since the package imports the whole toolkit.

    The file imports classes that check argument types; mocks replace them. Its TDT loss asks for a GPU, so Tensor.cuda
    is replaced by a function that returns its tensor.
    """
    file = Path(folder) / "nemo" / "collections" / "asr" / "losses" / "rnnt_pytorch.py"
    classes, types_ = types.ModuleType("nemo.core.classes"), mock.MagicMock(__path__=[])
    classes.Loss = torch.nn.Module
    rest = {"nemo": mock.MagicMock(), "nemo.core": mock.MagicMock(), "nemo.core.classes": classes}
    with mock.patch.dict(sys.modules, rest | {"nemo.core.neural_types": types_}):
        spec = importlib.util.spec_from_file_location("nemo_rnnt_pytorch", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self

    def tdt(logits, targets, *lengths):
        durations = [0, 1, 2, 3, 4]
        blank = logits.shape[-1] - len(durations) - 1
        return module.TDTLossPytorch(blank, durations, "mean_batch")(logits, targets, *lengths)

    def multiblank(logits, *rest):
        return module.MultiblankRNNTLossPytorch(logits.shape[-1] - 1, [2, 3, 4], "mean_batch")(logits, *rest)

    return {"NeMo tdt": tdt, "NeMo multiblank": multiblank}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int)
    parser.add_argument("--warp-transducer")
    parser.add_argument("--nemo")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Replies go to the real standard output; output of the libraries goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    peers = {"torchaudio": torchaudio_loss()}
    if args.warp_transducer:
        peers["warp-transducer"] = warp_transducer(args.warp_transducer, args.threads)

    versions = {name: sys.modules[name].__version__ for name in ("torch", "torchaudio")}
    if args.nemo:
        peers |= nemo_losses(args.nemo)
        installed = importlib.metadata.distributions(name="nemo_toolkit", path=[args.nemo])
        versions["nemo"] = next((x.version for x in installed), "unknown")
    try:
        peers |= fast_rnnt_losses()
        versions["fast_rnnt"] = getattr(sys.modules["fast_rnnt"], "__version__", "unknown")
    except ImportError:
        pass
    print(json.dumps({"peers": list(peers), "versions": versions}), file=replies)
    loaded = None
    for line in sys.stdin:
        request = json.loads(line)
        wanted = request.get("problem", "logits"), cases.CASES[request["case"]], request["seed"]
        if loaded != wanted:
            loaded = wanted
            source, rest = make(*wanted)
            source = [torch.from_numpy(x) for x in (source if isinstance(source, tuple) else (source,))]
            rest = [torch.from_numpy(x) for x in rest]
        scores = [x.clone().requires_grad_() for x in source]
        start = time.perf_counter()
        loss = peers[request["peer"]](*scores, *rest)
        loss.backward()
        seconds = time.perf_counter() - start
        gradient = [x for score in scores for x in score.grad.flatten()[:: request["stride"]].tolist()]
        print(json.dumps({"seconds": seconds, "loss": loss.item(), "gradient": gradient}), file=replies)


if __name__ == "__main__":
    main()
