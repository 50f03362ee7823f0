"""Private names of PyTorch, in one module, so that a release which renames one breaks one file.

No public function answers these questions: which modes and hooks surround a call, how a backward was called, which
kernels are selected. These are aliases, not wrappers, because some are called once per micro-batch. Attributes of
tensors cannot have an alias: `segment` reads their versions, `segment` and `autograd` their tables of hooks.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.utils._device import DeviceContext

__all__ = ["DeviceContext"]

_c, _functorch, _variable = cast(Any, torch._C), cast(Any, pyfunctorch), cast(Any, torch.autograd.Variable)

# Transforms of torch.func, and forward mode. `_current_level` of forward mode is an int that PyTorch replaces, so it is
# read from the module at every call.
transforms: Callable[[], object] = _c._functorch.peek_interpreter_stack
suspend_transforms: Callable[[], AbstractContextManager[object]] = _functorch.temporarily_clear_interpreter_stack
is_batched: Callable[[Any], bool] = _c._functorch.is_batchedtensor
is_legacy_batched: Callable[[Any], bool] = _c._functorch.is_legacy_batchedtensor
forward_mode = cast(Any, torch.autograd.forward_ad)

# Inside a backward. AOTAutograd uses the first one too: it is the only way to detect ``retain_graph=True`` there.
backward_keeps_graph: Callable[[], bool] = _c._autograd._get_current_graph_task_keep_graph
backward_number: Callable[[], int] = _c._current_graph_task_id
queue_callback: Callable[[Callable[[], object]], None] = _variable._execution_engine.queue_callback

# The engine without the Python layer of `torch.autograd.grad`, which costs as much as the backward of a small layer.
# Arguments: roots, their gradients, retain_graph, create_graph, targets, allow_unused, accumulate.
run_backward: Callable[..., tuple[Any, ...]] = _variable._execution_engine.run_backward
set_grad_mode: Callable[[bool], None] = _c._set_grad_enabled

HookTable = dict[int, Callable[..., Any]]  # the hooks of a tensor, by the numbers of their handles

# Modes and hooks of the current thread.
dispatch_mode_count: Callable[[], int] = _c._len_torch_dispatch_stack
function_mode_count: Callable[[], int] = _c._len_torch_function_stack
function_mode_at: Callable[[int], object] = _c._get_function_stack_at
pop_function_mode: Callable[[], object] = _c._pop_torch_function_stack
push_function_mode: Callable[[object], None] = _c._push_on_torch_function_stack
without_subclasses = cast("Callable[[], AbstractContextManager[object]]", _c.DisableTorchFunctionSubclass)
saved_tensor_hooks: Callable[[bool], object] = _c._autograd._top_saved_tensors_default_hooks

# Flags of the process.
get_precision: Callable[[str, str], str] = _c._get_fp32_precision_getter
set_precision: Callable[[str, str, str], object] = _c._set_fp32_precision_setter
get_cudnn_tf32: Callable[[], bool] = _c._get_cudnn_allow_tf32
set_cudnn_tf32: Callable[[bool], object] = _c._set_cudnn_allow_tf32

# Backend and operator of each ``torch.backends.*.fp32_precision``, after the setting that it inherits from.
PRECISIONS = [("generic", "all"), *product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]

_CUDNN = ("enabled", "benchmark", "deterministic")
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
# Getter and setter of each flag that ``torch.backends.cudnn.flags`` and ``torch.nn.attention.sdpa_kernel`` change.
# Another kernel rounds differently, and draws another dropout mask from the same seed.
KERNEL_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    *((getattr(_c, f"_get_cudnn_{name}"), getattr(_c, f"_set_cudnn_{name}")) for name in _CUDNN),
    *((getattr(_c, f"_get_{name}_sdp_enabled"), getattr(_c, f"_set_sdp_use_{name}")) for name in _ATTENTION),
    (_c._get_sdp_priority_order, _c._set_sdp_priority_order),
]

# A tensor of a subclass, with the memory of another one and without its graph.
make_subclass: Callable[[type[Any], Any, bool], Any] = cast(Any, torch.Tensor)._make_subclass

foreach_copy: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = cast(Any, torch)._foreach_copy_

# Parses the arguments of ``Module.to`` into device, dtype and others.
parse_to: Callable[..., tuple[Any, ...]] = _c._nn._parse_to
