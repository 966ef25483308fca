"""The clients of a world and the proxy between them and its engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import Leg, Life
from kv_reference import KVModel
from pairs import PREFILL_LEG
from sim_threads import SimEvent

if TYPE_CHECKING:
    from world import World

MAX_PROMPT = 180
METASERVER = "http://127.0.0.1:8000/v1/metaserver"


class Traffic:
    """All requests of a world, each a task of the proxy's process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hub = world.hub
        self._settings = world.settings
        self._model: KVModel | None = None
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.random = random.Random(f"traffic {world.settings.seed}")
        self.num_faults: dict[str, int] = {}
        self._flows = {
            "pull": self._pull,
            "push": self._push,
            "decode first": self._decode_first,
        }
        self._awaited: dict[str, tuple[Leg, Life]] = {}
        """Decode legs that will post to the metaserver, and the P that is to get their prompts."""
        self._num_open = 0
        self._is_sent = False

    @property
    def is_over(self) -> bool:
        return self._is_sent and not self._num_open

    def start(self) -> None:
        self._hub.start(self._world.proxy, self._send_all, "clients")

    def reference(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens that follow a prompt."""
        if self._model is None:
            self._model = self._world.lives[0].spec.model
        key = tuple(prompt)
        known = self._known.get(key, [])
        if len(known) < count:
            known = self._known[key] = _generate(self._model, prompt, count)
        return known[:count]

    def send_plain(self, life: Life) -> None:
        """A request of no other engine's concern."""
        leg = self._leg(f"plain-{life.name}", "plain", [1, 2, 3])
        life.submit(leg, None)

    def send_between_all(self, name: str) -> list[Leg]:
        """A prompt from every P to every D, one after the other; returns the legs at D."""
        legs: list[Leg] = []
        for p in self._world.ps:
            for d in self._world.ds:
                number = f"{name}-{len(legs)}"
                # Like no other, so that no prefix cache has it.
                prompt = [1000 + len(legs), len(name)] * 30
                at_p = self._leg(f"p-{number}", "p", prompt)
                legs.append(self._leg(f"d-{number}", "d", prompt, 4))
                hand_over = partial(self._hand_over, p, d, at_p, legs[-1])
                self._hub.start(self._world.proxy, hand_over, number)
        return legs

    def _hand_over(self, p: Life, d: Life, at_p: Leg, at_d: Leg) -> None:
        p.submit(at_p, dict(PREFILL_LEG))
        at_p.ended.wait()
        self._world.follow(at_d)
        d.submit(at_d, at_p.kv_transfer_params)

    def _send_all(self) -> None:
        for number in range(self._settings.num_requests):
            self._hub.sleep(self.random.expovariate(1 / self._settings.mean_gap_s))
            flow = self._flows[self.random.choice(self._settings.flows)]
            self._num_open += 1
            self._hub.start(self._world.proxy, partial(self._serve, flow, number), f"{number}")
        self._is_sent = True

    def _serve(self, flow: Any, number: int) -> None:
        try:
            flow(number)
        finally:
            self._num_open -= 1

    # Flows

    def _pull(self, number: int) -> None:
        prompt = self._prompt(number)
        p = self.random.choice(self._world.ps)
        at_p = self._leg(f"p-{number}", "p", prompt, self.random.choice([1, 1, 1, 12]))
        p.submit(at_p, dict(PREFILL_LEG))
        self._perhaps_abort(at_p)
        at_p.ended.wait()
        params = at_p.kv_transfer_params
        if self._is_lost() or at_p.end == "aborted":
            return
        self._hub.sleep(self._pause_s())
        twins = 2 if self.random.random() < self._settings.twin_chance else 1
        legs = [self._leg(f"d-{number}-{i}", "d", prompt, self._length()) for i in range(twins)]
        for leg in legs:
            leg.peer = p
            self._submit_d(leg, params)
        for leg in legs:
            leg.ended.wait()
        if self.random.random() < self._settings.retry_chance:
            # The same ticket once more, which P has perhaps forgotten.
            self._count("retry")
            again = self._leg(f"d-{number}-again", "d", prompt, self._length())
            again.peer = p
            self._submit_d(again, params)
            again.ended.wait()

    def _push(self, number: int) -> None:
        prompt = self._prompt(number)
        self._world.push_journal.prompts[f"transfer-{number}"] = prompt
        end = self._both_legs(str(number), f"transfer-{number}", prompt)
        if end != "length" and self.random.random() < self._settings.retry_chance:
            # With the same transfer id, which P or D may still know.
            self._count("retry")
            self._both_legs(f"{number}-again", f"transfer-{number}", prompt)

    def _both_legs(self, name: str, transfer_id: str, prompt: list[int]) -> str:
        """Returns how the decode leg has ended; empty if there was none."""
        p = self.random.choice(self._world.ps)
        if not p.takes_requests:
            return ""
        at_p = self._leg(f"p-{name}", "p", prompt, self.random.choice([1, 1, 1, 12]))
        at_d = self._leg(f"d-{name}", "d", prompt, self._length())
        at_d.peer = p
        p_params = PREFILL_LEG | {"transfer_id": transfer_id}
        d_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": "127.0.0.1",
            "remote_port": p.control_port,
            "transfer_id": transfer_id,
        }
        legs = [at_p, at_d]
        self.random.shuffle(legs)
        if self._is_lost():
            legs.pop()
        for leg in legs:
            if leg is at_p:
                p.submit(leg, p_params)
                self._perhaps_abort(leg)
            else:
                self._submit_d(leg, d_params)
            self._hub.sleep(self._pause_s())
        for leg in legs:
            leg.ended.wait()
        return at_d.end

    def _decode_first(self, number: int) -> None:
        p = self.random.choice(self._world.ps)
        at_d = self._leg(f"d-{number}", "d", self._prompt(number), self._length())
        at_d.peer = p
        self._awaited[at_d.request_id] = at_d, p
        params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": METASERVER}
        self._submit_d(at_d, params)
        at_d.ended.wait()
        del self._awaited[at_d.request_id]

    def on_post(self, body: dict[str, Any], answer: Callable[[str], None]) -> None:
        """A D asks the metaserver for a prefill; the answer comes when P has finished."""
        if body["request_id"] in self._awaited and not self._is_lost():
            self._hub.start(self._world.proxy, lambda: self._prefill(body, answer), "metaserver")
        else:
            answer("404")

    def _prefill(self, body: dict[str, Any], answer: Callable[[str], None]) -> None:
        if body["request_id"] not in self._awaited:
            return
        at_d, p = self._awaited[body["request_id"]]
        self._hub.sleep(self._pause_s())
        request_id = at_d.request_id.replace("d-", "p-")
        at_p = self._leg(request_id, "p", at_d.prompt, self.random.choice([1, 1, 1, 12]))
        self._world.push_journal.prompts[body["transfer_id"]] = at_d.prompt
        p.submit(at_p, body)
        self._perhaps_abort(at_p)
        at_p.ended.wait()
        answer("" if at_p.end == "length" else "502")

    # What they have in common

    def _submit_d(self, leg: Leg, params: dict[str, Any] | None) -> None:
        self._world.follow(leg)
        leg.submitted_s = self._hub.now_s
        self.random.choice(self._world.ds).submit(leg, None if params is None else dict(params))
        self._perhaps_abort(leg)

    def _leg(self, request_id: str, role: str, prompt: list[int], max_tokens: int = 1) -> Leg:
        return Leg(request_id, role, prompt, max_tokens, self._hub.now_s, SimEvent(self._hub))

    def _prompt(self, number: int) -> list[int]:
        """Mostly its own; some begin like others, for the prefix caches."""
        length = self.random.randint(2, MAX_PROMPT)
        seed = self.random.choice([number, number, number, number % 7])
        return [(seed * 131 + 17 * i * i + i) % 1000 for i in range(length)]

    def _length(self) -> int:
        return self.random.randint(1, 8)

    def _pause_s(self) -> float:
        if self.random.random() < self._settings.late_chance:
            self._count("late client")
            return self.random.uniform(3.0, 20.0)
        return self.random.choice([0.0, 0.001, 0.01, 0.1])

    def _is_lost(self) -> bool:
        if self.random.random() >= self._settings.lost_client_chance:
            return False
        self._count("lost client")
        return True

    def _perhaps_abort(self, leg: Leg) -> None:
        if self.random.random() >= self._settings.abort_chance or leg.life is None:
            return
        life = leg.life
        after_s = self.random.choice([0.0, 0.003, 0.03, 0.3]) * self.random.random()

        def abort() -> None:
            if not leg.is_over:
                self._count(f"abort at {leg.role.upper()}")
                life.abort(leg)

        self._hub.call_later(after_s, abort)

    def _count(self, name: str) -> None:
        self.num_faults[name] = self.num_faults.get(name, 0) + 1


def _generate(model: KVModel, prompt: Sequence[int], count: int) -> list[int]:
    """As ``KVModel.generate``, which computes all states anew for each token."""
    states = model.states(prompt)
    tokens: list[int] = []
    heads = slice(None)
    for _ in range(count):
        total, last = 0, len(states) - 1
        for layer in range(model.num_layers):
            first = model.first_visible(layer, last)
            words = model.words(layer, states[first:], heads)
            total += model.digest(layer, first, words, heads)
        tokens.append(model.token(total))
        states = np.append(states, model.states(tokens[-1:], int(states[-1])))
    return tokens
