"""A door to the kernels: NumPy arrays in and out of the handlers that XLA calls, without a JAX program.

`call` does what XLA does: it puts buffers, attributes and a thread pool into the structs of xla/ffi/api/c_api.h. While
the door is `opened`, the library's own functions send their custom calls through it, so emissions and lattices take and
give NumPy arrays. `evaluate` is the loss and its gradient, of losses whose arcs are the emission's planes.

Every buffer lies between guards of NaN, results are NaN at first, and no call may change a guard: kernels that read or
write too much, or leave elements out, are seen.

One core ran 1200 losses with gradient a second, of 4 small sequences each; the truth in NumPy takes as long.

Where the default platform is not the CPU (a GPU), or its kernels are interpreted, calls go to JAX as ever.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import itertools
import platform
import unittest.mock

import numpy as np

import compare
import family
import jax_rnnt._xla
import platforms
from jax_rnnt._xla import loading
from jax_rnnt.emissions import _emission
from jax_rnnt.emissions._emission import NO_LABEL, OUTSIDE
from jax_rnnt.emissions._softmax import accumulation_dtype
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.losses import _call

# ----------------------------------------------------------------------------------------- structs of XLA's C interface
_int, _int64, _size, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
DTYPES = {"bool": 1, "int32": 4, "int64": 5, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}
ARRAY, SCALAR, BUFFER = 1, 3, 1  # kinds of attributes, and the kind of arguments and results
EXECUTE = 3  # the stage


class _Struct(ctypes.Structure):
    """The head of most structs below: their size, which a handler checks, and no extensions."""

    _fields_ = [("struct_size", _size), ("extension_start", _pointer)]

    def __init__(self, *fields):
        super().__init__(ctypes.sizeof(self), None, *fields)


def _struct(base=_Struct, **fields):
    return type("Struct", (base,), {"_fields_": [*fields.items()]})


_Buffer = _struct(dtype=_int, data=_pointer, rank=_int64, dims=_pointer)
_Buffers = _struct(size=_int64, types=_pointer, buffers=_pointer)  # arguments or results
_Attributes = _struct(size=_int64, types=_pointer, names=_pointer, values=_pointer)
_Frame = _struct(api=_pointer, ctx=_pointer, stage=_int, args=_Buffers, rets=_Buffers, attributes=_Attributes)
_FrameWithFuture = _struct(ctypes.Structure, frame=_Frame, future=_pointer)  # which does not count in its size
_Span = _struct(ctypes.Structure, start=ctypes.c_char_p, length=_size)
_Scalar = _struct(ctypes.Structure, dtype=_int, value=_pointer)
_Array = _struct(ctypes.Structure, dtype=_int, size=_size, data=_pointer)
_Message = _struct(message=ctypes.c_char_p, code=_int)  # of Error_Create
_Error = _struct(error=_pointer, message=ctypes.c_char_p)  # of Error_GetMessage and Error_Destroy
_Task = _struct(ctx=_pointer, task=_pointer, data=_pointer)  # of ThreadPool_Schedule
_Threads = _struct(ctx=_pointer, number=ctypes.POINTER(_int64))  # of ThreadPool_NumThreads
_Version = _struct(major=_int, minor=_int)
_FUNCTION = ctypes.CFUNCTYPE(_pointer, _pointer)
_Api = _struct(version=_Version, internal=_pointer, functions=_pointer * 64)  # later versions append functions
# Places of the functions that the kernels call.
_SLOTS = {"Error_Create": 0, "Error_GetMessage": 1, "Error_Destroy": 2}
_SLOTS |= {"ThreadPool_Schedule": 11, "ThreadPool_NumThreads": 12}


# ----------------------------------------------------------------------------------------------------- in place of XLA
_errors: dict[int, bytes] = {}  # messages of errors that live
_numbers = itertools.count(1)
_libc = ctypes.CDLL(None)


def _create(at):
    number = next(_numbers)
    _errors[number] = _Message.from_address(at).message
    return number


def _message(at):
    error = _Error.from_address(at)
    error.message = _errors[error.error]


def _destroy(at):
    _errors.pop(_Error.from_address(at).error)


# XLA's threads take subnormal floats for zeros: bits of the register MXCSR, the last word of fenv_t in x86's glibc.
FLUSH = 0x8040 if (platform.machine(), platform.libc_ver()[0]) == ("x86_64", "glibc") else 0
_libm = functools.cache(lambda: ctypes.CDLL(ctypes.util.find_library("m")))


@contextlib.contextmanager
def _flushed():
    """On this thread, as on XLA's."""
    if not FLUSH:
        yield
        return
    state = (ctypes.c_uint32 * 8)()
    _libm().fegetenv(state)
    before = state[7]
    state[7] |= FLUSH
    _libm().fesetenv(state)
    try:
        yield
    finally:
        state[7] = before
        _libm().fesetenv(state)


