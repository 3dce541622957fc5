"""Clients: each sends a request, reads the answer or hangs up, and sends the next."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vtoken_bench.soak.asks import Ask

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

__all__ = ["Tally", "send_all"]

_PATIENCE_SECONDS = 300  # no answer for that long is an error
_KEPT_ERRORS = 20


@dataclass(slots=True)
class Tally:
    """What came of the requests: ``done``, ``aborted``, ``rejected``, ``errors``; and the first errors' words."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def add(self, ask: Ask, came: str) -> None:
        """``came``: one of the three good ends, or what went wrong."""
        is_good = came in {"finish": ("done",), "hang up": ("aborted", "done"), "be refused": ("rejected",)}[ask.plan]
        self.counts[came if is_good else "errors"] += 1
        if not is_good and len(self.errors) < _KEPT_ERRORS:
            self.errors.append(f"{ask.plan}, {len(ask.prompt)} + {ask.max_tokens} tokens, {ask.xargs}: {came}"[:500])


async def send_all(
    url: str,
    asks: Iterable[Ask],
    num_clients: int,
    make_body: Callable[[Ask], dict[str, Any]],
    tick: Callable[[], None],
) -> Tally:
    """Sends all requests, ``num_clients`` at a time. ``tick`` is called after each."""
    import aiohttp

    tally, left = Tally(), iter(asks)
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(_client(session, left, make_body, tally, tick) for _ in range(num_clients)))
    return tally


async def _client(
    session: "ClientSession",
    asks: Iterator[Ask],
    make_body: Callable[[Ask], dict[str, Any]],
    tally: Tally,
    tick: Callable[[], None],
) -> None:
    import aiohttp

    for ask in asks:
        try:
            came = await _send(session, ask, make_body(ask))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            came = repr(error)
        tally.add(ask, came)
        tick()


async def _send(session: "ClientSession", ask: Ask, body: dict[str, Any]) -> str:
    if ask.plan == "hang up" and not ask.streamed:
        try:
            return await asyncio.wait_for(_answer(session, ask, body), ask.hang_up_after / 1000)
        except TimeoutError:
            return "aborted"
    return await _answer(session, ask, body)


async def _answer(session: "ClientSession", ask: Ask, body: dict[str, Any]) -> str:
    async with session.post("/v1/completions", json=body) as response:
        if response.status == 400:
            return "rejected"
        if response.status != 200:
            return f"HTTP {response.status}: {await response.text()}"
        count = 0
        async for choice in _choices(response, ask.streamed):
            count += len(choice.get("token_ids") or ())
            if ask.plan == "hang up" and ask.streamed and count >= ask.hang_up_after:
                return "aborted"  # what is left unread closes the connection
    return "done" if count == ask.max_tokens else f"{count} tokens came"


async def _choices(response: "ClientResponse", streamed: bool) -> AsyncIterator[dict[str, Any]]:
    if not streamed:
        yield (await response.json())["choices"][0]
        return
    async for line in response.content:
        text = line.decode().removeprefix("data: ").strip()
        if text and text != "[DONE]":
            chunk = json.loads(text)
            if "error" in chunk:
                raise ValueError(text)
            for choice in chunk["choices"]:
                yield choice
