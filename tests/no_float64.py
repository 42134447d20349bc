"""A stand-in for Apple's GPU; the CPU computes its tensors.

`install()` registers a device "standin" with torch, for the whole process. Under `with StandIn():`
its tensors refuse, as MPS does, float64 and to be mixed with host tensors other than scalars. It
cannot show Metal's arithmetic."""

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

INSTALLABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # torch 2.13


def install() -> torch.device:
    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

        def synchronize(self) -> None:
            pass

        def get_rng_state(self) -> torch.Tensor:
            return torch.tensor([7], dtype=torch.uint8)

        def set_rng_state(self, state: torch.Tensor) -> None:
            assert state.tolist() == [7]

    register = backend_registration._setup_privateuseone_for_python_backend
    register("standin", backend_module=Backend())
    return torch.device("standin", 0)


class OnStandIn(torch.Tensor):
    """A tensor on the device; `inner` holds its values on the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnStandIn":
        if inner.dtype == torch.float64:
            raise TypeError("this device has no float64")
        layout = inner.shape, inner.stride(), inner.storage_offset()
        options = {"dtype": inner.dtype, "device": torch.device("standin", 0)}
        outer = torch.Tensor._make_wrapper_subclass(cls, *layout, **options)
        outer.inner = inner
        return outer

    def tolist(self):
        return self.detach().inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def dispatch(func, args, kwargs):
    aten = torch.ops.aten
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = any(isinstance(t, OnStandIn) for t in tensors)
    copies = func in (aten._to_copy.default, aten.copy_.default)
    if here and not copies and any(not isinstance(t, OnStandIn) and t.dim() > 0 for t in tensors):
        raise RuntimeError(f"{func}: a tensor of the host among those of the device")
    args_of_cpu, kwargs_of_cpu = tree_map_only(OnStandIn, lambda t: t.inner, (args, dict(kwargs)))
    if kwargs.get("device") is not None:
        here = torch.device(kwargs["device"]).type == "standin"
        kwargs_of_cpu["device"] = "cpu" if here else kwargs["device"]
    out = func(*args_of_cpu, **kwargs_of_cpu)
    if func in (aten._local_scalar_dense.default, aten.copy_.default):
        return args[0] if func is aten.copy_.default else out
    if not here:
        return out
    changed = {id(t.inner): t for t in tensors if isinstance(t, OnStandIn)}  # in place
    return tree_map_only(
        torch.Tensor, lambda t: changed[id(t)] if id(t) in changed else OnStandIn(t), out
    )


class StandIn(TorchDispatchMode):
    """Also catches functions without tensor arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})
