"""Is this error a lack of memory? By its type first, then by the texts that backends are known for.

Texts are compared in lower case with single spaces, without the punctuation behind them: the same
allocator has said "out of memory." and "out of memory (". Some errors are raised both when memory
is short and when something else is wrong; there the free memory decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["memory", "host memory", "kernel", "look-alike", "other"]

#: With less than this free, an error that can mean either is taken for a lack of memory. Constant:
#: a library handle with its workspace needs tens of MiB, and 20 GiB free is plenty.
LOW_FREE_BYTES = 512 * 2**20

#: Texts that mean that the device's memory was refused.
MEMORY_TEXTS = (
    "out of memory",  # CUDA, HIP, XPU, NPU, MPS, XLA, Triton, bitsandbytes
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
    "hiperroroutofmemory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_insufficient_resources",
    "hipblas_status_alloc_failed",
    "rocblas_status_memory_error",
    "miopenstatusallocfailed",
    "pt_devmem allocation failed",  # HPU
    "resource_exhausted",
    "ur_result_error_out_of_device_memory",  # XPU, Level Zero
    "ur_result_error_out_of_resources",
    "pi_error_out_of_resources",
    "callbackerroroutofmemory",  # Metal
    "not enough gpu video memory",  # DirectML
)
#: Texts that mean that the host's memory was refused.
HOST_TEXTS = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "ur_result_error_out_of_host_memory",
    "pi_error_out_of_host_memory",
    "out of shared memory",
    "insufficient shared memory",
    "is killed by signal: killed",  # a loader worker, by the system's out-of-memory killer
)
#: Texts that mean that a kernel does not take this size, whatever memory there is.
KERNEL_TEXTS = (
    "invalid configuration argument",
    "too many resources requested for launch",
    "out of resource: shared memory",  # Triton
    "out of resources: shared memory",
    "int_max",
    "canuse32bitindexmath",
    "32-bit index",
)
#: Texts that come both from a lack of memory and from something else.
AMBIGUOUS_TEXTS = (
    "status_not_initialized",
    "cudnn_status_internal_error",
    "cudnn_status_execution_failed",
    "cudnn_status_not_supported",
    "cublas_status_execution_failed",
    "cublas_status_internal_error",
    "rocblas_status_internal_error",
    "miopenstatusunknownerror",
    "device-side assert",
    "device not ready",
    "internal assert failed",
    "unspecified launch failure",
    "an illegal memory access",
    "unhandled cuda error",
    "could not create a primitive",
    "ur_result_error_device_lost",
)
#: Of those, what a token id outside the embedding looks like.
_BAD_INDEX_TEXTS = ("status_not_initialized", "device-side assert", "an illegal memory access")

#: Mistakes of the program, whatever their text says.
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)
#: 2^64 - 1 bytes: what a driver prints for "not known".
_UNKNOWN_SIZE = re.compile(r"17179869184(\.0+)? GiB")


@dataclass(frozen=True)
class Judgement:
    """What an error of a step means for the size that raised it. `text` is the error in one short
    line, `hint` what to look at when it only looks like a lack of memory."""

    kind: Kind
    text: str
    hint: str = ""


def judge_error(error: BaseException, *, free_bytes: int | None) -> Judgement:
    """Whether `error`, or one that it was raised from, is a lack of memory.

    `free_bytes` is the least memory that was free on the device while it happened; None when that
    is not known, and then an ambiguous error is not taken for a lack of memory. "kernel" is a
    limit of a kernel's own; "look-alike" an ambiguous error with memory free; "other" any
    further error.
    """
    chain = error_chain(error)
    judged = [_judge_one(link, free_bytes) for link in chain]
    for judgement in judged:
        if judgement.kind in ("memory", "host memory", "kernel"):
            return judgement
    return judged[0]


def one_line(error: BaseException, limit: int = 160) -> str:
    """The first sentence of an error, with its type where it says nothing."""
    text = " ".join(str(error).split())
    text = _UNKNOWN_SIZE.sub("an unknown amount", text)
    text = re.split(r"(?<=[.!?]) (?=[A-Z])", text, maxsplit=1)[0].rstrip(".")
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_chain(error: BaseException) -> list[BaseException]:
    """The error, then what it was raised from, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _judge_one(error: BaseException, free_bytes: int | None) -> Judgement:
    text = one_line(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    # By name: torch's class has had two homes, and other libraries have their own.
    if "OutOfMemoryError" in names:
        return Judgement("memory", text)
    if isinstance(error, MemoryError):
        return Judgement("host memory", text)
    if isinstance(error, _MISTAKES):
        return Judgement("other", text)
    said = " ".join(str(error).lower().replace("’", "'").split())
    if "OutOfResources" in names or _any_in(KERNEL_TEXTS, said):
        return Judgement("kernel", text)
    if _any_in(HOST_TEXTS, said):
        return Judgement("host memory", text)
    if _any_in(MEMORY_TEXTS, said):
        return Judgement("memory", text)
    if not _any_in(AMBIGUOUS_TEXTS, said):
        return Judgement("other", text)
    if free_bytes is not None and free_bytes < LOW_FREE_BYTES:
        return Judgement("memory", f"{text} with {free_bytes / 2**20:,.0f} MiB free")
    return Judgement("look-alike", text, _hint(said, free_bytes))


def _hint(said: str, free_bytes: int | None) -> str:
    if free_bytes is None:
        free = "how much memory was free is not known"
    else:
        free = f"{free_bytes / 2**30:.1f} GiB were free"
    hint = f"this is not taken for a lack of memory ({free})"
    if _any_in(_BAD_INDEX_TEXTS, said):
        hint += (
            "; the usual cause is a token id or a label outside the model's vocabulary: compare "
            "len(tokenizer) with the embedding's rows"
        )
    return hint + (
        "; the device context may be unusable now: start a new process, with "
        "CUDA_LAUNCH_BLOCKING=1 to see the operation that failed"
    )


def _any_in(texts: tuple[str, ...], said: str) -> bool:
    return any(text in said for text in texts)
