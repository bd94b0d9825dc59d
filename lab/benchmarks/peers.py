"""Times our losses beside those of other libraries in PyTorch: the programs of benchmarks/ with more contestants.

    python lab/benchmarks/peers.py bench                   # torchaudio is installed into build/peers (large)
    python lab/benchmarks/peers.py bench --warp-transducer /path/to/libwarprnnt.so
    python lab/benchmarks/peers.py joint --librispeech
    python lab/benchmarks/peers.py joint --products --flash /path/to/three/files

All other options are those of the program. The peers that can be imported take part, in an environment and a process of
their own: `Worker` starts this file there, which answers a line of JSON on standard input after each repetition. Each
maps (logits, targets, logit_lengths, target_lengths) to the mean over the batch; the last class is the blank. Those of
a joint network map (weight, bias, encoder, predictor, targets, both lengths), with options.
"""

import argparse
import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import types
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import numpy as np

import problems

ENVIRONMENT = Path(__file__).parents[2] / "build/peers"
PACKAGES = ("torch==2.11.0", "torchaudio==2.11.0", "transformers", "numpy")


# ----------------------------------------------------------------------------------------------------------- losses


def logits_of(weight, bias, encoder, predictor):
    return (encoder[:, :, None] + predictor[:, None]).tanh() @ weight + bias


def reduced(losses, reduction):
    return getattr(losses, reduction)()


def torchaudio():
    from torchaudio.functional import rnnt_loss

    def joint(*arrays, blank, reduction):
        logits = logits_of(*arrays[:4]).float()  # it takes no bfloat16
        return reduced(rnnt_loss(logits, *arrays[4:], blank=blank, reduction="none"), reduction)

    return {
        "torchaudio": lambda *arrays: rnnt_loss(*arrays, blank=-1, reduction="mean"),
        "torchaudio, joint": joint,
    }


def transformers():
    """Of its losses one wraps torchaudio's."""
    from transformers.loss.loss_rnnt import rnnt_loss
    from transformers.loss.loss_tdt import tdt_loss

    def rnnt(*arrays, blank, reduction):
        logits = logits_of(*arrays[:4])
        return reduced(rnnt_loss(logits, *arrays[4:], blank % logits.shape[-1], "none"), reduction)

    def tdt(*arrays, blank, reduction, durations):
        tokens, of_durations = logits_of(*arrays[:4]).split([len(arrays[1]) - len(durations), len(durations)], -1)
        targets, *lengths = arrays[4:]
        blank %= tokens.shape[-1]
        losses = tdt_loss(tokens, of_durations, targets.long(), *lengths, blank, durations, reduction="none")
        return reduced(losses, reduction)

    return {"transformers, joint": rnnt, "transformers, joint and durations": tdt}


