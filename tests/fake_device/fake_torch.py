"""Tensors of the device that is not there, and `torch.cuda` for it; see `fake_cuda`."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fake_device.fake_cuda import (
    DEVICE,
    GUARD,
    CUDAGraph,
    Dropped,
    Event,
    Stream,
    fill_with_garbage,
)
from torch import Tensor

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
INDEXING = (aten.index.Tensor, aten.index_put_.default)
"""Operations that bring indices on the CPU to the device themselves."""
BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
"""Operations whose results beside the first are other ones on the CPU; nobody reads them."""


class Memory:
    """One allocation: spoilt, in the order of the streams, once no tensor has it any more."""

    def __init__(self, host: Tensor) -> None:
        self.host, self.stream, self.readers = host, DEVICE.current(), set()
        self.graph = self.stream.records
        if self.graph is not None:
            self.graph.work.append(Dropped(host, ()))
        DEVICE.allocate(self.stream)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # Takes no lock: the garbage collector may run at any place.
        if self.graph is None:
            self.stream.dropped.append(Dropped(self.host, self.readers))
        elif self.stream.records is self.graph:
            self.graph.work.append(Dropped(self.host, ()))


class FakeTensor(Tensor):
    """A tensor of `cuda:0`: `host` is where it lies, `memory` the allocation that it is of."""

    host: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor, memory: Memory | None = None) -> FakeTensor:
        self = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=CUDA,
        )  # fmt: skip
        self.host, self.memory = host, memory or Memory(host)
        return self

    def __repr__(self, **kwargs: Any) -> str:
        return f"FakeTensor({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        if stream is not self.memory.stream:
            self.memory.readers.add(stream)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return operate(func, args, kwargs or {})


def operate(func: Any, args: tuple, kwargs: dict) -> Any:
    """Do an operation of torch with a tensor of the device among its arguments."""
    if func in _NOT_LAUNCHED:
        return _NOT_LAUNCHED[func](*args, **kwargs)
    if func is aten._to_copy.default and (kwargs.get("device") or CUDA).type == "cpu":
        return to_host(*args, **kwargs)
    if func.is_view or func is torch.ops.aten._unsafe_view.default:  # which launches nothing either
        memory = next(t.memory for t in _tensors(args) if isinstance(t, FakeTensor))
        return _map(lambda host: FakeTensor(host, memory), func(*_hosts(args), **_hosts(kwargs)))
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"the fake device lacks {func}")
    if kwargs.get("device") is not None:
        if torch.device(kwargs["device"]).type == "cpu":  # torch.zeros_like(there, device="cpu")
            return func(*_hosts(args), **_hosts(kwargs))
        kwargs = kwargs | {"device": CPU}
    # As torch does: single numbers may lie on the CPU, whose value an operation takes along.
    on_cpu = [t for t in _tensors((args, kwargs)) if not isinstance(t, FakeTensor) and t.dim()]
    if on_cpu and func not in INDEXING:
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, cuda:0")
    own, named = _hosts(args), _hosts(kwargs)
    if any(tag in func.tags for tag in ON_HOST):
        stream = DEVICE.current()
        DEVICE.wait(stream, stream.queued)
        return _map(FakeTensor, func(*own, **named))
    if func._schema.is_mutable:
        launch(func, *own, **named)
        return _written(func, args, kwargs)
    there = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
    shapes = func(*_map(_meta, args), **_map(_meta, kwargs | there))
    out = _map(lambda like: empty(like.shape, like.stride(), like.dtype), shapes)
    launch(_into(out, func), *own, **named)
    return out


def _into(out: Any, func: Callable) -> Callable:
    """`func`, whose results go into the tensors `out`, as far as it has tensors for results."""
    targets = [tensor.host for tensor in _tensors(out)]

    def work(*args: Any, **kwargs: Any) -> None:
        for target, value in zip(targets, _tensors(func(*args, **kwargs)), strict=True):
            if target.shape == value.shape or func not in BAGS:
                target.copy_(value)

    return work


def launch(func: Callable, *args: Any, **kwargs: Any) -> None:
    """Queue `func` on tensors of the host."""
    DEVICE.count("launch" if DEVICE.current().records is None else "recorded")
    _queue(func, args, kwargs)


def _queue(func: Callable, args: tuple, kwargs: dict) -> None:
    def work() -> None:
        with torch.inference_mode(False), torch.no_grad():
            func(*args, **kwargs)

    DEVICE.queue(work, launch=True)


def empty(size: Any, stride: Any, dtype: torch.dtype) -> FakeTensor:
    """New memory, full of garbage."""
    with torch.inference_mode(False), torch.no_grad():
        host = torch.empty_strided(size, stride, dtype=dtype)
        fill_with_garbage(host)
    return FakeTensor(host)


def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`to.copy_(source)`. A pinned buffer is read or written when the copy is done, an unpinned one
    is read at once, and the host waits for what is written there."""
    stream, there = DEVICE.current(), isinstance(to, FakeTensor)
    on_host = source if there else to
    if isinstance(on_host, FakeTensor):
        launch(Tensor.copy_, to.host, source.host)
        return to
    pinned = on_host.is_pinned()
    direction = "to device" if there else "to host"
    DEVICE.count(f"{direction}, {'pinned' if pinned else 'pageable'}")
    DEVICE.count(f"bytes {direction}", on_host.nbytes)
    late = _late_view(on_host) if pinned else on_host
    if there:
        _queue(Tensor.copy_, (to.host, late if pinned else source.clone()), {})
    else:
        _queue(Tensor.copy_, (late, source.host), {})
    if not non_blocking or not (pinned or there):
        DEVICE.wait(stream, stream.queued)
    return to


