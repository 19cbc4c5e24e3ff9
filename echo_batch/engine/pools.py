"""How large the host pool and the GPU pool become, and the nearest sizes that fit when the asked ones do not.

Arithmetic on tokens and bytes per worker; called by make_plan only. Imports no torch.
"""

from dataclasses import dataclass

from echo_batch.config import CacheConfig, Size
from echo_batch.engine.memory import TokenBytes
from echo_batch.errors import ConfigError
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.sizes import format_bytes, round_down_to_block, round_up_to_block, short_tokens

AUTO_HOST_SHARE = 0.6
"""Of free host memory, for `--host-pool auto`: page cache, input and output need the rest."""
HOST_PER_GPU_TOKEN = 12
"""`auto` keeps at least one GPU token for so many host tokens. The paper runs 9 to 16 at hit rates of 0.97 to 0.99."""
_LOW_SHARE = 2 * HOST_PER_GPU_TOKEN
_MIN_AUTO_HOST_TOKENS = 1024
"""An automatic host pool below this (and below the longest row) is no plan."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not fit, and the options that make it fit ("--host-pool 1.2M"; "" if none would)."""

    what: str
    suggestion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a worker has for its pools.

    device_bytes: what weights, runtime and activations leave on the GPU (on CPU: in memory, which the host pool then
    shares). host_bytes: free host memory, and usable_host_bytes how much of it a pool may take (None: shared).
    device_total_bytes: what a percentage of `--gpu-pool` refers to.
    """

    device_bytes: int
    device_total_bytes: int
    host_bytes: int
    usable_host_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the rows need. `wanted_tokens` is all host slots that the job can ever use at once (None: no bound)."""

    longest_row: int
    index_topk: int
    wanted_tokens: int | None
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Chosen sizes in tokens (multiples of 64) and what is wrong with them."""

    host_tokens: int
    gpu_tokens: int
    min_host_tokens: int
    min_gpu_tokens: int
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Costs:
    """Device bytes of one host slot and of one GPU row, and how many host slots the host memory allows."""

    host: int
    gpu: int
    room: int
    host_memory_tokens: int

    def gpu_beside(self, host_tokens: int) -> int:
        """Most GPU tokens beside a host pool."""
        return round_down_to_block(max(0, self.room - host_tokens * self.host) // self.gpu)

    def host_beside(self, gpu_tokens: int) -> int:
        """Most host tokens beside a GPU pool."""
        free = max(0, self.room - gpu_tokens * self.gpu)
        return min(self.host_memory_tokens, round_down_to_block(free // self.host))


def choose_pools(tokens: TokenBytes, asked: CacheConfig, room: Room, need: Need) -> Pools:
    """Sizes of both pools. With `offload` off there is one pool, and both sizes are its size.

    Raises ConfigError for settings that contradict each other or hold no block.
    """
    host_share = tokens.host_row or tokens.gpu_row
    host = _asked_tokens(asked.host_pool, host_share, room.host_bytes, "--host-pool")
    gpu = _asked_tokens(asked.gpu_pool, tokens.gpu_row, room.device_total_bytes, "--gpu-pool")
    if not asked.offload:
        return _one_pool(tokens, host, gpu, room, need)
    shared = room.usable_host_bytes is None
    costs = _Costs(
        host=tokens.index + tokens.host_map + (tokens.host_row if shared else 0),
        gpu=tokens.gpu_row + tokens.gpu_map,
        room=room.device_bytes,
        host_memory_tokens=round_down_to_block(
            (room.device_bytes if room.usable_host_bytes is None else room.usable_host_bytes) // tokens.host_row
        ),
    )
    min_gpu = round_up_to_block(min(need.index_topk, need.longest_row, host or need.longest_row) + 1)
    auto_share = int(AUTO_HOST_SHARE * room.host_bytes) // tokens.host_row
    host_tokens = host or _auto_host(costs, gpu, min_gpu, need, auto_share)
    # All tokens resident, and one row more per request for its newest token: more would never be used.
    useful_gpu = host_tokens + round_up_to_block(need.max_num_seqs)
    gpu_tokens = gpu or min(useful_gpu, costs.gpu_beside(host_tokens)) or BLOCK_SIZE
    pools = Pools(
        host_tokens=host_tokens,
        gpu_tokens=max(gpu_tokens, min_gpu) if gpu is None else gpu_tokens,
        min_host_tokens=round_up_to_block(need.longest_row),
        min_gpu_tokens=min_gpu,
    )
    problems = _problems(pools, costs, tokens, shared)
    if host is None and not problems and host_tokens < min(need.longest_row, _MIN_AUTO_HOST_TOKENS):
        problems = [f"there is room for only {host_tokens:,} host tokens beside {gpu_tokens:,} GPU tokens"]
    suggestion = _nearest(costs, host, gpu, pools, min(auto_share, costs.host_memory_tokens)) if problems else ""
    return Pools(
        host_tokens=pools.host_tokens,
        gpu_tokens=pools.gpu_tokens,
        min_host_tokens=pools.min_host_tokens,
        min_gpu_tokens=pools.min_gpu_tokens,
        problems=tuple(Problem(what, suggestion) for what in problems),
        notes=() if problems else _notes(pools, costs, gpu),
    )


def _auto_host(costs: _Costs, gpu: int | None, min_gpu: int, need: Need, auto_share: int) -> int:
    """The smallest of: the share of host memory, what the input can use, and what leaves a useful GPU pool."""
    beside = costs.host_beside(gpu or min_gpu)
    bounds = [auto_share, costs.host_memory_tokens, beside]
    if gpu is None:
        bounds.append(costs.room * HOST_PER_GPU_TOKEN // (costs.host * HOST_PER_GPU_TOKEN + costs.gpu))
    if need.wanted_tokens is not None:
        bounds.append(round_up_to_block(need.wanted_tokens))
    return max(BLOCK_SIZE, round_down_to_block(min(bounds)))


def _problems(pools: Pools, costs: _Costs, tokens: TokenBytes, shared: bool) -> list[str]:
    problems = []
    place = "memory" if shared else "the GPU"
    if not shared and pools.host_tokens > costs.host_memory_tokens:
        asked, usable = pools.host_tokens * tokens.host_row, costs.host_memory_tokens * tokens.host_row
        problems.append(
            f"the host pool of {pools.host_tokens:,} tokens takes {format_bytes(asked)} per worker, "
            f"host memory has room for {format_bytes(usable)}"
        )
    need = pools.host_tokens * costs.host + pools.gpu_tokens * costs.gpu
    if need > costs.room:
        what = "both pools" if shared else "the GPU pool and the indexer cache of the host pool"
        problems.append(
            f"{what} ({pools.gpu_tokens:,} GPU and {pools.host_tokens:,} host tokens) take {format_bytes(need)}, "
            f"{place} has {format_bytes(max(0, costs.room))} left for them"
        )
    if pools.gpu_tokens < pools.min_gpu_tokens:
        problems.append(
            f"the GPU pool of {pools.gpu_tokens:,} tokens cannot hold one row's selection: at least "
            f"{pools.min_gpu_tokens:,} are needed"
        )
    return problems


def _nearest(costs: _Costs, host: int | None, gpu: int | None, pools: Pools, most_auto_host: int) -> str:
    """Options that fit, changing as little as possible of what was asked ("" when no pool size helps)."""
    least = pools.min_gpu_tokens
    wanted_gpu = max(gpu or least, least)
    if host is None:
        # The host pool follows: leave it room for the longest row, or else for some rows at least.
        for enough in (pools.min_host_tokens, min(pools.min_host_tokens, _MIN_AUTO_HOST_TOKENS)):
            possible = min(wanted_gpu, costs.gpu_beside(enough))
            if gpu is not None and possible != gpu and possible >= least and enough <= most_auto_host:
                return _option("--gpu-pool", possible, gpu)
        return ""
    host_fits_memory = host <= costs.host_memory_tokens
    if host_fits_memory and costs.gpu_beside(host) >= least:
        return _option("--gpu-pool", min(wanted_gpu, costs.gpu_beside(host)), gpu)
    for new_gpu in (wanted_gpu, least):
        new_host = min(host, costs.host_beside(new_gpu))
        if new_host >= BLOCK_SIZE:
            options = [_option("--host-pool", new_host, host)]
            if gpu is not None and new_gpu != gpu:
                options.append(_option("--gpu-pool", new_gpu, gpu))
            return " ".join(options)
    return ""


def _option(name: str, tokens: int, asked: int | None) -> str:
    """A smaller size is rounded down to three digits; a larger one (a minimum) must be exact."""
    smaller = asked is not None and tokens < asked
    return f"{name} {short_tokens(tokens) if smaller else tokens}"


def _notes(pools: Pools, costs: _Costs, gpu: int | None) -> tuple[str, ...]:
    if pools.gpu_tokens >= pools.host_tokens or pools.gpu_tokens * _LOW_SHARE >= pools.host_tokens:
        return ()
    note = (
        f"the GPU pool holds 1 of {pools.host_tokens // pools.gpu_tokens} host tokens: expect a low hit rate and more "
        "recalls"
    )
    if gpu is None:
        better = costs.room * HOST_PER_GPU_TOKEN // (costs.host * HOST_PER_GPU_TOKEN + costs.gpu)
        note += f"; --host-pool {short_tokens(better)} would leave 1 of {HOST_PER_GPU_TOKEN}"
    return (note,)


def _one_pool(tokens: TokenBytes, host: int | None, gpu: int | None, room: Room, need: Need) -> Pools:
    """--offload off: every token stays on the device."""
    if host is not None and gpu is not None and host != gpu:
        raise ConfigError(f"with --offload off there is one pool: --host-pool {host} and --gpu-pool {gpu} differ")
    cost = tokens.gpu_row + tokens.index
    possible = round_down_to_block(max(0, room.device_bytes) // cost)
    asked = gpu or host
    minimum = round_up_to_block(need.longest_row)
    wanted = possible if need.wanted_tokens is None else round_up_to_block(need.wanted_tokens)
    chosen = asked or max(BLOCK_SIZE, min(possible, wanted))
    problems: tuple[Problem, ...] = ()
    if chosen > possible:
        what = (
            f"a pool of {chosen:,} tokens takes {format_bytes(chosen * cost)}, {format_bytes(possible * cost)} are left"
        )
        name = "--gpu-pool" if gpu is not None else "--host-pool"
        problems = (Problem(what, f"{name} {short_tokens(possible)}" if possible and asked else ""),)
    return Pools(
        host_tokens=chosen,
        gpu_tokens=chosen,
        min_host_tokens=minimum,
        min_gpu_tokens=minimum,
        problems=problems,
    )


def _asked_tokens(size: Size, row_bytes: int, whole_bytes: int, option: str) -> int | None:
    """A Size as tokens per worker in whole blocks; None for auto. A percentage is of `whole_bytes`."""
    if size.kind == "auto":
        return None
    if size.kind == "tokens":
        return int(size.value)
    num_bytes = size.value if size.kind == "bytes" else size.value / 100 * whole_bytes
    tokens = round_down_to_block(int(num_bytes // row_bytes))
    if tokens == 0:
        raise ConfigError(f"{option}: {format_bytes(int(num_bytes))} hold less than one block of {BLOCK_SIZE} tokens")
    return tokens