def flash(folder):
    """Flash RNN-T of NeMo (2026-08): `folder` has its flash_rnnt.py, rnnt_joint.py and rnnt_loss.py.

    NeMo's own modules import all of NeMo; these three need one name more.
    """
    asr = "nemo.collections.asr"
    for name in ("nemo", "nemo.collections", asr, f"{asr}.losses", f"{asr}.parts", f"{asr}.parts.triton"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    libraries = sys.modules["nemo.core.utils.optional_libs"] = types.ModuleType("nemo.core.utils.optional_libs")
    libraries.TRITON_AVAILABLE = True
    loss_of = importlib.import_module(f"{asr}.losses.flash_rnnt").FlashRNNTLoss

    def joint(weight, bias, encoder, predictor, targets, *lengths, blank, reduction):
        shift = -1 - blank % len(bias)  # its blank is the last class
        layer = types.SimpleNamespace(
            weight=weight.roll(shift, 1).T.contiguous(), bias=bias.roll(shift), out_features=len(bias)
        )
        network = types.SimpleNamespace(
            joint_net=[layer], num_classes_with_blank=len(bias), num_extra_outputs=0, activation="tanh", dropout=0.0,
            masking_prob=-1.0, training=True, log_softmax=False, temperature=1.0, is_adapter_available=lambda: False,
            project_encoder=lambda x: x, project_prednet=lambda x: x,
        )  # fmt: skip
        targets = (targets.long() + shift) % len(bias)
        losses = loss_of(len(bias) - 1)(network, encoder, predictor, targets, *lengths)
        return reduced(losses, reduction)

    return {"Flash RNN-T, joint": joint}


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
    import torch

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

    return {"warp-transducer": lambda logits, *rest: Loss.apply(logits.log_softmax(-1), *rest)}


def versions():
    names = "torch", "torchaudio", "transformers", "triton"
    found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {name: found[name] for name in names if name in found}


# ----------------------------------------------------------------------------------------------------------- worker


class Worker:
    """The process that runs the peers. `names`: those that it has."""

    def __init__(self, python, *, threads=0, warp_transducer=None, flash=None):
        command = [str(python), __file__, "worker", "--threads", str(threads)]
        command += ["--warp-transducer", warp_transducer] if warp_transducer else []
        command += ["--flash", flash] if flash else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        greeting = json.loads(self.process.stdout.readline() or "{}")
        self.names, self.versions = greeting.get("names", []), greeting.get("versions", {})
        for name, why in greeting.get("missing", {"all peers": f"{python} cannot import torch"}).items():
            print(f"left out: {name}: {why}")

    def joints(self, durations):
        """Those with a joint network, of the loss with or without durations."""
        return [x for x in self.names if ", joint" in x and x.endswith("durations") == bool(durations)]

    def ask(self, peer, problem, arguments, options):
        """One repetition: seconds, loss, samples of the gradient and, on a GPU, megabytes."""
        try:
            print(json.dumps([peer, problem, arguments, options]), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise OSError(f"the process of {peer} ended")
        answer = json.loads(answer)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def contestant(self, peer, problem, *arguments, **options):
        """The arrays are the problem's, in the dtype that `options` may name; the others are options of the peer."""
        import measure

        ask = functools.partial(self.ask, peer, problem, arguments, options)
        first = ask()
        check = first["loss"], np.array(first["gradient"])
        return measure.Contestant(peer, lambda: ask()["seconds"], check, first["megabytes"])


def start(python, threads, **options):
    """A worker in the environment of this Python, or of one under build/, which is made where it is missing."""
    if python is None:
        python = ENVIRONMENT / "bin/python"
        if not python.exists():
            venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return Worker(python, threads=threads, **options)


def serve(threads, warp_library, flash_folder):
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(threads or os.cpu_count())
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as XLA multiplies float32 there; no effect on a CPU
    # Replies go to the real standard output; output of the libraries goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    makers = {"torchaudio": torchaudio, "transformers": transformers}
    if warp_library:
        makers["warp-transducer"] = functools.partial(warp_transducer, warp_library, threads)
    if flash_folder:
        makers["Flash RNN-T"] = functools.partial(flash, flash_folder)
    found, missing = {}, {}
    for name, make in makers.items():
        try:
            found |= make()
        except Exception as error:  # an import may raise anything
            missing[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"names": list(found), "missing": missing, "versions": versions()}), file=replies)
    loaded = None
    for line in sys.stdin:
        peer, *problem, options = json.loads(line)
        dtype = getattr(torch, options.pop("dtype", "float32"))
        if (problem, dtype) != loaded:
            loaded, (name, arguments) = (problem, dtype), problem
            sources, rest = (
                [torch.from_numpy(x).to(device) for x in part] for part in getattr(problems, name)(*arguments)
            )
            sources = [x.to(dtype) for x in sources]
        try:
            answer = repetition(device, functools.partial(found[peer], **options), sources, rest)
        except Exception as error:  # of memory, of what it does not take
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        if "error" in answer and device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(answer), file=replies)


def repetition(device, loss_of, sources, rest):
    import torch

    leaves = [x.clone().requires_grad_() for x in sources]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    wait()
    begun = time.perf_counter()
    loss = loss_of(*leaves, *rest)
    loss.backward()
    wait()
    seconds = time.perf_counter() - begun
    strides = [max(1, x.numel() // 1000) for x in leaves]  # as in measure.samples
    gradient = [g for x, n in zip(leaves, strides) for g in x.grad.flatten()[::n].tolist()]
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
    return {"seconds": seconds, "loss": loss.item(), "gradient": gradient, "megabytes": peak}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("bench", "joint", "worker"), metavar="{bench,joint}")
    parser.add_argument("--torch-python", metavar="PYTHON", help="that has torch and torchaudio: nothing is installed")
    parser.add_argument("--warp-transducer", metavar="LIBRARY", help="its shared library, built by you with OpenMP")
    parser.add_argument("--flash", metavar="FOLDER", help="with the three files of NeMo's Flash RNN-T")
    args, more = parser.parse_known_args(argv)
    if args.program == "worker":
        serve(int(more[1]), args.warp_transducer, args.flash)  # after --threads
        return
    begin = functools.partial(start, args.torch_python, warp_transducer=args.warp_transducer, flash=args.flash)
    importlib.import_module(args.program).main(more, begin)


if __name__ == "__main__":
    main()