def _late_view(pinned: Tensor) -> Tensor:
    """Return the tensor that a queued copy uses for a pinned one.

    It is the tensor itself, whose memory then lives until the copy is done, if its storage is a
    block of the pinned allocator: torch records an event for that block. For any other storage
    there torch records none: the tensor returned has the same addresses and keeps nothing alive.
    """
    if GUARD.fake_is_pinned_block(pinned.untyped_storage().data_ptr()) or not pinned.numel():
        return pinned
    last = sum((n - 1) * step for n, step in zip(pinned.shape, pinned.stride(), strict=True))
    memory = (ctypes.c_byte * ((last + 1) * pinned.itemsize)).from_address(pinned.data_ptr())
    return torch.frombuffer(memory, dtype=pinned.dtype).as_strided(pinned.shape, pinned.stride())


def new_empty(like: FakeTensor, size: Any, *, dtype: Any = None, **how: Any) -> FakeTensor:
    """`like.new_empty(size)` there."""
    return _empty(size, dtype=dtype or like.dtype)


_NOT_LAUNCHED = {aten.copy_.default: copy, aten.new_empty.default: new_empty}
"""Operations for which no kernel runs."""


def to_host(
    source: FakeTensor, dtype: Any = None, non_blocking: bool = False, **how: Any
) -> Tensor:
    """`source.to("cpu")`, which is pinned where nobody waits for it."""
    out = torch.empty_like(source.host, dtype=dtype or source.dtype, pin_memory=non_blocking)
    return copy(out, source, non_blocking)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with each tensor in it replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, part) for part in value)
    if isinstance(value, dict):
        return {key: _map(function, part) for key, part in value.items()}
    return value


def _hosts(value: Any) -> Any:
    """The tensors where they lie; those of the host as they are now."""
    return _map(lambda part: part.host if isinstance(part, FakeTensor) else part.clone(), value)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _tensors(value: Any) -> list[Any]:
    """All tensors in a value."""
    found: list[Any] = []
    _map(found.append, value)
    return found


