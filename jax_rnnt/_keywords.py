"""Puts the name of the public function that was called at the beginning of its errors.

A check deep inside does not know that name: it raises an error whose message is a `Refusal`, as `_checks.bad_value`
makes it, and `keywords` or `in_name_of`, around the public function, puts the name before the message. Errors of other
code pass unchanged. For an unknown keyword argument, `keywords` names the one that is meant, in the words of other
libraries too.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

Decorated = TypeVar("Decorated")

# Our names -> those of torch, torchaudio, NeMo, k2, icefall, ESPnet, warp-transducer, warp-rnnt, optax, transformers.
_OTHERS = {
    "logits": "log_probs acts activations joint_out am_lm px",
    "targets": "labels symbols ys text tokens",
    "logit_lengths": "input_lengths act_lens log_prob_lengths frames_lengths boundary logit_paddings input_lens xlen",
    "target_lengths": "label_lens label_lengths labels_lengths boundary label_paddings target_lens ylen",
    "lengths": "input_lengths encoder_out_lens encoded_lengths encoder_lengths length lens attention_mask paddings",
    "encoder_out": "encoder_output encoder_outputs hs enc_out input acoustic input_features",
    "predictor_out": "decoder_out decoder_output prediction_out pred_out",
    "blank": "blank_id blank_idx blank_index blank_label blank_token_id termination_symbol num_classes",
    "fused_log_softmax": "fused_log_smax from_log_softmax log_softmax",
    "fastemit_lambda": "fastemit fastemit_weight fast_emit_lambda",
    "delay_penalty": "delay_scale",
    "reduction": "size_average average_frames",
    "clamp": "gradient_clamp clip",
    "width": "beam_size beam beam_width num_beams nbest s_range max_active",
    "max_symbols": "max_symbols_per_step max_sym_per_frame max_sym_exp step_max_tokens max_symbols_per_frame",
    "max_labels": "max_length max_len max_new_tokens max_tokens max_output_length",
    "length_norm": "score_norm length_penalty normalize_score",
    "temperature": "softmax_temperature",
    "first": "ranges",
    "variant": "rnnt_type modified",
    "lm_only_scale": "lm_scale",
    "am_only_scale": "am_scale",
    "fusion": "lm ngram_lm ngram_lm_alpha lm_weight",
    "joint": "joiner joint_network",
    "predictor": "decoder prediction_network pred_net",
    "key": "rng prng_key seed",
    "hop": "hop_length frame_shift",
    "subsampling": "subsampling_factor",
    "implementation": "backend",
    "samples": "num_samples",
}


class Refusal(str):
    """The text of an error or a note, before it has the name of the public function."""


def _name(error: BaseException, name: str) -> None:
    """Puts a name before the refusals of an error. They are plain texts afterwards, so no caller adds another name."""
    if any(isinstance(x, Refusal) for x in error.args):
        error.args = tuple(f"{name}: {x}" if isinstance(x, Refusal) else x for x in error.args)
    notes = getattr(error, "__notes__", [])
    notes[:] = [f"{name}: {note}" if isinstance(note, Refusal) else note for note in notes]


@contextlib.contextmanager
def in_name_of(name: str) -> Iterator[None]:
    """Makes refusals begin with this name, as a decorator or ``with`` block, where `keywords` does not fit."""
    try:
        yield
    except Exception as error:
        _name(error, name)
        raise


def keywords(decorated: Decorated) -> Decorated:
    """Decorates a public function, method or class to name it in errors. One that takes ``**`` stays as it is.

    A function is named as it is called, and a method after the class of its object, as "RNNTLoss.align".
    """
    function: Any = decorated.__init__ if isinstance(decorated, type) else decorated  # type: ignore[misc]
    parameters = inspect.signature(function).parameters.values()
    if any(x.kind is x.VAR_KEYWORD for x in parameters):  # such as `__init__` of a user's own loss
        return decorated
    names = [x.name for x in parameters if x.name not in ("self", "cls")]
    known = frozenset(names)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if not kwargs.keys() <= known:
            unknown = next(name for name in kwargs if name not in known)
            raise TypeError(_message(function, args, unknown, names)) from None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _name(error, _place(function, args)[0])
            raise

    if isinstance(decorated, type):
        decorated.__init__ = wrapper  # type: ignore[misc]
        return decorated
    return wrapper  # type: ignore[return-value]


def _place(function, args) -> tuple[str, type | None]:
    """Returns (the name of a public function in errors, the class of the object if it is a method)."""
    place, owner = function.__qualname__, None
    if "." in place and "<locals>" not in place and args:
        owner = args[0] if isinstance(args[0], type) else type(args[0])
        place = f"{owner.__name__}.{function.__name__}"
    return place.removesuffix(".__call__").removesuffix(".__init__"), owner


def _message(function, args, unknown: str, names: Collection[str]) -> str:
    place, owner = _place(function, args)
    meant = [unknown, *(name for name, others in _OTHERS.items() if unknown.lower() in others.split())]
    call = inspect.signature(owner.__call__).parameters if owner is not None else {}
    if here := [name for name in meant if name in names]:
        hint = f"did you mean {' or '.join(here)}?"
    elif owner is not None and function.__name__ == "__init__" and (of_call := [x for x in meant if x in call]):
        hint = f"{of_call[0]} is an argument of the call: {owner.__name__}(...)({of_call[0]}=...)"
    elif dataclasses.is_dataclass(owner) and (fields := {x.name for x in dataclasses.fields(owner)} & {*meant}):
        hint = f"{(field := min(fields))} is an option of the class: {owner.__name__}({field}=...)"
    elif close := difflib.get_close_matches(unknown, names, 1):
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"it takes {', '.join(names)}"
    return f"{place}: unknown argument {unknown}; {hint}"
