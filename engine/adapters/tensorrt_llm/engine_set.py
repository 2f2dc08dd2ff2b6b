"""The files TensorRT-LLM loads, as one atomic set: checked from names and ``config.json`` alone.

Two layouts. An *engine set* is what ``trtllm-build`` saves: ``config.json`` and ``rank0.engine`` … ``rankN.engine``,
one per rank of the mapping, each perhaps with managed weights. A *checkpoint* is a Hugging Face folder for the
PyTorch backend, the only layout that TensorRT-LLM runs since its pull request 15918 removed the TensorRT backend.

Format source: ``EngineConfig.to_dict`` and ``Engine.save`` in ``tensorrt_llm/builder.py`` (commit 008b2b8d),
``Mapping.to_dict`` in ``tensorrt_llm/mapping.py`` (05ebebb2). Unknown fields are allowed: the format grows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

CONFIG_NAME = "config.json"
# A config lists hyperparameters and, mixed-precision apart, no per-tensor data: real ones have a few KiB.
CONFIG_BYTES_MAX = 4 << 20
# Since 1.0 the LLM API is declared stable; an engine only runs on the version that built it.
VERSION_FIRST, VERSION_END = (1, 0), (2, 0)
# More ranks than any published deployment (72 in one NVLink domain); bounds the messages.
WORLD_SIZE_MAX = 1024

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:[.\w+-]*)\Z")
_ENGINE = re.compile(r"rank(0|[1-9]\d{0,5})\.engine\Z")
_MANAGED = re.compile(r"rank(0|[1-9]\d{0,5})_managed_weights\.safetensors\Z")
# What is meant to be of a rank, however it is spelled: ``rank00.engine`` must not slip through as any other file.
_RANK_LIKE = re.compile(r"rank[^/]*\.engine\Z|rank[^/]*_managed_weights[^/]*\Z", re.IGNORECASE)

KvCacheType = Literal["PAGED", "CONTINUOUS", "DISABLED"]


class EngineSetInvalidError(ValueError):
    """The files are not one whole set that TensorRT-LLM could load; the message says which and why."""


@dataclass(frozen=True, slots=True)
class EngineSet:
    """A whole engine set.

    Attributes:
        version: of the TensorRT-LLM that built it.
        dtype: of weights and activations, as ``pretrained_config`` names it.
        quantization: weight quantization algorithm, or None.
        kv_quantization: KV cache quantization algorithm, or None for ``dtype``.
        max_seq_len: prompt and output together, in tokens.
        max_num_tokens: tokens of one step over all sequences.
        pretrained_config: as in the file; the ``model`` of the build.
        engines: engine files by rank.
        managed_weights: their weight files by rank; empty, or one per rank.
    """

    version: str
    architecture: str
    dtype: str
    quantization: str | None
    kv_quantization: str | None
    kv_cache_type: KvCacheType
    world_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    pretrained_config: dict[str, Any]
    engines: tuple[str, ...]
    managed_weights: tuple[str, ...]

    @property
    def model(self) -> dict[str, Any]:
        """What ``build.json`` says of the model."""
        return self.pretrained_config


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face folder for the PyTorch backend.

    Attributes:
        config: ``config.json`` as parsed; the ``model`` of the build.
        weights: the safetensors files, sorted.
    """

    architecture: str
    config: dict[str, Any]
    weights: tuple[str, ...]

    @property
    def model(self) -> dict[str, Any]:
        """What ``build.json`` says of the model."""
        return self.config


class _Mapping(msgspec.Struct):
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    auto_parallel: bool = False


class _Quantization(msgspec.Struct):
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None


class _Pretrained(msgspec.Struct):
    architecture: str
    dtype: str
    mapping: _Mapping = msgspec.field(default_factory=_Mapping)
    quantization: _Quantization | None = None


class _Plugins(msgspec.Struct):
    dtype: str | None = None
    nccl_plugin: str | msgspec.UnsetType | None = msgspec.UNSET
    paged_kv_cache: bool | None = None