def _schedule(at):
    """A thread for each task, with the state of `_flushed`. It never takes Python's lock, in which ThreadSanitizer
    would see an order of the tasks. A task owns what it uses: it may begin after the end of the call."""
    task, thread = _Task.from_address(at), ctypes.c_ulong()
    _libc.pthread_create(ctypes.byref(thread), None, _pointer(task.task), _pointer(task.data))
    _libc.pthread_detach(thread)


def _num_threads(at):
    threads = _Threads.from_address(at)
    threads.number[0] = threads.ctx or 0  # the context is the number


_FUNCTIONS = tuple(map(_FUNCTION, (_create, _message, _destroy, _schedule, _num_threads)))


@functools.cache
def _api():
    version, functions = _Version(*loading.module("cpu").api_version()), (_pointer * 64)()
    for slot, function in zip(_SLOTS.values(), _FUNCTIONS):
        functions[slot] = ctypes.cast(function, _pointer)
    return _Api(version, None, functions)


@functools.cache
def _handler(target):
    """The function that executes a call. What instantiates one is not called, as for a program from a cache."""
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    pointer = (_pointer, ctypes.py_object, ctypes.c_char_p)
    pointer_of = ctypes.PYFUNCTYPE(*pointer)(("PyCapsule_GetPointer", ctypes.pythonapi))
    execute = loading.module("cpu").registrations()[target]["execute"]
    return _FUNCTION(pointer_of(execute, name_of(execute)))


# ------------------------------------------------------------------------------------------------------------- the call
GUARD = 64  # bytes, and the alignment of XLA's buffers


# Under AddressSanitizer (lab/run.sh sanitize, fuzz) its functions, with which a kernel may not even read a guard.
_poison, _unpoison = (getattr(_libc, f"__asan_{x}poison_memory_region", None) for x in ("", "un"))


@contextlib.contextmanager
def _poisoned(rooms):
    """The guards of these rooms, where something watches."""
    guards = [guard for room in rooms for guard in room.guards] if _poison else ()
    for guard in guards:
        _poison(_pointer(guard.ctypes.data), _size(guard.size))
    try:
        yield
    finally:
        for guard in guards:
            _unpoison(_pointer(guard.ctypes.data), _size(guard.size))


class _Room:
    """An array between two guards; every byte is 255, which makes NaN of any float."""

    def __init__(self, shape, dtype):
        shape, dtype = tuple(map(int, shape)), np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        whole = np.full(size + 3 * GUARD, 255, np.uint8)
        begin = GUARD - whole.ctypes.data % GUARD + GUARD
        self.guards = whole[begin - GUARD : begin], whole[begin + size :]
        self.array = whole[begin : begin + size].view(dtype).reshape(shape)
        self.dims = (_int64 * max(len(shape), 1))(*shape)
        self.address = whole.ctypes.data + begin
        self.buffer = _Buffer(DTYPES[dtype.name], self.address, len(shape), ctypes.addressof(self.dims))


def _listed(kind, lists, *kept):
    """A struct of lists of as many items, which lives as long as they do."""
    struct = kind(len(lists[0]), *map(ctypes.addressof, lists))
    struct.kept = lists, kept
    return struct


