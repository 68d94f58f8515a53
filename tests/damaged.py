"""Text and bytes as disks, networks and editors damage them."""

from __future__ import annotations

import random

ODD = [b"\x00", b"\xff", b"\xc3\x28", b" ", b"\t", b"\n", b"\r", b"\r\n", b"-", b"+", b"x", b"_"]
ODD += [b"g", b".", b"0x", b'"', b"0" * 30, b"f" * 17, b"9" * 19, b"\xef\xbb\xbf", b"\x1a"]


def damage(text: bytes, dice: random.Random) -> bytes:
    """One to three changes of the kinds that disks, networks and editors make."""
    for _ in range(dice.randint(1, 3)):
        at, until = sorted((dice.randrange(len(text) + 1), dice.randrange(len(text) + 1)))
        match dice.randrange(8):
            case 0:
                text = text[:at] + dice.randbytes(1) + text[at + 1 :]
            case 1 | 2:
                text = text[:at] + dice.choice(ODD) + text[at:]
            case 3:
                text = text[:at] + dice.choice(ODD) + text[at + dice.randint(1, 3) :]
            case 4:
                text = text[:at] + text[min(until, at + dice.randint(1, 300)) :]
            case 5:
                text = text[:at] + text[at : at + dice.randint(1, 300)] + text[at:]
            case 6:
                text = text[: max(1, until)]
            case 7:
                fields = text.split(b"\t")
                one, other = dice.randrange(len(fields)), dice.randrange(len(fields))
                fields[one], fields[other] = fields[other], fields[one]
                text = b"\t".join(fields)
        if not text:
            return b"\n"
    return text
