"""A GPU that isn't there. Its tensors say that they are on cuda:0, and the CPU computes them.

Inside `with PretendGPU() as gpu:` torch says that this machine has one NVIDIA GPU. Its tensors do
not mix with those of the host, its memory is limited, and it has its own random numbers. gpu.waits
counts where the program waits for the GPU, and gpu.unpinned where it copies from memory that is not
pinned without waiting. PretendGPU("mps") is an Apple GPU, which has no float64.

It cannot show kernels, speed, compiled graphs or several GPUs. To C++ the tensors are those of a
CPU, so the operations that autocast runs in 16 bits are the CPU's list of them."""

import contextlib
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from weakref import WeakValueDictionary

import torch
import torch._dynamo.polyfills.loader  # It reads signatures of functions that are replaced below.
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).parents[1]
# The host needs the result of these, or its size, so it waits for the device.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
# These take tensors of both sides: they copy, or take indices from the host.
MIXING = {"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"}


class Block:
    """Memory of the device. It is free again when no tensor is in it any more."""

    def __init__(self, gpu: "PretendGPU", size: int):
        self.gpu, self.size = gpu, 0
        if gpu.used + size > gpu.memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.size = -(-size // 512) * 512  # The allocator rounds up to 512 bytes.
        gpu.used += self.size
        gpu.peak = max(gpu.peak, gpu.used)

    def __del__(self):
        self.gpu.used -= self.size


class OnGPU(torch.Tensor):
    """A tensor on the device. Python sees the device, C++ an ordinary tensor of the CPU."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, gpu: "PretendGPU") -> "OnGPU":
        if gpu.device.type == "mps" and values.dtype == torch.float64:
            raise TypeError("this device has no float64")
        storage = values.untyped_storage()
        block = gpu.blocks.get(storage.data_ptr()) or Block(gpu, storage.nbytes())
        self = torch.Tensor._make_subclass(cls, values)
        self.gpu, self.block = gpu, gpu.blocks.setdefault(storage.data_ptr(), block)
        return self

    device = property(lambda self: self.gpu.device)
    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: self.gpu.device.type == "cuda")

    def on_host(self) -> torch.Tensor:
        """The same memory as a tensor of the host, which a program cannot have."""
        with no_dispatch():
            return self.detach()

    def __reduce_ex__(self, protocol):  # for torch.save
        return self.on_host().__reduce_ex__(protocol)

    def tolist(self) -> list:
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function}: outside of `with PretendGPU()`")


class PretendGPU(TorchDispatchMode):
    """kind: cuda or mps. memory: in bytes. count: of GPUs, of which the first one works."""

    def __init__(
        self, kind="cuda", name="NVIDIA A100-SXM4-80GB", capability=(8, 0), memory=80e9, count=1
    ):
        super().__init__()
        self.count, self.current = count, 0  # the number of the GPU that set_device() has chosen
        self.device = torch.device(kind, 0)
        self.name, self.capability, self.memory = name, capability, int(memory)
        self.used = self.peak = 0  # bytes
        self.blocks = WeakValueDictionary()  # the Block at each address
        self.pinned = {}  # the storage of pinned memory at each address
        self.waits = Counter()  # The keys are lines of the project, here and below.
        self.unpinned = Counter()  # copies from unpinned memory that nobody waits for
        self.is_working = False  # True from an operation until the program waits for the device
        self.generators = {}  # those of the device, at each address
        self.random = torch.Generator().manual_seed(0)  # for calls without a generator

    def __enter__(self):
        self.patches = contextlib.ExitStack()
        self.replace_functions()
        # Module.to() then exchanges what is in a parameter, so that tied ones stay tied.
        swap = torch.__future__.get_swap_module_params_on_conversion()
        self.patches.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        torch.__future__.set_swap_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.close()

    def is_here(self, device: torch.device | str) -> bool:
        return torch.device(device).type == self.device.type

    def wait(self) -> None:
        self.is_working = False
        self.note(self.waits)

    def note(self, counter: Counter) -> None:
        """Counts for the line of the project that is running."""
        for frame, line in traceback.walk_stack(None):
            path = Path(frame.f_code.co_filename)
            if ROOT in path.parents and path != Path(__file__):
                counter[f"{path.name}:{line}"] += 1
                return

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), function._schema.name.partition("::")[2]
        leaves = tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        ours = [t for t in tensors if isinstance(t, OnGPU)]
        # A number on the host may take part in elementwise arithmetic.
        with_number = torch.Tag.pointwise in function.tags or name == "fill_"
        hosts = [t for t in tensors if not isinstance(t, OnGPU) and (t.dim() or not with_number)]
        if ours and hosts and name not in MIXING:
            raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
        here = bool(ours)  # The result will be on the device.
        if name == "copy_":
            here = isinstance(args[0], OnGPU)
        if kwargs.get("device") is not None:
            # C++ asks for the CPU where it means the device of the arguments.
            here = here or self.is_here(kwargs["device"])
            kwargs["device"] = "cpu" if here else kwargs["device"]
        for generator in (x for x in leaves if isinstance(x, torch._C.Generator)):
            if (generator._cdata in self.generators) != here:
                raise RuntimeError(f"{name}: a generator of another device")
        by_mask = name == "index" and any(t.dtype == torch.bool for t in tensors[1:])
        self.is_working = self.is_working or here
        if ours and (by_mask or name in WAITING):
            self.wait()
        if name in ("copy_", "_to_copy") and self.is_late_copy(name, args, kwargs, here):
            return OnGPU(args[0], self)
        random = here and torch.Tag.nondeterministic_seeded in function.tags
        with self.own_random_numbers() if random else contextlib.nullcontext(), no_dispatch():
            out = function(*args, **kwargs)
        if not here:
            return out
        changed = {id(t) for t in tensors}  # What was changed in place is on the device already.
        return tree_map_only(torch.Tensor, lambda t: t if id(t) in changed else OnGPU(t, self), out)

    def is_late_copy(self, name: str, args: tuple, kwargs: dict, here: bool) -> bool:
        """Counts a copy between host and device. True if nobody waits for it and it is allowed.

        Its result shares memory with its source, since a late copy may see later changes."""
        source = args[1] if name == "copy_" else args[0]
        if isinstance(source, OnGPU) == here:
            return False
        if not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
            self.wait()
        elif here and not self.is_pinned(source):
            self.note(self.unpinned)
        else:
            return here and name == "_to_copy" and kwargs.get("dtype") in (None, source.dtype)
        return False

    def is_pinned(self, t: torch.Tensor) -> bool:
        return not isinstance(t, OnGPU) and t.untyped_storage().data_ptr() in self.pinned

    def pin(self, t: torch.Tensor) -> torch.Tensor:
        copy = t.clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy.untyped_storage()
        return copy

    @contextlib.contextmanager
    def own_random_numbers(self):
        """The CPU's generator makes the device's random numbers, from the device's state."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.random.get_state())
        yield
        self.random.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)

    def replace(self, target: object, **functions: object) -> None:
        self.patches.enter_context(mock.patch.multiple(target, **functions))

    def replace_functions(self) -> None:
        """Replaces the functions of torch that must know of the device."""
        gpu, kind, generators = self, self.device.type, self.generators
        make_tensor, convert, tag = torch.tensor, torch.Tensor.to, torch.serialization.location_tag
        attend = torch.nn.functional.scaled_dot_product_attention
        by_device = torch._C._group_tensors_by_device_and_dtype

        class Generator(torch.Generator):
            def __new__(cls, device="cpu"):
                self = super().__new__(cls, "cpu")
                self.place = torch.device(device)
                if gpu.is_here(device):
                    generators[self._cdata] = self
                return self

            @property
            def device(self):
                return gpu.device if gpu.is_here(self.place) else self.place

        def tensor(data, device=None, **options):
            made = make_tensor(data, **options)
            return made if device is None else made.to(device)

        def to(t, *args, copy=False, **kwargs):
            """C++ sees no difference between the device and the CPU, so this tells them apart."""
            device, dtype, late, _ = torch._C._nn._parse_to(*args, **kwargs)
            if not isinstance(t, OnGPU):
                if device is None or not gpu.is_here(device):
                    return convert(t, *args, copy=copy, **kwargs)
                return torch.ops.aten._to_copy(t, dtype=dtype, device=gpu.device, non_blocking=late)
            dtype = dtype or t.dtype
            if device is None or gpu.is_here(device):
                return convert(t, dtype, copy=copy)
            return torch.empty(t.shape, dtype=dtype, device=device).copy_(t, late)

        def group(lists, with_indices=False):
            groups = by_device(lists, with_indices)
            ours = isinstance(lists[0][0], OnGPU)
            return {(gpu.device if ours else d, dtype): g for (d, dtype), g in groups.items()}

        def compiled(function=None, **_):  # The function stays as it is.
            return function or compiled

        def attention(*args, **kwargs):
            """The plain kernel comes last, since C++ makes its mask on the CPU."""
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                return attend(*args, **kwargs)

        def exchanged(function):
            """autocast for the device becomes the CPU's, which C++ applies to these tensors.

            In exchange, autocast for the CPU does not touch them."""
            names = {kind: "cpu", "cpu": kind}
            return lambda device=kind, *args: function(names.get(device, device), *args)

        self.replace(torch, Generator=Generator, compile=compiled, tensor=tensor)
        for of, name in (("is", "enabled"), ("set", "enabled"), ("get", "dtype"), ("set", "dtype")):
            name = f"{of}_autocast_{name}"
            self.replace(torch, **{name: exchanged(getattr(torch, name))})
        self.replace(torch.Tensor, to=to, cpu=lambda t, *_: t.to("cpu"))
        self.replace(torch.Tensor, pin_memory=lambda t, *_: self.pin(t))
        self.replace(torch.Tensor, is_pinned=lambda t, *_: self.is_pinned(t))
        self.replace(torch.nn.functional, scaled_dot_product_attention=attention)
        self.replace(torch._C, _group_tensors_by_device_and_dtype=group)
        # A checkpoint says where its tensors were. Without map_location they go there again.
        place = lambda t: str(self.device) if t.data_ptr() in self.blocks else tag(t)  # noqa: E731
        self.replace(torch.serialization, location_tag=place)
        self.replace(
            torch.accelerator,
            is_available=lambda: True,
            current_accelerator=lambda *_, **__: torch.device(kind),
            current_stream=lambda *_: SimpleNamespace(is_capturing=lambda: False),
            synchronize=lambda *_: self.wait(),
        )
        self.replace(
            torch.get_device_module(kind),
            synchronize=lambda *_: self.wait(),
            get_rng_state=lambda *_: self.random.get_state(),
            set_rng_state=lambda state, *_: self.random.set_state(state),
        )
        if kind == "mps":
            self.replace(torch.backends.mps, is_available=lambda: True)
            self.replace(torch.mps, manual_seed=lambda seed: self.random.manual_seed(seed))
            return
        self.replace(
            torch.cuda,
            is_available=lambda: True,
            is_initialized=lambda: self.peak > 0,
            _lazy_init=lambda: None,
            device_count=lambda: self.count,
            current_device=lambda: self.current,
            set_device=lambda device: setattr(self, "current", torch.device(device).index),
            get_device_name=lambda *_: self.name,
            get_device_capability=lambda *_: self.capability,
            get_device_properties=lambda *_: SimpleNamespace(total_memory=self.memory),
            get_arch_list=lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
            is_bf16_supported=lambda *_, **__: True,  # Old chips emulate it slowly.
            mem_get_info=lambda *_: (self.memory - self.used, self.memory),
            max_memory_allocated=lambda *_: self.peak,
            reset_peak_memory_stats=lambda *_: setattr(self, "peak", self.used),
            is_current_stream_capturing=lambda: False,
            manual_seed_all=lambda seed: self.random.manual_seed(seed),
        )
