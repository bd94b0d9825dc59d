"""torchaudio's step on batches of librispeech.py, in its own process: one step for each line of JSON on standard input.

[order, index of the batch, share, shrink]
-> {"seconds": s, "loss": x, "gradient": [some of that of the weight], "megabytes": peak on a GPU}
"""

import json
import sys
import time

import numpy as np
import torch
from librispeech_problems import BLANK, batches, make, padded


def main():
    from torchaudio.functional import rnnt_loss

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"torch": torch.__version__, "device": device}), flush=True)
    loaded = None
    for line in sys.stdin:
        if line != loaded:
            loaded = line
            order, index, *rest = json.loads(line)
            lengths = batches(order, *rest)[index]
            parameters, rows, rest = make(lengths, *padded(lengths), seed=index)
            leaves = [torch.from_numpy(x).to(device).requires_grad_() for x in (*parameters, *rows)]
            weight, bias, encoder, predictor = leaves
            targets, *lengths = (torch.from_numpy(x).to(device) for x in rest)
        for leaf in leaves:
            leaf.grad = None
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        logits = torch.tanh(encoder[:, :, None] + predictor[:, None]) @ weight + bias
        loss = rnnt_loss(logits, targets, *lengths, blank=BLANK, reduction="sum")
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del logits
        peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
        sample = weight.grad.flatten()[::997].cpu().numpy().astype(np.float64).tolist()
        answer = {"seconds": seconds, "loss": loss.item(), "gradient": sample, "megabytes": peak}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
