"""The Python face: `Engine(model).generate(prompts)`. The same parts as a job, without files, parts and resume.

Prompts and completions live in memory here: for large inputs use `echo-batch run`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from echo_batch.config import RunConfig
from echo_batch.config_file import make_config
from echo_batch.engine.build import build_core
from echo_batch.engine.hardware import detect_hardware
from echo_batch.engine.plan import Plan
from echo_batch.errors import ConfigError
from echo_batch.hub import resolve_model
from echo_batch.io.requests import RequestBuilder, base_sampling
from echo_batch.io.schema import Record
from echo_batch.preflight import inspect_model, make_builder, make_chat, plan_for
from echo_batch.request import Completion, Request, RowFailure, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a chat: a list of {"role": ..., "content": ...}."""

_PULL_PROMPTS = 32
_WITHOUT_EFFECT = ("output.", "report.", "input.paths", "input.limit", "input.prompt_")
"""Settings of files, which an Engine does not read or write."""


class Engine:
    """A loaded model that completes prompts. Use it as a context manager, or call `close`.

    `model` is a checkpoint directory, a Hub id, or "demo" for the bundled model. Pools are sizes as on the command
    line: "auto", "1.8M", "80GiB", or a number of tokens. `settings` takes every other key of `--set`, such as
    {"cache.offload": False}. Raises ConfigError, ModelError, and EngineLostError when the device fails.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        host_pool: str | int = "auto",
        gpu_pool: str | int = "auto",
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        given = {
            "model.path": str(model),
            "model.tokenizer": None if tokenizer is None else str(tokenizer),
            "engine.device": device,
            "model.dtype": dtype,
            "cache.host_pool": host_pool,
            "cache.gpu_pool": gpu_pool,
            "engine.max_num_seqs": max_num_seqs,
            "model.max_model_len": max_model_len,
            **(settings or {}),
        }
        if idle := [key for key in settings or {} if key.startswith(_WITHOUT_EFFECT)]:
            raise ConfigError(f"settings of files have no effect here: {', '.join(idle)}")
        config = make_config({key: value for key, value in given.items() if value is not None})
        path = resolve_model(
            str(model),
            weights=config.model.load_format != "dummy",
            trust_remote_code=config.model.trust_remote_code,
        )
        self._config: RunConfig = replace(config, model=replace(config.model, path=path))
        self._model = inspect_model(self._config)
        self.plan: Plan = plan_for(self._config, self._model, detect_hardware(self._config.engine.device), None)
        self.default_sampling: SamplingParams = base_sampling(self._config, self._model.generation_config)
        """What prompts get without SamplingParams: the model's generation_config.json over the built-in values."""
        self._chat = make_chat(self._config, self._model)
        tokenizer_ = self._model.tokenizer
        self._core = build_core(
            self._model.config,
            self._config,
            self.plan,
            make_detokenizer=None if tokenizer_ is None else tokenizer_.make_detokenizer,
        )
        self._is_busy = self._is_closed = False

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete all prompts; the results are in their order.

        `sampling_params` are for all prompts, or one for each; None takes `default_sampling`. A prompt that cannot be
        done has a `failure` in its completion and disturbs no other. A prompt's position stands for the row id in
        random numbers, so equal calls give equal samples.
        """
        completions = {completion.row_id: completion for completion in self.stream(prompts, sampling_params)}
        return [completions[i] for i in range(len(prompts))]

    def stream(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Completion]:
        """Like `generate`, but each completion comes as soon as it is finished; `row_id` is its prompt's position.

        Closing the iterator abandons the prompts that are not finished. One call at a time.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list: give [text]")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.default_sampling] * len(prompts)
        else:
            params = list(sampling_params)
            if len(params) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling params")
        return self._stream(prompts, params)

    def close(self) -> None:
        """Give the memory of the pools back. Once is enough."""
        if not self._is_closed:
            self._is_closed = True
            self._core.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Completion]:
        if self._is_closed:
            raise RuntimeError("this engine is closed")
        if self._is_busy:
            raise RuntimeError("this engine is busy: finish or close the other stream first")
        self._is_busy = True
        failed: list[Completion] = []
        try:
            with closing(self._core.run(self._requests(prompts, params, failed))) as steps:
                for completion in steps:
                    yield from failed
                    failed.clear()
                    if completion is not None:
                        yield completion
            yield from failed
        finally:
            self._is_busy = False

    def _requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], failed: list[Completion]
    ) -> Iterator[Request]:
        """Requests, tokenized a few at a time as the engine asks for them; prompts without one go to `failed`."""
        builders: dict[SamplingParams, RequestBuilder] = {}
        todo = iter(range(len(prompts)))
        while positions := list(islice(todo, _PULL_PROMPTS)):
            for i in positions:
                if params[i] not in builders:
                    builders[params[i]] = self._builder(params[i])
            # Neighbours with the same parameters are tokenized together.
            for i, result in self._built(positions, prompts, params, builders):
                if isinstance(result, RowFailure):
                    failed.append(Completion(row_id=i, failure=result))
                else:
                    yield result

    def _built(
        self,
        positions: Sequence[int],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        builders: Mapping[SamplingParams, RequestBuilder],
    ) -> Iterator[tuple[int, Request | RowFailure]]:
        for sampling in dict.fromkeys(params[i] for i in positions):
            rows = [i for i in positions if params[i] == sampling]
            records = [Record(row_id=i, values=_row_values(prompts[i])) for i in rows]
            yield from zip(rows, builders[sampling].build_many(records), strict=True)

    def _builder(self, sampling: SamplingParams) -> RequestBuilder:
        every_field = frozenset(sampling.__dataclass_fields__)
        config = replace(self._config, sampling=sampling, explicit_sampling=every_field)
        return make_builder(config, self._model, self._chat, context_tokens=self.plan.max_model_len)


def _row_values(prompt: Any) -> dict[str, Any]:
    """A prompt as the columns of an input row."""
    if hasattr(prompt, "tolist"):  # arrays of token ids
        prompt = prompt.tolist()
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return {"prompt": prompt}
    if any(isinstance(item, Mapping) for item in prompt):
        return {"messages": [dict(item) if isinstance(item, Mapping) else item for item in prompt]}
    return {"prompt_token_ids": list(prompt)}
