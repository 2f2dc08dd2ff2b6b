"""The state of named tensors: each storage hashed once, on the device where it lies. Not run on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from snapshots.capture.state import hash_tensors
from snapshots.device.hash import hash_tensor
from snapshots.model import TensorState
from snapshots.tensor_chunks import TensorDigest

_Place = tuple[torch.device, int, int]


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of a module by its full name; tied ones under each of their names.

    Buffers that a state dict leaves out (``persistent=False``) are here too.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))


def raw_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as uint8 ``[n]``: a view wherever its elements lie densely, in whatever order; else a copy.

    Raises:
        ValueError: it has no bytes of its own to read (sparse, quantized or meta).
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError(f"tensor {name}: {tensor.layout} on {tensor.device} has no plain bytes")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    stored = tensor.permute(order)
    if not stored.is_contiguous():
        stored = tensor.contiguous()
    if stored.is_complex():
        stored = torch.view_as_real(stored)
    return stored.reshape(-1).view(torch.uint8)


def tensor_states(named: Mapping[str, torch.Tensor], *, threads_max: int = 1) -> dict[str, TensorState]:
    """Digest every tensor, in the mapping's order.

    Tensors that cover the same bytes are hashed once: the first has the digest, the others name it as their alias and
    carry its digest. A view of a part of another tensor is hashed by itself.

    Args:
        named: name → tensor. Nothing may write to them meanwhile.
        threads_max: for those in host memory, see :func:`snapshots.capture.state.hash_tensors`.

    Raises:
        ValueError: a tensor has no plain bytes.
    """
    owners: dict[_Place, str] = {}
    owner_of: dict[str, str] = {}
    raws: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        raw = raw_bytes(name, tensor)
        place = (raw.device, raw.data_ptr(), raw.numel())
        # Empty tensors lie nowhere; a copy lies where no other tensor is, for it is kept until the end.
        owner = owners.setdefault(place, name) if raw.numel() else name
        owner_of[name] = owner
        if owner == name:
            raws[name] = raw
    digests = _digests(raws, threads_max)
    return {
        name: TensorState(
            digest=digests[owner_of[name]].digest,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            alias="" if owner_of[name] == name else owner_of[name],
            chunks=digests[owner_of[name]].chunks,
            hash="xxh3" if tensor.device.type == "cpu" else "nh",
        )
        for name, tensor in named.items()
    }


def _digests(raws: Mapping[str, torch.Tensor], threads_max: int) -> dict[str, TensorDigest]:
    on_host = {name: raw.numpy() for name, raw in raws.items() if raw.device.type == "cpu"}
    on_device = {name: hash_tensor(raw) for name, raw in raws.items() if raw.device.type != "cpu"}
    return hash_tensors(on_host, threads_max=threads_max) | on_device
