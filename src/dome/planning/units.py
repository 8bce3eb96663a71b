"""One set of units for sizes, wherever they are told: decimal, as networks count."""

GIGA = 1e9
_UNITS = ((1e12, "TB"), (GIGA, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(num_bytes: float) -> str:
    """A number of bytes with three digits, in the unit that fits them.

    Example:
        >>> size(31_216_800)
        '31.2 MB'
    """
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"
