"""D: whose turn it is when the cache is full. Pure, scheduling thread only.

vLLM asks its waiting requests in the order of their arrival and stops at the first one for which
it has no blocks. A request that P answers late is asked again from the front of that order, while
later ones may have allocated and received theirs: if it stops vLLM there, those never run and never
give their blocks back. So in a step after one that ended like this it is to be passed over, as long
as another request has everything and has not been reached.
"""


class Turns:
    """What vLLM was told in this step, and what it made of it."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._arrived: set[str] = set()
        self._was_full = False

    def must_pass(self, request_id: str) -> bool:
        """Whether a request that needs blocks is to let those behind it go first."""
        return self._was_full and bool(self._arrived - {request_id})

    def on_asked(self, request_id: str) -> None:
        """vLLM allocates blocks for the request now, or stops."""
        self._asked.add(request_id)

    def on_arrived(self, request_id: str) -> None:
        """vLLM may run the request as soon as it comes to it."""
        self._arrived.add(request_id)

    def on_placed(self, request_id: str) -> None:
        """vLLM has allocated what the request needs, or forgets it."""
        self._asked.discard(request_id)
        self._arrived.discard(request_id)

    def end_step(self) -> None:
        """vLLM has asked whom it would."""
        self._was_full = bool(self._asked)
        self._asked.clear()
