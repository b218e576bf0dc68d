"""Counts as text for a person: bytes and FLOPs with their units."""

GIB, MIB, KIB = 1024**3, 1024**2, 1024
_FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


def gib(count: int) -> str:
    """Bytes: GiB with one decimal from 1 GiB on, MiB below, KiB below 1 MiB."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / KIB:.0f} KiB"


def flops(count: int) -> str:
    """FLOPs in the largest unit that leaves one digit before the point; empty for none."""
    if not count:
        return ""
    unit, name = next(((u, n) for u, n in _FLOPS if count >= u), (1, "FLOP"))
    return f"{count / unit:.1f} {name}"
