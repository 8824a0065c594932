"""A CUDA device for machines without one: tensors that say they are on it, refuse what the device would
refuse, and compute on the CPU.

It tells whether code that runs on the CPU would run on a CUDA device unchanged: no operation mixes tensors of
both, no NumPy array is made of a tensor there, no random numbers are drawn for it from a generator of the
CPU. And it counts how often the host waits for the device. It says nothing of kernels, streams or speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """A tensor on the emulated device; `host` is where its numbers are."""

    host: torch.Tensor
    waits = 0  # how often the host has waited for the device

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="meta",
        )
        made.host = host.detach()
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, dict(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    is_cuda, is_cpu, is_meta = True, False, False  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: DeviceTensor) -> None:
        assert value.shape == self.shape
        self.host = value.host

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {CUDA} device type tensor to numpy")

    __array__ = numpy  # type: ignore[assignment]

    def tolist(self) -> Any:
        DeviceTensor.waits += 1
        return self.host.tolist()

    def __deepcopy__(self, memo: Any) -> DeviceTensor:
        copied = DeviceTensor(self.host.clone()).requires_grad_(self.requires_grad)
        copied._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.host})"


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One operation in which a tensor on the device takes part."""
    decomposed = func.decompose(*args, **kwargs)  # what autograd does, and inference mode leaves to us
    if decomposed is not NotImplemented:
        return decomposed
    packet = func.overloadpacket
    if packet is aten._local_scalar_dense:
        DeviceTensor.waits += 1
        return func(args[0].host)
    if packet is aten._to_copy and torch.device(kwargs.get("device") or "meta").type == "cpu":
        DeviceTensor.waits += not kwargs.get("non_blocking", False)
        return func(args[0].host, **kwargs)
    if packet is aten.copy_:
        target, source, *rest = args
        waits = not isinstance(target, DeviceTensor) and not (rest and rest[0])
        DeviceTensor.waits += waits
        hosts = (x.host if isinstance(x, DeviceTensor) else x for x in (target, source))
        func(*hosts, *rest, **kwargs)
        return target
    _refuse_mixed(func, args, kwargs)
    DeviceTensor.waits += _shape_depends_on_values(func, args)
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    kwargs.pop("pin_memory", None)
    given = {id(x.host): x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)}

    def host(x: Any) -> Any:
        return x.host if isinstance(x, DeviceTensor) else x

    def device(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return given[id(x)] if id(x) in given else DeviceTensor(x)

    outputs = func(*tree_map(host, args), **tree_map(host, kwargs))
    return tree_map(device, outputs)


def _shape_depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether the host has to wait for the size of the answer."""
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _refuse_mixed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise RuntimeError where a tensor of the CPU takes part; a single number may, unless in a list."""
    lists = [x for x in args if isinstance(x, (list, tuple))]
    in_lists = {id(x) for x in tree_leaves(lists)}
    for x in tree_leaves((args, kwargs)):
        on_cpu = isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor)
        if on_cpu and (x.dim() > 0 or id(x) in in_lists):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func}, "
                f"{tuple(x.shape)})"
            )


class _Placement(TorchFunctionMode):
    """Tensors that are made on the device, or sent there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return DeviceTensor(args[0].detach().clone())
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        there = any(isinstance(x, DeviceTensor) for x in tree_leaves((args, kwargs)))
        generator = kwargs.get("generator")
        if generator is not None and generator.of_cuda != (there or _on_device(kwargs.get("device"))):
            raise RuntimeError("the generator is of another device: one of them is cuda, the other cpu")
        if _on_device(kwargs.get("device")):
            if there:
                kwargs.pop("device")
                return func(*args, **kwargs)
            made = func(*args, **{**kwargs, "device": "cpu"})
            return DeviceTensor(made.detach().clone()).requires_grad_(made.requires_grad)
        return func(*args, **kwargs)

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        where = [x for x in (*args, kwargs.get("device")) if isinstance(x, (str, torch.device))]
        if not where or not _on_device(where[0]):
            return tensor.to(*args, **kwargs)
        rest = [x for x in args if not isinstance(x, (str, torch.device)) and x is not None]
        kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        rest = [x for x in rest if not isinstance(x, bool)]
        sent = tensor if isinstance(tensor, DeviceTensor) else DeviceTensor(tensor.detach().clone())
        return sent.to(*rest, **kwargs) if rest or kwargs else sent


class _Generator(torch.Generator):
    """A generator of either device; both draw on the CPU."""

    of_cuda: bool

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, "cpu")
        made.of_cuda = _on_device(device)
        return made


class _Constants(TorchDispatchMode):
    """Tensors that formulas of gradients make, on the device that torch itself takes ours to be on."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if any(isinstance(x, DeviceTensor) for x in tree_leaves((args, given))):
            return _dispatch(func, args, given)
        if given.get("device") == torch.device("meta"):
            return DeviceTensor(func(*args, **{**given, "device": "cpu"}))
        return func(*args, **given)


@contextmanager
def emulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DeviceTensor]]:
    """A block in which `CUDA` is a device. Gives the class of its tensors, whose `waits` begins at 0."""
    with monkeypatch.context() as patched, _Constants(), _Placement():
        patched.setattr(torch, "Generator", _Generator)
        DeviceTensor.waits = 0
        yield DeviceTensor
