"""Which steps a run may take without the cache manager, so that their graphs are ready when it starts. No torch.

An estimate for capturing only: what it misses is captured when it is needed, and steps follow the cache's own state.
"""

from echo_batch.engine.plan import Plan


def stays_resident(plan: Plan) -> bool:
    """Whether all tokens that can ever be in the host pool at once fit the GPU pool: then no step is managed."""
    cache, known = plan.cache, plan.input
    if cache.host_tokens <= cache.gpu_tokens:
        return True
    # Slots are given out from the lowest on, so a job of few tokens never touches the others.
    return known is not None and plan.num_workers == 1 and 0 < known.total_row_tokens <= cache.gpu_tokens


def resident_buckets(plan: Plan) -> tuple[int, ...]:
    """Decode buckets whose rows, at the input's mean length, fit the GPU pool together."""
    if stays_resident(plan):
        return plan.decode_buckets
    cache, known = plan.cache, plan.input
    mean_row = cache.index_topk
    if known is not None and known.num_good_rows > 0:
        mean_row = max(1, known.total_row_tokens // known.num_good_rows)
    rows = min(plan.max_num_seqs, max(1, cache.gpu_tokens // mean_row))
    return tuple(bucket for bucket in plan.decode_buckets if bucket <= plan.bucket(rows))