def _buffers(rooms):
    n = len(rooms)
    pointers = (_pointer * n)(*[ctypes.addressof(room.buffer) for room in rooms])
    return _listed(_Buffers, [(_int * n)(*[BUFFER] * n), pointers])


@functools.cache
def _attributes(items):
    kept, types, names, values = [], [], [], []
    for name, value in sorted(items):  # as XLA does
        numbers = np.array(value, np.int64)
        of_array = _Array(DTYPES["int64"], numbers.size, numbers.ctypes.data)
        struct = of_array if numbers.ndim else _Scalar(DTYPES["int64"], numbers.ctypes.data)
        span = _Span(name.encode(), len(name))
        kept += [numbers, struct, span]
        types.append(ARRAY if numbers.ndim else SCALAR)
        names.append(ctypes.addressof(span))
        values.append(ctypes.addressof(struct))
    n = len(items)
    return _listed(_Attributes, [(_int * n)(*types), (_pointer * n)(*names), (_pointer * n)(*values)], kept)


def call(target, operands, attributes, results, *, aliases=None, threads=0):
    """Runs a custom call.

    Parameters
    ----------
    target : str
        Its name in XLA's registry.
    operands : sequence of np.ndarray
        They keep their values.
    attributes : dict of str to int or tuple of int
    results : sequence of (shape, dtype)
    aliases : dict of int to int, optional
        Which operand shares its memory with which result.
    threads : int
        Of the pool; 0: the handler works alone.

    Returns
    -------
    list of np.ndarray

    Raises
    ------
    RuntimeError
        With the message of the handler.
    """
    rooms = [_Room(x.shape, x.dtype) for x in operands]
    for room, x in zip(rooms, operands):
        room.array[...] = x
    aliased = {result: rooms[operand] for operand, result in (aliases or {}).items()}
    outputs = [aliased[i] if i in aliased else _Room(*result) for i, result in enumerate(results)]
    handler, given = _handler(target), (_buffers(rooms), _buffers(outputs), _attributes(tuple(attributes.items())))
    whole = _FrameWithFuture(_Frame(ctypes.addressof(_api()), threads, EXECUTE, *given))
    with _poisoned([*rooms, *outputs]), _flushed():
        error = handler(ctypes.addressof(whole))
    if error is not None:
        raise RuntimeError(_errors.pop(error).decode())
    for room in (*rooms, *outputs):
        assert all((guard == 255).all() for guard in room.guards), f"{target} wrote outside of a buffer"
    return [room.array for room in outputs]


# ---------------------------------------------------------------------------------------------- the library's functions
def native():
    """Whether there is a door: kernels of the CPU platform that are custom calls."""
    return platforms.platform() == "cpu" and not platforms.interpreted() and "cpu" in loading.KERNELS


# Instruction sets that the CPU kernels have here, the best first; of other kernels, one name without a meaning.
TARGETS = tuple(loading.module("cpu").targets()) if native() and not platforms.emulated() else ("only",)


@contextlib.contextmanager
def using(target):
    """On this instruction set; None: on the one in use."""
    if target in (None, "only"):
        yield
        return
    module = loading.module("cpu")
    default = module.target()
    module.use_target(target)
    try:
        yield
    finally:
        module.use_target(default)


@contextlib.contextmanager
def opened(threads=0):
    """While it is open, the kernels of the library take and give NumPy arrays."""

    def through(kernel, *operands, num_batch_dims, strict=False, alias=False, **attributes):
        operands = [np.asarray(x) for x in operands]
        batch = operands[0].shape[:num_batch_dims]
        results = [((*batch, *shape), dtype) for shape, dtype in kernel.results(*operands, **attributes)]
        elements = kernel.workspace(loading.WORKSPACES["cpu"], *operands, **attributes)
        more = [((*batch, elements), operands[0].dtype)] if elements else []
        aliases = kernel.aliases(len(operands)) if alias else {}
        outputs = call(kernel.target, operands, attributes, results + more, aliases=aliases, threads=threads)
        return outputs[: len(results)]

    if not native():
        yield
        return
    with unittest.mock.patch.object(jax_rnnt._xla.Kernel, "__call__", through):
        yield


