"""Texts of every backend for a lack of memory, and texts that only look like one."""

from __future__ import annotations

import pytest

from pichak_core.testing import OutOfMemoryError
from pichak_core.tune.oom import LOW_FREE_BYTES, error_chain, judge_error, one_line

GIB = 2**30
PLENTY = 20 * GIB


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """Triton's, which is no RuntimeError."""


class XlaRuntimeError(RuntimeError):
    """JAX's."""


# field case 43
MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 5.79 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "HIP out of memory. Tried to allocate 512.00 MiB",
    "HIP error: out of memory",
    "MPS backend out of memory (MPS allocated: 9.06 GB, other allocations: 3.92 MB, max allowed: "
    "9.07 GB). Tried to allocate 68.66 MB on private pool",
    "XPU out of memory. Tried to allocate 1.00 GiB",
    "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity)",
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "MIOpen Error: miopenStatusAllocFailed",
    "Native API failed. Native API returns: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "Could not allocate tensor with 4294967296 bytes. There is not enough GPU video memory "
    "available!",
    "Error out of memory at line 380 in file /src/csrc/ops.cu",
    "NCCL error: unhandled cuda error. Last error: Cuda failure 'out of memory'",
]
HOST = [
    "[enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 4096 bytes.",
    "DefaultCPUAllocator: can’t allocate memory",
    "std::bad_alloc",
    "DataLoader worker (pid 4242) is killed by signal: Killed.",
    "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. Please try to raise your shared memory limit.",
]
KERNEL = [
    "CUDA error: invalid configuration argument",
    "CUDA error: too many resources requested for launch",
    "nonzero is not supported for tensors with more than INT_MAX elements",
    "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true",
]
AMBIGUOUS = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "CUDA error: device-side assert triggered",
    "CUDA error: device not ready",
    'handles_.at(device) INTERNAL ASSERT FAILED at "CUDAHandlePool.h":7',
    "CUDA error: unspecified launch failure",
]
NEGATIVES: list[Exception] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x7 and 8x4)"),
    RuntimeError("Trying to backward through the graph a second time"),
    ValueError("the option 'out of memory' is not known"),
    IndexError("index out of range in self"),
    AssertionError("expected no CUDA out of memory. here"),
    KeyError("out of memory"),
    NotImplementedError("out of memory handling"),
    OSError(2, "No such file or directory"),
]


@pytest.mark.parametrize("text", MEMORY)
def test_every_backends_text_is_a_lack_of_memory(text: str) -> None:
    assert judge_error(RuntimeError(text), free_bytes=PLENTY).kind == "memory"
    assert judge_error(RuntimeError(text.upper()), free_bytes=None).kind == "memory"


@pytest.mark.parametrize("text", HOST)
def test_host_memory_is_told_apart(text: str) -> None:
    assert judge_error(RuntimeError(text), free_bytes=PLENTY).kind == "host memory"


def test_types_come_before_texts() -> None:
    assert judge_error(OutOfMemoryError(""), free_bytes=PLENTY).kind == "memory"
    assert judge_error(MemoryError(), free_bytes=PLENTY).kind == "host memory"
    assert judge_error(OSError(12, "Cannot allocate memory"), free_bytes=None).kind == "host memory"
    assert judge_error(OutOfResources("shared memory"), free_bytes=0).kind == "kernel"
    error = XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes")
    assert judge_error(error, free_bytes=None).kind == "memory"


def test_torchs_own_class_is_known_under_both_names() -> None:
    torch = pytest.importorskip("torch")
    for kind in {torch.cuda.OutOfMemoryError, getattr(torch, "OutOfMemoryError", None)} - {None}:
        assert judge_error(kind("CUDA oom"), free_bytes=PLENTY).kind == "memory"


@pytest.mark.parametrize("text", KERNEL)
def test_a_kernels_limit_is_told_apart(text: str) -> None:
    assert judge_error(RuntimeError(text), free_bytes=PLENTY).kind == "kernel"


# field cases 44, 46
@pytest.mark.parametrize("text", AMBIGUOUS)
def test_free_memory_decides_where_the_text_means_either(text: str) -> None:
    error = RuntimeError(text)
    assert judge_error(error, free_bytes=200 * 2**20).kind == "memory"
    for free in (LOW_FREE_BYTES, PLENTY, None):
        judgement = judge_error(error, free_bytes=free)
        assert judgement.kind == "look-alike"
        assert "CUDA_LAUNCH_BLOCKING" in judgement.hint


# field case 44
def test_the_hint_names_the_vocabulary_where_that_is_the_usual_cause() -> None:
    assert "embedding" in judge_error(RuntimeError(AMBIGUOUS[0]), free_bytes=PLENTY).hint
    assert "embedding" in judge_error(RuntimeError(AMBIGUOUS[3]), free_bytes=PLENTY).hint
    assert "embedding" not in judge_error(RuntimeError(AMBIGUOUS[4]), free_bytes=PLENTY).hint


# field case 43
@pytest.mark.parametrize("error", NEGATIVES, ids=repr)
def test_other_errors_stay_errors(error: Exception) -> None:
    assert judge_error(error, free_bytes=0).kind == "other"


def test_an_error_raised_from_a_lack_of_memory_is_one() -> None:
    try:
        try:
            raise OutOfMemoryError("CUDA out of memory")
        except OutOfMemoryError as error:
            raise ValueError("the step failed") from error
    except ValueError as error:
        wrapped = error
    assert judge_error(wrapped, free_bytes=PLENTY).kind == "memory"
    assert [type(link).__name__ for link in error_chain(wrapped)] == [
        "ValueError",
        "OutOfMemoryError",
    ]
    wrapped.__cause__ = None
    wrapped.__suppress_context__ = True
    assert judge_error(wrapped, free_bytes=PLENTY).kind == "other"


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert len(error_chain(first)) == 2


# field case 14
def test_the_drivers_word_for_unknown_is_not_printed_as_a_size() -> None:
    text = one_line(RuntimeError("CUDA out of memory: 17179869184.00 GiB allowed"))
    assert "17179869184" not in text
    assert "an unknown amount" in text


def test_one_line_is_one_short_line() -> None:
    text = one_line(RuntimeError("first part.\n Second part\n" + "x" * 1000))
    assert text == "RuntimeError: first part"
    assert len(one_line(RuntimeError("y" * 1000))) < 200
    assert one_line(MemoryError()) == "MemoryError"
