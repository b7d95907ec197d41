"""Event files of thousands of ranks, for the figures of the live page: written fast, with a slow rank that is known."""

from __future__ import annotations

from pathlib import Path

SLOW_RANK, SLOW_S = 1234, 0.04


def write_many(directory: Path, *, ranks: int, steps: int) -> int:
    """Writes `steps` lines for each of `ranks`, of which `SLOW_RANK` works 40 ms longer a step; the bytes written."""
    (directory / "events").mkdir(parents=True)
    (directory / "run.toml").write_text(f'[run]\nname = "many"\nsteps = {steps}\n')
    plain, slow = (_lines(steps, extra_s).encode() for extra_s in (0.0, SLOW_S))
    for rank in range(ranks):
        lines = slow if rank == SLOW_RANK else plain
        (directory / "events" / f"rank-{rank:05d}.jsonl").write_bytes(lines)
    return ranks * len(plain)


def _lines(steps: int, extra_s: float) -> str:
    return "".join(
        f'{{"step":{step},"time":{1.76e9 + step / 10},"generation":0,"values":{{"loss/train":{2 + 1 / step},"lr":0.001,'
        f'"grad/norm":1.0,"samples/consumed":{64.0 * step},"tokens/consumed":{65536.0 * step},"time/step":0.1,'
        f'"time/data":0.001,"time/forward_backward":{0.06 + extra_s},"time/sync_exposed":{0.03 - 0.5 * extra_s},'
        f'"time/optimizer":0.005,"time/checkpoint_stall":0.0,"wire/bytes_sent":3650000.0,"wire/inside_bytes":3650000.0,'
        f'"wire/between_bytes":0.0,"wire/all_reduce/bytes_sent":3650000.0,"wire/all_reduce/exposed_s":0.02,'
        f'"wire/all_reduce/hidden_s":0.01,"memory/peak_bytes":123456789.0,'
        f'"throughput/samples_per_second":640.0,"throughput/tokens_per_second":655360.0}}}}\n'
        for step in range(1, steps + 1)
    )