class _BuildConfig(msgspec.Struct):
    max_input_len: int
    max_seq_len: int
    max_batch_size: int
    max_beam_width: int
    max_num_tokens: int
    kv_cache_type: str | None = None
    plugin_config: _Plugins | None = None


class _Config(msgspec.Struct):
    version: str
    pretrained_config: _Pretrained
    build_config: _BuildConfig


def check_files(names: Iterable[str], config: bytes) -> EngineSet | Checkpoint:
    """Decide what a folder holds and that it holds all of it.

    Args:
        names: relative POSIX paths of every file in the folder.
        config: content of ``config.json``.

    Raises:
        EngineSetInvalidError: neither layout, both, or one with something missing, extra or contradictory.
    """
    present = frozenset(names)
    parsed = _object(config)
    ranked = any(_RANK_LIKE.search(name) for name in present)
    engine_like = "pretrained_config" in parsed or "build_config" in parsed
    if ranked or engine_like:
        return _engine_set(present, config, parsed)
    return _checkpoint(present, parsed)


def _object(config: bytes) -> dict[str, Any]:
    if len(config) > CONFIG_BYTES_MAX:
        raise EngineSetInvalidError(f"{CONFIG_NAME} has {len(config)} bytes, more than {CONFIG_BYTES_MAX}")
    try:
        return msgspec.json.decode(config, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineSetInvalidError(f"{CONFIG_NAME} does not parse: {error}") from error


def _engine_set(names: frozenset[str], raw: bytes, parsed: dict[str, Any]) -> EngineSet:
    for part in ("version", "pretrained_config", "build_config"):
        if part not in parsed:
            raise EngineSetInvalidError(f"{CONFIG_NAME} has no {part}: it is not the config of a built engine")
    try:
        config = msgspec.json.decode(raw, type=_Config)
    except msgspec.MsgspecError as error:
        raise EngineSetInvalidError(f"{CONFIG_NAME}: {error}") from error
    _check_version(config.version)
    _check_limits(config.build_config)
    mapping = config.pretrained_config.mapping
    _check_mapping(mapping)
    kv_cache_type = _check_agreement(config)
    engines, managed = _check_ranks(names, mapping.world_size)
    quantization = config.pretrained_config.quantization or _Quantization()
    build = config.build_config
    return EngineSet(
        version=config.version,
        architecture=config.pretrained_config.architecture,
        dtype=config.pretrained_config.dtype,
        quantization=quantization.quant_algo,
        kv_quantization=quantization.kv_cache_quant_algo,
        kv_cache_type=kv_cache_type,
        world_size=mapping.world_size,
        tp_size=mapping.tp_size,
        pp_size=mapping.pp_size,
        cp_size=mapping.cp_size,
        max_batch_size=build.max_batch_size,
        max_input_len=build.max_input_len,
        max_seq_len=build.max_seq_len,
        max_num_tokens=build.max_num_tokens,
        max_beam_width=build.max_beam_width,
        pretrained_config=parsed["pretrained_config"],
        engines=engines,
        managed_weights=managed,
    )


def _check_version(version: str) -> None:
    match = _VERSION.match(version)
    if match is None:
        raise EngineSetInvalidError(f"version {version!r} is not a version")
    if not VERSION_FIRST <= (int(match[1]), int(match[2])) < VERSION_END:
        wanted = f"{_dotted(VERSION_FIRST)} or later, before {_dotted(VERSION_END)}"
        raise EngineSetInvalidError(f"built by TensorRT-LLM {version}; supported is {wanted}")


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _check_limits(build: _BuildConfig) -> None:
    for name in ("max_input_len", "max_seq_len", "max_batch_size", "max_beam_width", "max_num_tokens"):
        if getattr(build, name) < 1:
            raise EngineSetInvalidError(f"build_config.{name} is {getattr(build, name)}, less than 1")
    if build.max_input_len > build.max_seq_len:
        # The builder clips it, so a larger one was edited afterwards.
        raise EngineSetInvalidError(
            f"build_config.max_input_len {build.max_input_len} is larger than max_seq_len {build.max_seq_len}"
        )


def _check_mapping(mapping: _Mapping) -> None:
    if not 1 <= mapping.world_size <= WORLD_SIZE_MAX:
        raise EngineSetInvalidError(f"mapping.world_size is {mapping.world_size}, not in 1 … {WORLD_SIZE_MAX}")
    sizes = (mapping.tp_size, mapping.pp_size, mapping.cp_size)
    if min(sizes) < 1:
        raise EngineSetInvalidError(f"mapping has a size below 1: tp {sizes[0]}, pp {sizes[1]}, cp {sizes[2]}")
    product = sizes[0] * sizes[1] * sizes[2]
    # An automatically sharded engine keeps all three at 1 and only has a world size.
    if product != (1 if mapping.auto_parallel else mapping.world_size):
        raise EngineSetInvalidError(
            f"mapping.world_size is {mapping.world_size}, "
            f"but tp {sizes[0]} * pp {sizes[1]} * cp {sizes[2]} is {product}"
        )


def _check_agreement(config: _Config) -> KvCacheType:
    """What ``build()`` derives from ``pretrained_config`` and stores in ``build_config`` still agrees with it."""
    model, build = config.pretrained_config, config.build_config
    plugins = build.plugin_config or _Plugins()
    if plugins.dtype not in {None, "auto", model.dtype}:
        raise EngineSetInvalidError(
            f"build_config.plugin_config.dtype is {plugins.dtype}, but pretrained_config.dtype is {model.dtype}"
        )
    if plugins.nccl_plugin is None and model.mapping.world_size > 1:
        raise EngineSetInvalidError(
            f"pretrained_config.mapping.world_size is {model.mapping.world_size}, "
            "but build_config.plugin_config.nccl_plugin is null: built for one GPU"
        )
    # Stored as the member's name; some versions write it in lower case.
    kind = (build.kv_cache_type or ("CONTINUOUS" if plugins.paged_kv_cache is False else "PAGED")).upper()
    if kind not in {"PAGED", "CONTINUOUS", "DISABLED"}:
        raise EngineSetInvalidError(f"build_config.kv_cache_type is {build.kv_cache_type!r}")
    if plugins.paged_kv_cache is not None and plugins.paged_kv_cache != (kind == "PAGED"):
        raise EngineSetInvalidError(
            f"build_config.kv_cache_type is {kind}, but plugin_config.paged_kv_cache is {plugins.paged_kv_cache}"
        )
    return kind  # type: ignore[return-value]  # narrowed by the set above


def _check_ranks(names: frozenset[str], world_size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    engines = {int(match[1]): name for name in names if (match := _ENGINE.match(name))}
    managed = {int(match[1]): name for name in names if (match := _MANAGED.match(name))}
    known = {*engines.values(), *managed.values()}
    if odd := sorted(name for name in names if _RANK_LIKE.search(name) and name not in known):
        raise EngineSetInvalidError(f"{odd[0]} is not where or how the file of a rank is named")
    wanted = set(range(world_size))
    if missing := sorted(wanted - engines.keys()):
        raise EngineSetInvalidError(f"rank{missing[0]}.engine is missing; the mapping has {world_size} ranks")
    if extra := sorted(engines.keys() - wanted):
        raise EngineSetInvalidError(f"rank{extra[0]}.engine is extra; the mapping has {world_size} ranks")
    if managed and managed.keys() != wanted:
        rank = min(managed.keys() ^ wanted)
        state = "missing" if rank in wanted else "extra"
        raise EngineSetInvalidError(f"rank{rank}_managed_weights.safetensors is {state}; all ranks have one, or none")
    return tuple(engines[rank] for rank in sorted(wanted)), tuple(managed[rank] for rank in sorted(managed))


def _checkpoint(names: frozenset[str], config: dict[str, Any]) -> Checkpoint:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise EngineSetInvalidError(
            f"{CONFIG_NAME} is neither an engine's (pretrained_config) nor a model's (architectures)"
        )
    weights = tuple(sorted(name for name in names if "/" not in name and name.endswith(".safetensors")))
    if not weights:
        raise EngineSetInvalidError("no rank0.engine and no safetensors file: nothing that TensorRT-LLM could load")
    return Checkpoint(architecture=architectures[0], config=config, weights=weights)