def _written(func: Any, args: tuple, kwargs: dict) -> Any:
    """What an operation returns that writes to its arguments: these."""
    if not func._schema.returns:
        return None
    if not all(value.alias_info for value in func._schema.returns):
        raise NotImplementedError(f"the fake device lacks {func}")
    found = [
        args[place] if place < len(args) else kwargs[argument.name]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return found[0] if len(found) == 1 else tuple(found)


_REGISTERED: dict[int, int] = {}
"""Bytes by address: host memory that kernels may read and write."""

_RUNTIME = SimpleNamespace(
    cudaHostRegister=lambda start, nbytes, flags: _REGISTERED.update({start: nbytes}) or 0,
    cudaHostUnregister=lambda start: int(_REGISTERED.pop(start, None) is None),
    cudaGetErrorString=lambda error: f"error {error} of the fake device",
)


def launch_kernel(body: Callable, *args: Any) -> None:
    """Queue a kernel: `body` on its arguments where they lie. RuntimeError for a tensor that a
    kernel cannot reach."""
    for tensor in _tensors(args):
        if not isinstance(tensor, FakeTensor):
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            if not any(at <= start and end <= at + n for at, n in _REGISTERED.items()):
                raise RuntimeError("an illegal memory access was encountered: memory of the host")
    launch(body, *(part.host if isinstance(part, FakeTensor) else part for part in args))


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    before = GUARD.fake_stream()
    GUARD.fake_set_stream(before if stream is None else stream.stream_id)
    try:
        yield
    finally:
        GUARD.fake_set_stream(before)


def _synchronize(device: Any = None) -> None:
    for stream in list(DEVICE.streams):
        stream.synchronize()


_PROPERTIES = SimpleNamespace(
    name="fake", total_memory=1 << 40, major=9, minor=0, multi_processor_count=1
)

_CUDA: dict[str, Any] = {
    "CUDAGraph": CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "cudart": lambda: _RUNTIME,
    "current_stream": lambda device=None: DEVICE.current(),
    "default_stream": lambda device=None: DEVICE.streams[0],
    "device": lambda device: contextlib.nullcontext(),
    "device_count": lambda: 1,
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "set_sync_debug_mode": lambda mode: setattr(DEVICE, "warns", mode == "warn"),
    "stream": on_stream,
    "synchronize": _synchronize,
}
_GIVES = {
    None: "_lazy_init empty_cache manual_seed_all reset_peak_memory_stats set_device",
    0: "current_device max_memory_allocated memory_allocated memory_reserved",
    True: "is_available is_initialized",
    (1 << 40, 1 << 40): "mem_get_info",
}
"""Values, and which functions return them."""


class _Work:
    """An all-reduce over gloo of a tensor of the device, staged through the host."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        self._finish()
        self._finish = lambda: None
        return True


def _all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
    """`dist.all_reduce` that takes tensors of the device too, on gloo."""
    if not isinstance(tensor, FakeTensor) or dist.get_backend(kwargs.get("group")) != "gloo":
        return _plain_all_reduce(tensor, *args, async_op=async_op, **kwargs)
    staged = tensor.cpu()
    work = _Work(
        _plain_all_reduce(staged, *args, async_op=True, **kwargs), lambda: tensor.copy_(staged)
    )
    return work if async_op else work.wait()


_plain_all_reduce = dist.all_reduce


def install() -> None:
    """Put the device into torch."""
    Stream()
    DEVICE.callbacks()
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)
    for value, names in _GIVES.items():
        for name in names.split():
            setattr(torch.cuda, name, lambda *args, value=value: value)
    dist.all_reduce = _all_reduce
    torch._C._host_emptyCache = lambda: None  # of torch.cuda.graph
    # `module.to` gives a module new parameters: `.data` of a CPU tensor cannot become a wrapper.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "CUDA")
    library.impl("empty_strided", _empty_strided, "CUDA")
    for name in ("arange", "arange.start", "arange.start_step"):  # whose own resize a tensor
        library.impl(name, _arange, "CUDA")
    _CUDA["library"] = library  # which registers as long as it is held


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **how: Any) -> FakeTensor:
    like = torch.empty(
        size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
    )
    return empty(like.shape, like.stride(), like.dtype)


def _arange(*bounds: Any, dtype: Any = None, **how: Any) -> FakeTensor:
    like = torch.arange(*bounds, dtype=dtype, device="meta")
    out = empty(like.shape, like.stride(), like.dtype)
    launch(torch.arange, *bounds, out=out.host)
    return out


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **how: Any) -> FakeTensor:
    return empty(size, stride, dtype or torch.get_default_dtype())
