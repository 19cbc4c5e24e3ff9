"""Pool sizes over many rooms: what fits stays inside, and advice can be followed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_batch.config import CacheConfig, Size
from echo_batch.engine.memory import TokenBytes
from echo_batch.engine.pools import Need, Pools, Room, choose_pools
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.sizes import parse_size

TOKENS = TokenBytes(host_row=1000, gpu_row=1000, index=200, host_map=8, gpu_map=16)
SIZES = st.one_of(st.just(Size("auto")), st.integers(1, 40_000).map(lambda blocks: Size("tokens", blocks * BLOCK_SIZE)))


def device_bytes(pools: Pools, *, shared: bool) -> int:
    host = TOKENS.index + TOKENS.host_map + (TOKENS.host_row if shared else 0)
    return pools.host_tokens * host + pools.gpu_tokens * (TOKENS.gpu_row + TOKENS.gpu_map)


@settings(max_examples=300, deadline=None)
@given(
    host=SIZES,
    gpu=SIZES,
    device=st.integers(0, 3 * 10**9),
    host_bytes=st.integers(10**6, 3 * 10**9),
    shared=st.booleans(),
    longest=st.integers(1, 200_000),
    topk=st.sampled_from([32, 2048]),
    wanted=st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_what_fits_is_inside_and_advice_works(
    host: Size, gpu: Size, device: int, host_bytes: int, shared: bool, longest: int, topk: int, wanted: int | None
) -> None:
    room = Room(
        device_bytes=device,
        device_total_bytes=device,
        host_bytes=host_bytes,
        usable_host_bytes=None if shared else host_bytes,
    )
    need = Need(
        longest_row=longest,
        index_topk=topk,
        wanted_tokens=None if wanted is None else longest + wanted,
        max_num_seqs=32,
    )
    pools = choose_pools(TOKENS, CacheConfig(host_pool=host, gpu_pool=gpu), room, need)
    assert pools.host_tokens % BLOCK_SIZE == pools.gpu_tokens % BLOCK_SIZE == 0
    assert pools.min_host_tokens >= longest
    if host.kind == "tokens":
        assert pools.host_tokens == host.value
    if gpu.kind == "tokens":
        assert pools.gpu_tokens == gpu.value
    if not pools.problems:
        assert device_bytes(pools, shared=shared) <= device
        assert pools.host_tokens * TOKENS.host_row <= host_bytes or shared
        assert pools.gpu_tokens >= pools.min_gpu_tokens > min(topk, longest, pools.host_tokens) - BLOCK_SIZE
        return
    (suggestion,) = {problem.suggestion for problem in pools.problems}
    if suggestion:
        words = suggestion.split()
        advice = {name: parse_size(value, name) for name, value in zip(words[::2], words[1::2])}
        asked = CacheConfig(host_pool=advice.get("--host-pool", host), gpu_pool=advice.get("--gpu-pool", gpu))
        assert not choose_pools(TOKENS, asked, room, need).problems
    elif host.kind == "tokens" or gpu.kind == "tokens":
        # Nothing is suggested only when even the smallest pools do not fit.
        smallest = CacheConfig(host_pool=Size("tokens", BLOCK_SIZE), gpu_pool=Size("tokens", pools.min_gpu_tokens))
        tiny = choose_pools(TOKENS, smallest, room, need)
        assert tiny.problems or host.kind == "auto"
