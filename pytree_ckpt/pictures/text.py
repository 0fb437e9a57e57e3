"""Words and numbers for people."""


def plain(text: object) -> str:
    r"""One line without anything that a terminal obeys, or that shows as something else.

    Example:
        >>> plain("w\x1b[2J\n\u202e")
        'w\\x1b[2J\\n\\u202e'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def size_text(nbytes: int) -> str:
    """Bytes with three digits.

    Example:
        >>> size_text(999), size_text(1 << 20), size_text(1500 << 30)
        ('999 B', '1.00 MiB', '1.46 TiB')
    """
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 999.5:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{nbytes} B"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {unit}"


def duration_text(seconds: float) -> str:
    """A duration in its largest unit.

    Example:
        >>> duration_text(0.0042), duration_text(75), duration_text(9000), duration_text(2e5)
        ('4.2 ms', '75 s', '2.5 h', '2.3 days')
    """
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def percent_text(share: float) -> str:
    """A part of a whole.

    Example:
        >>> percent_text(0.5), percent_text(0.0123), percent_text(1e-6)
        ('50%', '1.2%', '<0.1%')
    """
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
