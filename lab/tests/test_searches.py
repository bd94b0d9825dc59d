"""Searches for a GPU: the launches of a step are counted, and no loop inside waits for the host.

Compiling needs JAX's CUDA plugin, but neither driver nor GPU: `lab/run.sh searches` installs it. Without it the counts
are skipped.
"""

import importlib
import importlib.util
import json
import os
import sys

import pytest

import project
from programs import environment, run

PROGRAM = project.ROOT / "lab/benchmarks/searches.py"
COUNTED = [f"{name}, {kind}, B = 16" for name in ("greedy", "greedy TDT") for kind in ("LSTM", "stateless")]
COUNTED += ["beam 6, LSTM, B = 16", "trigram", "phrases"]
SEQUENCE = """\
001: kCustomKernel [source | sink] loop_fusion
003: kWhile        [prev=002 (1) | next=035 (1) ]
condition:
    013: kCustomKernel [source | sink] input_reduce_fusion
  body:
    000: kCommandBuffer [source | sink]
        014: kCopy         [source       | next=018 (4)] kCopy
        031: kConditional  [prev=024 (1) | next=032 (1)]
          false_branch:
            025: kCustomKernel [source       | next=026 (1)] input_concatenate_fusion
            026: kCustomKernel [source       | next=026 (1)] gemm_fusion
          true_branch:
            028: kCopy [source | sink] kCopy
    040: kWhile        [prev=002 (1) | next=035 (1) ]
    condition:
        041: kCustomKernel [source | sink] input_reduce_fusion
      body:
        042: kCustomKernel [source | sink] loop_fusion
    043: kConditional  [prev=024 (1) | next=032 (1)]
      false_branch:
        044: kCustomKernel [source       | next=026 (1)] loop_fusion
      true_branch:
        045: kCopy [source | sink] kCopy
046: kCopy [source | sink] kCopy
"""
CYCLES = """\
%outer_body (p: (s32[])) -> (s32[]) {
  %a = s32[] fusion(%p), calls=%f, backend_config={"estimated_cycles":"100"}
  %w = (s32[]) while(%a), condition=%inner_condition, body=%inner_body
  %c = (s32[]) conditional(%a, %a, %a), branch_computations={%short, %long}
}

%short (p: (s32[])) -> (s32[]) {
  %b = s32[] fusion(%p), calls=%f, backend_config={"estimated_cycles":"1"}
}

%long (p: (s32[])) -> (s32[]) {
  %b = s32[] fusion(%p), calls=%f, backend_config={"estimated_cycles":"7"}
}

%inner_body (p: (s32[])) -> (s32[]) {
  %b = s32[] fusion(%p), calls=%f, backend_config={"estimated_cycles":"20"}
}

%inner_condition (p: (s32[])) -> pred[] {
  %b = s32[] fusion(%p), calls=%f, backend_config={"estimated_cycles":"3"}
}

%outer_condition (p: (s32[])) -> pred[] {
  %b = s32[] fusion(%p), calls=%f, backend_config={"estimated_cycles":"4"}
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  ROOT %w = (s32[]) while(%a), condition=%outer_condition, body=%outer_body
}
"""


def test_reading(monkeypatch):
    """By hand: 1 of the condition; a copy and the longer branch in the graph; an inner loop of 2, and a branch."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the program changes it for XLA, and so the paths of modules
    monkeypatch.setattr(sys, "path", [*sys.path, str(PROGRAM.parent)])
    searches = importlib.import_module("searches")
    counts = searches.step_counts(searches.parse(SEQUENCE))
    assert counts == {"launches": 1 + 1 + 2 + 2 + 1, "waits": 1 + 1 + 1, "loops": 1, "graphs": 1, "around": 0}
    assert searches.step_cycles(CYCLES) == 4 + 100 + 7 + 3 + 20


@pytest.mark.slow
def test_steps(tmp_path):
    """A beam takes a step for each frame and label, and fewer in windows of four frames."""
    run(PROGRAM, "--steps", "--only", "beam 6", "--json", tmp_path / "steps.json", env=environment(), timeout=300)
    one, four = json.loads((tmp_path / "steps.json").read_text())["steps"].values()
    assert min(one["labels"], four["labels"]) >= 75 and four["steps"] < 250 < one["steps"]


@pytest.mark.parametrize("graphs", [False, True], ids=["default", "loops in graphs"])
def test_launches(graphs, tmp_path):
    """No host wait where loops are in graphs, and one a step by default; the same programs for a TPU."""
    known = importlib.util.find_spec("jax_plugins")
    if not known or not any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)):
        (pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") == "searches" else pytest.skip)("JAX has no CUDA plugin")
    counts = tmp_path / "counts.json"
    only = [word for name in COUNTED for word in ("--only", name)]
    devices = ["h100", "--graphs"] if graphs else ["h100", "v5e"]
    run(PROGRAM, *devices, "--json", counts, *only, env=environment(), timeout=900)
    steps = json.loads(counts.read_text())["steps"]
    assert len(steps) == 9 and (graphs or all(step["v5e"]["cycles"] > 0 for step in steps.values()))
    assert all(step["h100"]["launches"] > 0 for step in steps.values())
    assert {(step["h100"]["waits"], step["h100"]["loops"]) for step in steps.values()} == {(int(not graphs), 0)}
