"""A short request that comes late, beside long ones that came early."""

from __future__ import annotations

import asyncio
import time

from benchmarks.load import raw_client
from benchmarks.load.arrivals import prompts
from benchmarks.load.outcomes import Check, equal, holds, told
from benchmarks.load.served import ServerProcess, Setting, greedy

SHORT = 8


async def late_short(setting: Setting) -> list[Check]:
    """All rows but one write long texts when the short request comes. It must not wait for any of them."""
    with ServerProcess(setting, "late_short") as server:
        rows, window = await server.rows(), await server.window()
        pieces = prompts(rows + 1, 64, setting.seed)
        begin = time.perf_counter()
        begun = [asyncio.Event() for _ in range(rows - 1)]
        long = [
            asyncio.create_task(raw_client.stream(server.port, greedy(prompt, window - 128), begun=event))
            for prompt, event in zip(pieces, begun, strict=False)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        late = time.perf_counter() - begin
        short = await raw_client.complete(server.port, greedy(pieces[-1], SHORT))
        running = sum(not task.done() for task in long)
        ended = await asyncio.gather(*long)
        return [
            equal("status of the short request", short.status, 200),
            equal("long texts still being written when it ended", running, rows - 1),
            holds("long texts that are whole", all(text.whole for text in ended),
                  str(sum(text.whole for text in ended)), str(rows - 1)),
            told(f"the short one ({SHORT} tokens, {late:.2f} s late) took", f"{1e3 * short.seconds:.0f} ms"),
            told(f"the long ones ({window - 128} tokens) took", f"{max(text.seconds for text in ended):.2f} s"),
            *await server.end(),
        ]  # fmt: skip
