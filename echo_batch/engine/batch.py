"""Device state of the decode batch: one row a request, allocated once, updated in stream order.

The decode step reads and advances these tensors without the host (token feedback, positions, finish flags); the host
only writes rows that join or leave. Nothing here is reallocated, so a captured graph may point at it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echo_batch.cache.slots import slots_of_blocks
from echo_batch.engine.sequence import Sequence
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.reference.sampling import SamplingTensors

MAX_STOP_IDS = 32
"""Room for EOS and stop ids of one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """Tensors of `capacity` rows.

    token_ids int64: the step's input token; positions int32: its position; active bool: row takes part; block_table
    int32 `[capacity, max_blocks]`, -1 padded; stop_ids int64 `[capacity, MAX_STOP_IDS]`, -1 padded; last_position
    int32: position of the last token that may be generated. `sampling.position` is derived from `positions`.
    """

    token_ids: Tensor
    positions: Tensor
    active: Tensor
    block_table: Tensor
    stop_ids: Tensor
    last_position: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    row_id: Tensor
    predicted: Tensor
    """fp32 `[selection groups, capacity]`: running mean of each row's k-th index score, NaN before the first."""

    @staticmethod
    def allocate(capacity: int, max_model_len: int, num_groups: int, device: torch.device) -> "BatchState":
        """All rows inactive."""

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((capacity, *shape), value, dtype=dtype, device=device)

        return BatchState(
            token_ids=full(0, torch.int64),
            positions=full(0, torch.int32),
            active=full(False, torch.bool),
            block_table=full(-1, torch.int32, -(-max_model_len // BLOCK_SIZE)),
            stop_ids=full(-1, torch.int64, MAX_STOP_IDS),
            last_position=full(0, torch.int32),
            temperature=full(0, torch.float32),
            top_p=full(1, torch.float32),
            top_k=full(0, torch.int32),
            min_p=full(0, torch.float32),
            seed=full(0, torch.int64),
            row_id=full(0, torch.int64),
            predicted=torch.full((num_groups, capacity), float("nan"), device=device),
        )

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def sampling(self, rows: slice | Tensor, positions: Tensor) -> SamplingTensors:
        """Sampling parameters of some rows for tokens at `positions` int32."""
        return SamplingTensors(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            row_id=self.row_id[rows],
            position=positions,
        )

    def set_row(self, sequence: Sequence, stop_ids: tuple[int, ...]) -> None:
        """Fill the row of a sequence that joins; it stays inactive until its first token is known."""
        row, sampling = sequence.row, sequence.request.sampling
        device = self.device
        table = torch.full((self.block_table.shape[1],), -1, dtype=torch.int32)
        table[: len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
        stops = torch.full((MAX_STOP_IDS,), -1, dtype=torch.int64)
        stops[: len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
        self.block_table[row] = table.to(device, non_blocking=True)
        self.stop_ids[row] = stops.to(device, non_blocking=True)
        self.active[row] = False
        self.positions[row] = sequence.num_prompt_tokens - 1
        self.last_position[row] = sequence.max_context - 1
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.row_id[row] = sequence.request.row_id
        self.predicted[:, row] = float("nan")

    def written_slots(self, row: int, num_blocks: int) -> Tensor:
        """Slots of the row's tokens whose KV rows are written, once the steps launched so far are done: int32
        `[num_blocks * BLOCK_SIZE]`, -1 for the others. `num_blocks`: length of the row's block table."""
        slots = slots_of_blocks(self.block_table[row, :num_blocks])
        position = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
        # The last known token is the next step's input: its row is not there yet.
        return torch.where(position < self.positions[row], slots, -1)

    def force_tokens(self, rows: list[int], token_ids: list[int]) -> None:
        """Make these the next inputs of the rows, whatever was sampled (teacher forcing)."""
        pair = torch.tensor([rows, token_ids], dtype=torch.int64, pin_memory=self.device.type == "cuda")
        pair = pair.to(self.device, non_blocking=True)
        self.token_ids[pair[0]] = pair[1]

    def clear_row(self, row: int) -> None:
        """The row becomes padding from the next step on."""
        self.active[row] = False
        self.block_table[row] = -1
