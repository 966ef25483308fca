"""What a model runner remembers about the requests of its batch."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(eq=False)
class RequestState:
    """Tokens and block tables of one request, as far as this worker was told."""

    req_id: str
    tokens: list[int]
    block_ids: tuple[list[int], ...]
    num_prompt_tokens: int


@dataclass
class Chunk:
    """Positions of one request that a step computes; the block tables are those of that step."""

    request: RequestState
    start: int
    count: int
    block_ids: tuple[list[int], ...]

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last known token. Valid once earlier steps computed."""
        return self.start + self.count == len(self.request.tokens)


class BatchState:
    """The requests that a worker knows."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestState] = {}
        self._last_batch: set[str] = set()

    def update(self, output: SchedulerOutput) -> list[Chunk]:
        """Apply a step's message and return what the step has to compute."""
        for req_id in output.finished_req_ids:
            self.requests.pop(req_id, None)
            self._last_batch.discard(req_id)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            prompt = list(new.prompt_token_ids or ())
            block_ids = tuple(list(ids) for ids in new.block_ids)
            self.requests[new.req_id] = RequestState(new.req_id, prompt, block_ids, len(prompt))
        self._update_cached(output, starts)
        self._last_batch = set(output.num_scheduled_tokens)
        return [
            Chunk(
                self.requests[req_id],
                starts[req_id],
                count,
                tuple(list(ids) for ids in self.requests[req_id].block_ids),
            )
            for req_id, count in output.num_scheduled_tokens.items()
        ]

    def _update_cached(self, output: SchedulerOutput, starts: dict[str, int]) -> None:
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            request = self.requests[req_id]
            starts[req_id] = cached.num_computed_tokens[index]
            known = request.num_prompt_tokens + cached.num_output_tokens[index]
            del request.tokens[known:]
            resumed = req_id in cached.resumed_req_ids
            if (resumed or req_id not in self._last_batch) and req_id in cached.all_token_ids:
                request.tokens[:] = cached.all_token_ids[req_id]
            new_ids = cached.new_block_ids[index]
            if resumed:
                assert new_ids is not None
                request.block_ids = tuple(list(ids) for ids in new_ids)
            elif new_ids is not None:
                for ids, more in zip(request.block_ids, new_ids, strict=True):
                    ids.extend(more)

    def append(self, req_id: str, token: int) -> None:
        """Take over a sampled token, if the request is still known."""
        if (request := self.requests.get(req_id)) is not None:
            request.tokens.append(token)