def nodes_of(p):
    """The nodes of a batch, of NumPy arrays."""
    return _emission.Nodes(label_map(p.targets, p.target_lengths), p.logit_lengths)


def label_map(targets, num_labels):
    """int32 [..., 1, U1]: `emissions._emission.label_map` in NumPy."""
    column = np.arange(targets.shape[-1] + 1)
    padded = np.concatenate([targets, np.zeros_like(targets[..., :1])], -1) if targets.shape[-1] else column * 0
    last = np.asarray(num_labels)[..., None]
    label = np.where(column < last, padded, np.where(column == last, NO_LABEL, OUTSIDE))
    return label.astype(np.int32)[..., None, :]


def parts(loss, classes, **options):
    """(emission, topology) of a loss for rows of `classes` logits; None for one with steps between them."""
    composed = _call.switched_off(loss.value(**options)).compose()
    if composed.steps or composed.closing:
        return None
    return composed.emission.resolved(classes), composed.topology


LOSSES = tuple(loss for loss in family.LOSSES if parts(loss, 99))


def run(loss, p, *, target=None, threads=0, inplace=True, clamp=-1.0, scale=1.0, **options):
    """(loss [...], {slot: minus posterior [..., T, U1]}, scale * gradient clipped to clamp), of lengths in range.

    `clamp` and `scale` are numbers, or arrays [...]. The kernel of the loss alone must give the same bits.
    """
    emission, topology = parts(loss, p.logits.shape[-1], **options)
    nodes, lengths = nodes_of(p), (p.logit_lengths, p.target_lengths)
    scale, clamp = (np.full(p.logit_lengths.shape, x, accumulation_dtype(p.logits.dtype)) for x in (scale, clamp))
    with opened(threads), using(target):
        planes, norm = emission.forward(p.logits, nodes)
        values, cotangents = lattice.value_and_grad(topology, planes, *lengths)
        alone = lattice.value(topology, planes, *lengths)
        gradient = emission.backward(p.logits, nodes, norm, cotangents, scale, clamp, alias=inplace)
    compare.assert_same_bits(np.asarray(alone), np.asarray(values))
    return np.asarray(values), {slot: np.asarray(x) for slot, x in cotangents.items()}, np.asarray(gradient)


def evaluate(loss, p, **options):
    """(loss [...], gradient) of `run`."""
    values, _, gradient = run(loss, p, **options)
    return values, gradient


def answers(loss, p, implementation, **options):
    """What `compare.evaluate` gives: of kernels on every instruction set, without JAX where the loss has no steps."""
    between = {"fastemit_lambda", "delay_penalty", "label_windows"} & options.keys()
    composing = {k: x for k, x in options.items() if k != "clamp"}
    if implementation != "kernel" or between or parts(loss, p.logits.shape[-1], **composing) is None:
        yield compare.evaluate(loss, p, implementation, **options)
        return
    for target in TARGETS:
        yield evaluate(loss, p, target=target, **options)


def check(loss, p, *, clamp=-1.0, scale=1.0, **options):
    """`evaluate` against the truth on every instruction set; in a buffer of its own, the gradient has the same bits."""
    values, gradient = loss.expected(p, **options)
    each = (*p.logit_lengths.shape, 1, 1, 1)
    bound, factor = (np.broadcast_to(x, p.logit_lengths.shape).reshape(each) for x in (clamp, scale))
    bound = np.where(bound > 0, bound, np.inf)
    expected = values, factor * np.clip(gradient, -bound, bound)
    for target in TARGETS:
        call_options = {"target": target, "clamp": clamp, "scale": scale, **options}
        got = evaluate(loss, p, **call_options)
        length = p.logits.shape[-3] + p.logits.shape[-2] - 1
        compare.assert_matches(got, expected, p.logits.dtype, length, scale=np.abs(factor).max(initial=1))
        if target == TARGETS[0]:
            compare.assert_same_bits(got, evaluate(loss, p, inplace=False, **call_options))
